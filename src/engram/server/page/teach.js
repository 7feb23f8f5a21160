// An update: classes with their pictures, and the jobs in which they are learned.

import { get, pause, remove, send } from "./api.js";
import { dropZone, isPicture, thumbnail } from "./pictures.js";
import { counted, find, make, megabytes, minutes, moment, named, tell } from "./words.js";

const SHOWN = 11; // thumbnails of a class, before they are only counted
const NAMED = 10; // skipped files that are named
const LISTED = 5; // jobs that are over
const OVER = ["done", "failed", "cancelled"];
const STATES = { queued: "Waiting", learning: "Learning", done: "Learned", failed: "Failed", cancelled: "Cancelled" };
const QUEUED = { queued: "It starts when the current update is done.", wait: "Another command is working on the model. It starts after that." };
const PHASES = {
  queued: "Starting", scan: "Scanning the files", read: "Reading the pictures", train: "Training the network", extract: "Extracting features",
  adapt: "Adapting stored features", herd: "Selecting features to store", classify: "Fitting the classifier",
};

const groups = find("groups");
const [problem, status, start] = [find("lesson-problem"), find("lesson-status"), find("start")];
const sending = find("sending");
const lesson = new Map(); // fieldset → files
const shown = new Map(); // id of a job → its article
export let latest = null; // what came of the lesson that was learned last
let key = ""; // of the lesson as it is: sent twice, it is learned once
let changed = () => {}; // the model is another

export function setUpTeach(whenChanged) {
  changed = whenChanged;
  find("add-group").addEventListener("click", () => addGroup().querySelector("input").focus());
  find("choose-folder").addEventListener("click", () => find("folder").click());
  find("folder").addEventListener("change", addFolder);
  find("lesson").addEventListener("submit", submit);
  addGroup();
}

function addGroup(name = "", files = []) {
  const label = make("label", { textContent: "Class" });
  const input = make("input", { type: "text", list: "known-classes", autocomplete: "off", value: name, dir: "auto", maxLength: 10000 });
  input.id = `class-${crypto.getRandomValues(new Uint32Array(1))[0]}`;
  label.htmlFor = input.id;
  const drop = make("div", { className: "drop" });
  const strip = make("ul", { className: "strip", "aria-label": "Pictures of this class" });
  const clear = make("button", { type: "button", className: "quiet", textContent: "Remove these pictures", hidden: true });
  const away = make("button", { type: "button", className: "quiet leave", textContent: "Remove this class" });
  const group = make("fieldset", { className: "group" }, make("legend"), label, input, drop, strip, make("p", { className: "row" }, clear, away));
  lesson.set(group, []);
  dropZone(drop, (more) => addFiles(group, more), "of this class");
  input.addEventListener("input", lessonChanged);
  clear.addEventListener("click", () => {
    lesson.set(group, []);
    showFiles(group);
    drop.querySelector("button").focus();
  });
  away.addEventListener("click", () => {
    lesson.delete(group);
    group.remove();
    if (!lesson.size) addGroup();
    lessonChanged();
    groups.querySelector("input").focus();
  });
  groups.append(group);
  addFiles(group, files);
  return group;
}

function addFiles(group, files) {
  const pictures = files.filter(isPicture);
  lesson.set(group, [...lesson.get(group), ...pictures]);
  showFiles(group);
  const other = files.length - pictures.length;
  if (other) tell(status, `${counted(other, "file")} skipped: not ${other === 1 ? "a picture" : "pictures"}.`);
}

function showFiles(group) {
  const files = lesson.get(group);
  const items = files.slice(0, SHOWN).map((file) => make("li", {}, picture(group, file)));
  if (files.length > SHOWN) items.push(make("li", { className: "muted", textContent: `and ${counted(files.length - SHOWN, "more picture")}` }));
  group.querySelector(".strip").replaceChildren(...items);
  group.querySelector("button.quiet").hidden = !files.length;
  lessonChanged();
}

// A thumbnail; pressing it removes the picture.
function picture(group, file) {
  const button = make("button", { type: "button", className: "picture", title: `Remove ${file.name}`, "aria-label": `Remove ${file.name}` }, thumbnail(file));
  button.addEventListener("click", () => {
    const place = [...group.querySelectorAll(".picture")].indexOf(button);
    lesson.set(group, lesson.get(group).filter((each) => each !== file));
    showFiles(group);
    (group.querySelectorAll(".picture")[place] ?? group.querySelector(".choose")).focus();
  });
  return button;
}

// One sub-folder per class; a picture that is in none has the folder's own name.
function addFolder() {
  const classes = new Map();
  for (const file of [...find("folder").files].filter(isPicture)) {
    const name = file.webkitRelativePath.split("/").at(-2) ?? "";
    classes.set(name, [...(classes.get(name) ?? []), file]);
  }
  find("folder").value = "";
  for (const [group, files] of lesson) {
    if (files.length || nameOf(group)) continue;
    lesson.delete(group);
    group.remove();
  }
  for (const [name, files] of classes) addGroup(name, files);
  if (!lesson.size) addGroup();
  tell(problem, classes.size ? "" : "There is no picture in this folder.");
}

