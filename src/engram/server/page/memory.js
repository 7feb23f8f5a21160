// What the model knows and stores, and edits: forget, rename, merge, roll back.

import { post } from "./api.js";
import { loadEvidence } from "./evidence.js";
import { addImagesOf, clearOutcome, latest } from "./teach.js";
import { bar, button, counted, find, make, megabytes, moment, named, percent, setText } from "./elements.js";

const FILTER_FROM = 12; // classes
const dialog = find("question");

let changed = () => {};
let model = null;

export function setUpMemory(whenChanged) {
  changed = whenChanged;
  find("filter").addEventListener("input", filter);
}

export function showMemory(found) {
  model = found;
  if (!model) return;
  find("facts").replaceChildren(...facts().flatMap(([name, ...what]) => [make("dt", { textContent: name }), make("dd", {}, ...what)]));
  find("class-list").replaceChildren(...model.classes.map(classRow));
  find("filter-row").hidden = model.classes.length < FILTER_FROM;
  filter();
  showEvidence(model.version);
  find("version-list").replaceChildren(...model.history.toReversed().map(versionRow));
}

// How well each class is recognised; computed by the server after each change.
async function showEvidence(version) {
  try {
    const found = await loadEvidence();
    if (model?.version !== version || found.version !== version) return;
    for (const row of find("class-list").children) row.querySelector(".evidence").replaceChildren(...(found.classes.get(row.dataset.class) ?? []));
  } catch {
    for (const place of document.querySelectorAll(".evidence")) place.replaceChildren(); // the rest is shown without it
  }
}

function facts() {
  const { bytes, classes } = model;
  const seen = classes.reduce((sum, each) => sum + each.seen, 0);
  return [
    ["Classes", `${classes.length.toLocaleString("en")}, from ${counted(seen, "image")}`],
    ["Stored", `${megabytes(bytes.memory)}: features ${megabytes(bytes.features)}, images ${bytes.images ? megabytes(bytes.images) : "none"}`],
    ...(latest?.seen_bytes ? [["Last update", `its images took ${megabytes(latest.seen_bytes)}${bytes.images ? "" : "; none of them is stored"}`]] : []),
    ["Per class", `${megabytes(bytes.memory / classes.length)} on average, and ${megabytes(bytes.classifier / classes.length)} in the classifier`],
    ["Budget", ...budget()],
    ["Network", `${model.network}, ${megabytes(bytes.network)}; ${model.image_size === null ? "input: vectors" : `input: ${model.image_size} × ${model.image_size} pixels`}`],
    ["Classifier", model.classifier],
    ["Folder", `${megabytes(bytes.folder)}, with all versions`],
    ["Probabilities", calibrated()],
  ];
}

// The same as `Model.is_calibrated` in Python.
export const isCalibrated = ({ calibration }) => calibration.temperature !== 1 || calibration.error_after !== null;

function budget() {
  if (model.budget === null) return ["none"];
  const used = model.bytes.memory / model.budget;
  return [`${percent(used)} of ${megabytes(model.budget)}`, bar(used)];
}

// What `measuredAccuracy` says of a model.
export function accuracyOf({ accuracy, interval, classes, held_out_counts: { total, estimated } }) {
  const images = total.reduce((sum, each) => sum + each, 0);
  return { accuracy, interval, images, measured: total.filter((each) => each > 0).length, classes: classes.length, estimated };
}

function calibrated() {
  const { calibration } = model;
  if (!isCalibrated(model)) return "not calibrated: too few held-out images";
  if (calibration.error_after === null) return "calibrated before the last edit, not measured since";
  return `calibrated; expected calibration error ${calibration.error_after.toFixed(3)}, on ${counted(calibration.images, "held-out image")}`;
}

function holds(each) {
  const kinds = [counted(each.features, "feature vector")];
  if (each.images) kinds.push(counted(each.images, "image"));
  return `${kinds.join(" and ")}, ${megabytes(each.bytes)}`;
}

function classRow(each) {
  const edit = (text, open) => button(text, () => open(each), { about: `${text} ${each.name}` });
  const buttons = [button("Add images", () => addImagesOf(each.name), { about: `Add images of ${each.name}` }), edit("Rename", rename), model.classes.length > 1 ? edit("Merge", merge) : null, edit("Forget", forget)];
  const row = make("li", {},
    make("div", {}, make("p", { className: "class-name" }, named(each.name)), make("p", { className: "muted small", textContent: `${counted(each.seen, "image")} taught` })),
    make("div", { className: "evidence small" }, make("p", { className: "muted", textContent: "Measuring …" })),
    make("p", { className: "row" }, ...buttons),
  );
  row.dataset.class = each.name;
  row.dataset.name = each.name.toLowerCase();
  return row;
}

function filter() {
  const wanted = find("filter-row").hidden ? "" : find("filter").value.trim().toLowerCase();
  for (const row of find("class-list").children) row.hidden = !row.dataset.name.includes(wanted);
}

// The edited row is replaced, so the focus moves to the message.
async function change(path, value, place, done) {
  await post(path, value);
  clearOutcome(); // it may name another version
  await changed();
  setText(find(place), done);
  return find(place);
}

