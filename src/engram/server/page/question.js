// The dialog that asks before an edit.

import { find, make } from "./elements.js";

const dialog = find("question");

// Open the dialog. `check()` returns an error message or "". On submit, `act()` is called: an error is shown in the
// dialog; otherwise the dialog closes and the element that `act()` returns gets the focus.
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