const nameOf = (group) => group.querySelector("input[type=text]").value.trim();

function lessonChanged() {
  key = "";
  const files = [...lesson.values()].flat();
  const bytes = files.reduce((sum, file) => sum + file.size, 0);
  tell(find("lesson-size"), files.length ? `${counted(files.length, "picture")}, ${megabytes(bytes)} to send.` : "");
  [...lesson.keys()].forEach((group, index) => {
    const count = lesson.get(group).length;
    tell(group.querySelector("legend"), `Class ${index + 1}${count ? `, ${counted(count, "picture")}` : ""}`);
    group.querySelector(".leave").hidden = lesson.size === 1;
  });
}

function amiss() {
  for (const [group, files] of lesson) {
    const input = group.querySelector("input[type=text]");
    input.removeAttribute("aria-invalid");
    if (nameOf(group) && files.length) continue;
    if (!nameOf(group)) input.setAttribute("aria-invalid", "true");
    (nameOf(group) ? group.querySelector(".choose") : input).focus();
    if (!nameOf(group)) return "A class has no name.";
    return `There is no picture of “${nameOf(group)}”.`;
  }
  return "";
}

async function submit(event) {
  event.preventDefault();
  if (start.disabled) return;
  tell(problem, amiss());
  if (problem.textContent) return;
  const form = new FormData();
  for (const [group, files] of lesson) {
    for (const file of files) {
      form.append("files", file, file.name);
      form.append("classes", nameOf(group));
    }
  }
  key ||= newKey();
  start.disabled = true;
  tell(status, "Sending the pictures …");
  try {
    const waiting = (seconds) => tell(status, `The server is busy. Sending again in ${seconds} s.`);
    const sent = (share) => Object.assign(sending, { hidden: share === 1, value: share });
    const job = await send("/api/teach", form, { headers: { "Idempotency-Key": key }, waiting, sent });
    emptyLesson();
    tell(status, "");
    follow(job).querySelector("h3").focus();
  } catch (error) {
    tell(status, "");
    tell(problem, error.status === 0 ? `${error.message} Your pictures are still here: press Teach again when the server is back. They are learned only once.` : error.message);
  } finally {
    start.disabled = false;
    sending.hidden = true;
  }
}

function emptyLesson() {
  lesson.clear();
  groups.replaceChildren();
  addGroup();
}