function field(text, control) {
  control.id = "question-field";
  return [make("label", { htmlFor: control.id }, ...text), control];
}

function rename(each) {
  const input = make("input", { type: "text", value: each.name, dir: "auto", autocomplete: "off", maxLength: 300 });
  question({
    heading: "Rename a class",
    body: [...field(["New name of ", named(each.name)], input), "Earlier versions and the history keep the old name."],
    go: "Rename",
    check: () => (!input.value.trim() ? "A class needs a name." : input.value.trim() === each.name ? "The class already has this name." : ""),
    act: () => change("/api/rename", { from: each.name, to: input.value.trim() }, "memory-status", `Renamed: it is “${input.value.trim()}” now.`),
  });
}

function merge(each) {
  const others = model.classes.filter((other) => other.name !== each.name);
  const select = make("select", {}, ...others.map((other) => make("option", { value: other.name, textContent: other.name })));
  question({
    heading: "Merge two classes",
    body: [...field([named(each.name), " becomes part of"], select), "That class then stands for both. It gets the stored features of both, within the budget."],
    go: "Merge",
    act: () => change("/api/merge", { class: each.name, into: select.value }, "memory-status", `Merged: “${select.value}” stands for both now.`),
  });
}

function forget(each) {
  const input = make("input", { type: "text", dir: "auto", autocomplete: "off", autocapitalize: "none", spellcheck: false });
  const stored = model.history.filter((event) => event.stored).map((event) => event.version).join(", ");
  question({
    heading: "Forget a class",
    body: [
      make("p", {}, "This deletes everything that is stored about ", named(each.name, "strong"), `: ${holds(each)}, its part of the classifier, and its name. It also deletes the details of the history of all classes and all present versions${stored ? ` (${stored})` : ""}. It cannot be undone.`),
      "The network’s weights do not change: if the network was trained on these images, that is not unlearned. Copies and exports of the model are not changed.",
      ...field(["To forget it, type ", named(each.name, "strong")], input),
    ],
    go: "Forget it for good",
    danger: true,
    check: () => (input.value.trim().normalize() === each.name.trim().normalize() ? "" : "That is not the name of the class. Nothing was changed."),
    act: () => change("/api/forget", { classes: [each.name] }, "memory-status", "Forgotten."),
  });
}

const learned = (event) =>
  [["new", "new"], ["more", "known"]]
    .filter(([kind]) => event.learned[kind])
    .map(([kind, word]) => `${counted(event.learned[kind], `${word} class`)} (${counted(event.learned[`${kind}_samples`], "image")})`)
    .join(", ");

function what({ action, details, ...event }) {
  if (action === "learn") return ["Learned ", learned(event) || "an update"];
  if (action === "rename" && details.from) return ["Renamed ", named(details.from), " to ", named(details.to)];
  if (action === "merge" && details.class) return ["Merged ", named(details.class), " into ", named(details.into)];
  if (action === "forget" && details.classes) return [`Forgot ${counted(details.classes, "class")}`];
  return [{ rename: "Renamed a class", merge: "Merged two classes", forget: "Forgot classes", save: "Saved from Python" }[action] ?? action];
}

function versionRow(event) {
  const state = event.in_use ? "in use" : event.stored ? "stored" : "gone";
  const row = make("li", {}, make("div", {},
    make("p", { className: event.in_use ? "in-use" : "" }, `${event.version}. `, ...what(event)),
    make("p", { className: "muted small", textContent: `${moment(event.created)}, ${state}` }),
  ));
  if (event.stored && !event.in_use) {
    row.append(make("p", { className: "row" }, button("Use this version", () => rollback(event), { about: `Use version ${event.version}` })));
  }
  return row;
}

function rollback(event) {
  question({
    heading: `Use version ${event.version}?`,
    body: [`The model answers as it did on ${moment(event.created)}. Version ${model.version} stays stored, so you can go back to it.`],
    go: `Use version ${event.version}`,
    act: () => change("/api/rollback", { to: event.version }, "history-status", `Version ${event.version} is in use.`),
  });
}

// Ask before an edit. `check()` returns an error message or "". On submit, `act()` is called: an error is shown in the
// dialog; otherwise the dialog closes and the element that `act()` returns gets the focus.
function question({ heading, body, go, danger = false, check = () => "", act }) {
  const [form, submit, problem] = [find("question-form"), find("question-go"), find("question-problem")];
  find("question-heading").textContent = heading;
  find("question-body").replaceChildren(...body.map((each) => (typeof each === "string" ? make("p", {}, each) : each)));
  submit.textContent = go;
  submit.classList.toggle("danger", danger);
  problem.textContent = "";
  find("question-cancel").onclick = () => dialog.close();
  form.onsubmit = async (event) => {
    event.preventDefault();
    problem.textContent = check();
    if (problem.textContent || submit.disabled) return;
    submit.disabled = true;
    try {
      const next = await act();
      dialog.close();
      next?.focus();
    } catch (error) {
      problem.textContent = error.message;
    } finally {
      submit.disabled = false;
    }
  };
  dialog.showModal();
  (form.querySelector("input, select") ?? find("question-cancel")).focus();
}
