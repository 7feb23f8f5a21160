// The dialog that asks before something is changed.

import { find, make } from "./words.js";

const dialog = find("question");

// Opens the dialog; `act()` is called when it is agreed to, and what it throws is said in the dialog, which stays open;
// what it returns has the focus then. `check()` returns a sentence where something is amiss.
export function question({ heading, body, go, danger = false, check = () => "", act }) {
  const [form, button, problem] = [find("question-form"), find("question-go"), find("question-problem")];
  find("question-heading").textContent = heading;
  find("question-body").replaceChildren(...body.map((each) => (typeof each === "string" ? make("p", {}, each) : each)));
  button.textContent = go;
  button.classList.toggle("danger", danger);
  problem.textContent = "";
  find("question-cancel").onclick = () => dialog.close();
  form.onsubmit = async (event) => {
    event.preventDefault();
    problem.textContent = check();
    if (problem.textContent || button.disabled) return;
    button.disabled = true;
    try {
      const next = await act();
      dialog.close();
      next?.focus();
    } catch (error) {
      problem.textContent = error.message;
    } finally {
      button.disabled = false;
    }
  };
  dialog.showModal();
  (form.querySelector("input, select") ?? find("question-cancel")).focus();
}