// crypto.randomUUID is only there where the connection is secure.
const newKey = () => [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

// Jobs that are under way, and the latest that are over.
export async function showJobs() {
  const found = await get("/api/jobs");
  const jobs = found.jobs.toSorted((one, other) => Date.parse(one.created) - Date.parse(other.created));
  const over = jobs.filter((job) => OVER.includes(job.state)).slice(-LISTED);
  for (const job of jobs) if (!OVER.includes(job.state) || over.includes(job)) follow(job);
  const known = new Set(jobs.map((job) => job.id));
  for (const [id, article] of shown) {
    if (known.has(id)) continue;
    article.remove();
    shown.delete(id);
  }
}

function follow(job) {
  const known = shown.get(job.id);
  if (known) return known;
  const article = make("article", { className: "job", "aria-label": "An update" });
  shown.set(job.id, article);
  find("jobs").prepend(article);
  show(article, job);
  if (!OVER.includes(job.state)) watch(article, job.id);
  return article;
}

async function watch(article, id) {
  for (;;) {
    await pause(document.hidden ? 4 : 0.7);
    let job;
    try {
      job = await get(`/api/jobs/${encodeURIComponent(id)}`);
    } catch (error) {
      if (error.status === 404) return tell(article.querySelector(".phase"), "The server no longer knows this update.");
      if (error.status === 401) {
        shown.delete(id); // shown anew once one is signed in
        return article.remove();
      }
      continue; // the page says that the connection is lost
    }
    show(article, job);
    if (OVER.includes(job.state)) return changed();
  }
}

function show(article, job) {
  if (!article.firstChild) lay(article, job);
  const part = (name) => article.querySelector(name);
  tell(part("h3 .state"), STATES[job.state] ?? job.state);
  const over = OVER.includes(job.state);
  const { phase, done, of, seconds_left: left } = job.progress ?? {};
  part("progress").hidden = over;
  part(".cancel").hidden = over;
  if (!over && of) Object.assign(part("progress"), { max: of, value: Math.min(done, of) });
  else part("progress").removeAttribute("value");
  tell(part(".phase"), over ? outcome(job) : job.state === "queued" ? QUEUED[phase] ?? QUEUED.queued : phase ? `${PHASES[phase] ?? phase} …` : "Beginning …");
  tell(part(".left"), over || !phase ? "" : [of ? `${done.toLocaleString("en")} of ${of.toLocaleString("en")}` : "", left === null || left === undefined ? "" : `about ${minutes(left)} left`].filter(Boolean).join(", "));
  part(".phase").classList.toggle("problem", job.state === "failed");
  if (!over || part(".outcome")) return;
  if (job.state === "done") latest = job.result;
  article.append(make("div", { className: "outcome" }, ...how(job.result), ...warnings(job.result?.warnings ?? []), ...judged(job.result?.class_accuracies ?? []), ...skippedFiles(job.result?.skipped ?? [])));
}

function lay(article, job) {
  const names = Object.entries(job.classes ?? {}).flatMap(([name, count], index) => [index ? ", " : " ", named(name), ` (${count.toLocaleString("en")})`]);
  const bad = make("p", { className: "problem", role: "alert" });
  const cancel = make("button", { type: "button", className: "quiet cancel", textContent: "Cancel this update" });
  cancel.addEventListener("click", async () => {
    cancel.disabled = true;
    try {
      await remove(`/api/jobs/${encodeURIComponent(job.id)}`);
    } catch (error) {
      tell(bad, error.message);
      cancel.disabled = false;
    }
  });
  article.append(
    make("h3", { tabIndex: -1 }, make("span", { className: "state" }), ":", ...names),
    make("p", { className: "muted small", textContent: `Sent ${moment(job.created)}.` }),
    make("p", { className: "phase", role: "status" }),
    make("progress", { "aria-label": "Progress of this phase" }),
    make("p", { className: "left muted small" }),
    make("p", {}, cancel),
    bad,
  );
}

function outcome(job) {
  if (job.state === "failed") return job.problem ?? "It could not be learned.";
  if (job.state === "cancelled") return job.problem ?? "Nothing was changed.";
  const { generation, memory_bytes: kept, seen_bytes: seen } = job.result ?? {};
  const sentences = [];
  if (generation !== undefined) sentences.push(`This is generation ${generation}.`);
  sentences.push(accuracyOf(job.result ?? {}));
  if (typeof kept === "number") sentences.push(`${megabytes(kept)} of features and pictures stored in all${typeof seen === "number" ? `; the pictures of this update took ${megabytes(seen)}` : ""}.`);
  return sentences.join(" ") || "Done.";
}

// Which network and which classifier, and whether the network was trained.
function how(result) {
  if (!result) return [];
  const network = `Network ${result.network}, ${result.tuned ? "trained" : "not trained"} (${result.tuning}).`;
  return [make("p", { className: "muted small", textContent: `${network} Classifier: ${result.classifier}.` })];
}

// Accuracy with what is needed to interpret it, or that it is not known.
function accuracyOf({ accuracy, interval, held_out: images, held_out_classes: judged, classes, estimated }) {
  if (typeof accuracy !== "number" || !interval) return "Accuracy is not known: no picture was held out.";
  const over = judged === classes ? "all classes" : `${judged} of ${counted(classes, "class")}`;
  const label = estimated ? "Accuracy, estimated (the network has changed since some of the pictures were seen):" : "Accuracy:";
  return `${label} ${accuracy.toFixed(3)} (95 % interval ${interval[0].toFixed(3)} to ${interval[1].toFixed(3)}) over ${over}, on ${counted(images, "held-out picture")}.`;
}

function warnings(texts) {
  return texts.length ? [make("ul", { className: "warnings", "aria-label": "Warnings" }, ...texts.map((text) => make("li", { textContent: text })))] : [];
}

function skippedFiles(files) {
  if (!files.length) return [];
  const items = files.slice(0, NAMED).map((each) => make("li", {}, named(each.path), `: ${each.reason}`));
  if (files.length > NAMED) items.push(make("li", { textContent: `and ${counted(files.length - NAMED, "more file")}` }));
  return [make("p", { textContent: `${counted(files.length, "file")} skipped:` }), make("ul", { className: "small" }, ...items)];
}

function judged(judgements) {
  if (!judgements.some((each) => typeof each.after === "number")) return [];
  const share = (value) => (typeof value === "number" ? value.toFixed(3) : "–");
  const heads = ["Class", "Before", "After", "Held out"].map((text, index) => make("th", { scope: "col", textContent: text, className: index ? "" : "name" }));
  const rows = judgements.map((each) =>
    make("tr", {},
      make("th", { scope: "row", className: "name" }, named(each.name), make("span", { className: "kind", textContent: each.kind })),
      ...[share(each.before), share(each.after), each.images ? each.images.toLocaleString("en") : "–"].map((text) => make("td", { textContent: text })),
    ),
  );
  const table = make("table", {},
    make("caption", { className: "hidden", textContent: "Accuracy of each class before and after the update" }),
    make("thead", {}, make("tr", {}, ...heads)),
    make("tbody", {}, ...rows),
  );
  const found = [make("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": "Before and after" }, table)];
  if (judgements.some((each) => each.estimated)) {
    found.push(make("p", { className: "muted small" }, "These are estimates: the network has changed since some of the pictures were seen."));
  }
  return found;
}

export function knowClasses(names) {
  find("known-classes").replaceChildren(...names.map((name) => make("option", { value: name })));
}
