// Classify images.

import { send } from "./api.js";
import { dropZone, thumbnail } from "./images.js";
import { commands, quoted, server } from "./commands.js";
import { rejection } from "./rejection.js";
import { addTo, pendingImages, takeBack } from "./teach.js";
import { answerRow, button, counted, find, make, named, setText } from "./elements.js";

const BATCH = 16; // images in one request, so that the first answers come soon
const BATCH_BYTES = 16 * 2 ** 20;
const LIKELY = 3; // classes that can be chosen by one click

const status = find("classify-status");
const answers = find("answers");
const corrected = new Map(); // file of the next update → called when it is in there no more
let queue = Promise.resolve();

export function setUpClassify() {
  dropZone(find("classify-drop"), (files) => (queue = queue.then(() => classify(files))), "to classify", { once: true, hint: "Drop or paste images to classify them, or" });
  pendingImages.listeners.push(() => {
    for (const [file, gone] of [...corrected]) if (!pendingImages.has(file)) gone();
  });
  find("clear-answers").addEventListener("click", () => {
    answers.replaceChildren();
    find("clear-answers").hidden = true;
    setText(status, "");
    find("classify-drop").querySelector("button").focus();
  });
}

// Remove answers that name a class that was forgotten or renamed.
export function removeOutdated(names) {
  const known = new Set(names);
  for (const item of [...answers.children]) {
    if ([...item.querySelectorAll(".bars bdi")].some((each) => !known.has(each.textContent))) item.remove();
  }
  find("clear-answers").hidden = !answers.children.length;
}

async function classify(files) {
  const frames = files.map((file) => frame(file));
  answers.prepend(...frames.map((each) => each.item));
  find("clear-answers").hidden = false;
  let done = 0;
  for (const range of batches(files)) {
    setText(status, `Classifying ${counted(files.length - done, "image")} …`);
    await classifyBatch(files.slice(...range), frames.slice(...range));
    done = range[1];
  }
  setText(status, `${counted(files.length, "image")} classified, not stored. Is an answer wrong? Say what the image is, and teach it.`);
  const name = quoted(files.at(-1).name);
  find("classify-commands").replaceChildren(commands("", `curl -F files=@${name} '${server()}/api/classify?top=5${rejection()}'`, `engram predict MODEL ${name}${rejection() && ` --reject ${decodeURIComponent(rejection()).split("=")[1]}`}`));
}

async function classifyBatch(files, frames) {
  const form = new FormData();
  for (const file of files) form.append("files", file, file.name);
  try {
    const waiting = (seconds) => setText(status, `The server is busy. Trying again in ${seconds} s.`);
    const { predictions, calibrated } = await send(`/api/classify?top=5${rejection()}`, form, { waiting });
    frames.forEach((each, index) => fill(each, predictions[index], calibrated));
  } catch (problem) {
    for (const each of frames) fill(each, { problem: problem.message });
  }
}

// Ranges of files that fit into one request, as [from, to).
function batches(files) {
  const found = [];
  let [from, bytes] = [0, 0];
  files.forEach((file, index) => {
    if (index > from && (index - from === BATCH || bytes + file.size > BATCH_BYTES)) {
      found.push([from, index]);
      [from, bytes] = [index, 0];
    }
    bytes += file.size;
  });
  return [...found, [from, files.length]];
}

function frame(file) {
  const body = make("div", { className: "answer" }, make("p", { className: "muted", textContent: "…" }));
  const name = make("p", { className: "file muted small" }, named(file.name));
  const item = make("li", {}, make("div", { className: "thumbnail" }, thumbnail(file)), make("div", {}, name, body));
  return { item, body, file };
}

// Without calibration, probabilities only rank the classes and are not shown.
function fill({ body, file }, prediction, calibrated) {
  if (!prediction || prediction.problem) {
    const text = prediction?.problem ?? "There was no answer for this image.";
    body.replaceChildren(make("p", { className: "problem", textContent: text }));
    return;
  }
  const rows = prediction.top.map((each) => answerRow(each.class, each.probability, calibrated));
  const list = make("ol", { className: "bars", "aria-label": "The most likely classes" }, ...rows);
  const none = prediction.rejected ? [make("p", { className: "none" }, "None of these")] : [];
  list.classList.toggle("rejected", prediction.rejected);
  body.replaceChildren(...none, list, correction(file, prediction.top));
}

// What the image really is: one click adds it to the next update.
function correction(file, top) {
  const place = make("div", { className: "correction" });
  const input = make("input", { type: "text", list: "known-classes", autocomplete: "off", dir: "auto", maxLength: 300, placeholder: "another class", "aria-label": `This is another class: ${file.name}` });
  const choose = (name) => {
    addTo(name, [file]);
    const undo = button("Undo", () => {
      corrected.delete(file);
      takeBack(name, file);
      place.replaceChildren(...choices);
      place.querySelector("button").focus();
    });
    corrected.set(file, () => {
      corrected.delete(file);
      place.replaceChildren(make("p", { className: "muted small" }, "Corrected to ", named(name, "strong")));
    });
    place.replaceChildren(make("p", { className: "row", role: "status" }, make("span", {}, "In the next update as ", named(name, "strong")), undo));
    undo.focus();
  };
  const buttons = top.slice(0, LIKELY).map((each) => button(named(each.class), () => choose(each.class), { about: `This is ${each.class}` }));
  const enter = () => input.value.trim() && choose(input.value.trim());
  input.addEventListener("change", enter); // chosen from the list, or typed and left with Enter or Tab
  const choices = [make("p", { className: "row" }, make("span", { className: "muted small", textContent: "This is" }), ...buttons, input)];
  place.append(...choices);
  return place;
}
