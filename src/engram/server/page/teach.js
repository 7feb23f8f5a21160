// The form for an update (classes with images), and the jobs that run updates.

import { get, pause, remove, send } from "./api.js";
import { dropZone, folderOf, isImage, onChosen, thumbnail } from "./images.js";
import { commands, quoted, server } from "./commands.js";
import { doubts } from "./evidence.js";
import { openScreen, screen, whenShown } from "./screens.js";
import { button, counted, find, make, measuredAccuracy, megabytes, minutes, moment, named, percent, setText, table } from "./elements.js";

const THUMBNAILS = 12; // shown per class; the rest is counted
const SKIPPED = 10; // skipped files that are listed
const RECENT = 3; // finished jobs that are shown
const FINISHED = ["done", "failed", "cancelled"];
const STATES = { queued: "Waiting", learning: "Learning", done: "Learned", failed: "Failed", cancelled: "Cancelled" };
const QUEUED = { queued: "It starts when the current update is done.", wait: "Another command is working on the model. It starts after that." };
const PHASES = {
  queued: "Starting", scan: "Scanning the files", read: "Reading the images", train: "Training the network", extract: "Looking at the images",
  adapt: "Adapting what is stored", herd: "Selecting what to store", classify: "Fitting the classifier",
};

const groups = find("groups");
const [problem, status, start] = [find("update-problem"), find("update-status"), find("start")];
const sending = find("sending");
const update = new Map(); // fieldset → files
const shown = new Map(); // id of a job → its article
export let latest = null; // result of the latest successful update
const uploads = new Map(); // id of a job → the images that were sent from here
const items = new WeakMap(); // file → its item in the list of images
let key = ""; // Idempotency-Key of the form as it is: sent twice, it is learned once
let changed = () => {}; // called when the model has changed

export function setUpTeach(whenChanged) {
  changed = whenChanged;
  find("add-group").addEventListener("click", () => addGroup().querySelector("input").focus());
  find("choose-folder").addEventListener("click", () => find("folder").click());
  onChosen(find("folder"), (files) => addFolder(files.filter(isImage)));
  find("update").addEventListener("submit", submit);
  whenShown.push(showNext);
  addGroup();
}

// The images of the next update: how many there are of each class, and who wants to know when that changes.
export const pendingImages = {
  listeners: [],
  has: (file) => [...update.values()].some((files) => files.includes(file)),
  counts: () => new Map([...update].filter(([group]) => nameOf(group)).map(([group, files]) => [nameOf(group), files.length])),
};

// Add images of a class to the next update, and return how many it has of that class.
export function addTo(name, files) {
  const group = groupOf(name) ?? addGroup(name);
  group.querySelector("input[type=text]").value ||= name;
  addFiles(group, files);
  return update.get(group).length;
}

export function takeBack(name, file) {
  const group = groupOf(name);
  if (!group) return;
  removeFile(group, file);
  if (!update.get(group).length) removeGroup(group);
}

// Show the form with a class, to add images of it.
export function addImagesOf(name) {
  addTo(name, []);
  openScreen("teach");
  history.pushState(null, "", "#teach");
  const group = groupOf(name);
  group.scrollIntoView({ block: "center" });
  group.querySelector(".choose").focus({ preventScroll: true });
}

const groupOf = (name) => [...update.keys()].find((group) => nameOf(group).normalize() === name.normalize()) ?? [...update].find(([group, files]) => !nameOf(group) && !files.length)?.[0];

function addGroup(name = "", files = []) {
  const label = make("label", { textContent: "Class" });
  const input = make("input", { type: "text", list: "known-classes", autocomplete: "off", value: name, dir: "auto", maxLength: 300 });
  input.id = `class-${crypto.getRandomValues(new Uint32Array(1))[0]}`;
  label.htmlFor = input.id;
  const remover = button("Remove", () => {
    removeGroup(group);
    groups.querySelector("input").focus();
  }, { className: "link small leave", about: "Remove this class from the update" });
  const head = make("p", { className: "head" }, label, make("span", { className: "muted small count" }), remover);
  const strip = make("ul", { className: "strip", "aria-label": "Images of this class" });
  const group = make("fieldset", { className: "group drop" }, make("legend", { className: "hidden" }), head, input, strip);
  update.set(group, []);
  dropZone(group, (more) => addDropped(group, more), "of this class");
  input.addEventListener("input", updateChanged);
  groups.append(group);
  addFiles(group, files);
  return group;
}

function removeGroup(group) {
  update.delete(group);
  group.remove();
  if (!update.size) addGroup();
  updateChanged();
}

function addFiles(group, files) {
  const images = files.filter(isImage);
  update.set(group, [...update.get(group), ...images]);
  showFiles(group);
  const other = files.length - images.length;
  if (other) setStatus( `${counted(other, "file")} skipped: not ${other === 1 ? "an image" : "images"}.`);
}

// Images of several folders, or of one while the class has no name yet, are of the classes that their folders name.
function addDropped(group, files) {
  const folders = new Set(files.filter(isImage).map(folderOf));
  if (folders.size > 1 || ([...folders].some(Boolean) && !nameOf(group))) addFolder(files.filter(isImage));
  else addFiles(group, files);
}

function showFiles(group) {
  const files = update.get(group);
  const shown = group.classList.contains("all") ? files : files.slice(0, THUMBNAILS);
  const list = shown.map((file) => items.get(file) ?? imageItem(group, file));
  if (files.length > shown.length) {
    const all = button(`Show all ${files.length.toLocaleString("en")}`, () => {
      group.classList.add("all");
      showFiles(group);
      group.querySelectorAll(".image")[THUMBNAILS]?.focus();
    });
    list.push(make("li", {}, all));
  }
  group.querySelector(".strip").replaceChildren(...list);
  updateChanged();
}

// A thumbnail; clicking it removes the image.
function imageItem(group, file) {
  const remover = button(thumbnail(file), () => {
    const place = [...group.querySelectorAll(".image")].indexOf(remover);
    removeFile(group, file);
    (group.querySelectorAll(".image")[place] ?? group.querySelector(".choose")).focus();
  }, { about: `Remove ${file.name}`, className: "image", title: `Remove ${file.name}` });
  const item = make("li", {}, remover);
  items.set(file, item);
  return item;
}

function removeFile(group, file) {
  items.delete(file);
  update.set(group, update.get(group).filter((each) => each !== file));
  showFiles(group);
}

// One sub-folder per class. An image outside any sub-folder gets the name of the folder.
function addFolder(files) {
  const classes = Map.groupBy(files, folderOf);
  for (const [group, images] of update) {
    if (images.length || nameOf(group)) continue;
    update.delete(group);
    group.remove();
  }
  for (const [name, images] of classes) addTo(name, images);
  if (!update.size) addGroup();
  setText(problem, classes.size ? "" : "There is no image in this folder.");
}

const nameOf = (group) => group.querySelector("input[type=text]").value.trim();

function updateChanged() {
  key = "";
  setText(problem, "");
  const files = [...update.values()].flat();
  const classes = [...update.values()].filter((each) => each.length).length;
  const bytes = files.reduce((sum, file) => sum + file.size, 0);
  for (const listener of pendingImages.listeners) listener();
  setText(find("update-size"), files.length ? `${counted(files.length, "image")} of ${counted(classes, "class")}, ${megabytes(bytes)}` : "");
  if (files.length) clearOutcome();
  showNext();
  [...update.keys()].forEach((group, index) => {
    const count = update.get(group).length;
    setText(group.querySelector("legend"), `Class ${index + 1}`);
    setText(group.querySelector(".count"), count ? counted(count, "image") : "");
    group.querySelector(".hint").hidden = count > 0;
    group.querySelector(".leave").hidden = update.size === 1 && !count && !nameOf(group);
  });
}

function validate() {
  const some = [...update.values()].some((files) => files.length);
  if (!some && ![...update.keys()].some(nameOf)) {
    groups.querySelector("input").focus();
    return "Name a class and add images of it.";
  }
  for (const [group, files] of update) {
    const [name, input] = [nameOf(group), group.querySelector("input[type=text]")];
    if (some && !name && !files.length) continue;
    input.setAttribute("aria-invalid", !name);
    if (name && files.length) continue;
    (name ? group.querySelector(".choose") : input).focus();
    return name ? `There is no image of “${name}”.` : "A class has no name.";
  }
  return "";
}

async function submit(event) {
  event.preventDefault();
  if (start.disabled) return;
  setText(problem, validate());
  if (problem.textContent) return;
  const sent = [...update].flatMap(([group, files]) => files.map((file) => ({ file, class: nameOf(group) })));
  const form = new FormData();
  for (const each of sent) {
    form.append("files", each.file, each.file.name);
    form.append("classes", each.class);
  }
  key ||= newKey();
  start.disabled = true;
  setStatus("Sending the images …");
  try {
    const waiting = (seconds) => setStatus(`The server is busy. Sending again in ${seconds} s.`);
    const shareSent = (share) => Object.assign(sending, { hidden: share === 1, max: 1, value: share });
    const job = await send("/api/teach", form, { headers: { "Idempotency-Key": key }, waiting, sent: shareSent });
    uploads.set(job.id, sent);
    clearUpdate();
    follow(job);
  } catch (error) {
    setStatus("");
    setText(problem, error.status === 0 ? `${error.message} Your images are still here: press Teach again when the server is back. They will be learned only once.` : error.message);
  } finally {
    start.disabled = false;
    sending.hidden = true;
    showNext();
  }
}

// The bar below the camera, the answers and the form: the next update, and what happens to the one just sent.
function showNext() {
  const some = [...update.values()].some((files) => files.length);
  const [finished, teaching] = [status.classList.contains("finished"), screen === "teach"];
  find("next").hidden = !teaching && (screen !== "classify" || !(some || status.textContent || problem.textContent));
  start.hidden = !teaching && !some;
  const link = find("review");
  link.hidden = teaching && !finished;
  link.hash = teaching ? "#classify" : "#teach";
  setText(link, teaching ? "Try it" : some ? "Review" : "Details");
}

function setStatus(text, finished = false) {
  setText(status, text);
  status.classList.toggle("finished", finished);
  showNext();
}

// Remove the outcome of the latest update from the bar.
export function clearOutcome() {
  if (status.classList.contains("finished")) setStatus("");
}

function clearUpdate() {
  update.clear();
  groups.replaceChildren();
  addGroup();
}

// crypto.randomUUID needs a secure connection.
const newKey = () => [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

// Show unfinished jobs and the latest finished ones.
export async function showJobs() {
  const found = await get("/api/jobs");
  const jobs = found.jobs.toSorted((one, other) => Date.parse(one.created) - Date.parse(other.created));
  const finished = jobs.filter((job) => FINISHED.includes(job.state)).slice(-RECENT);
  for (const job of jobs) if (!FINISHED.includes(job.state) || finished.includes(job)) follow(job);
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
  if (!FINISHED.includes(job.state)) watch(article, job.id);
  return article;
}

async function watch(article, id) {
  for (;;) {
    await pause(document.hidden ? 4 : 0.3);
    let job;
    try {
      job = await get(`/api/jobs/${encodeURIComponent(id)}`);
    } catch (error) {
      if (error.status === 404) return setText(article.querySelector(".phase"), "The server has deleted this job.");
      if (error.status === 401) {
        shown.delete(id); // shown again after signing in
        return article.remove();
      }
      continue; // the page shows that the connection is lost
    }
    show(article, job);
    if (FINISHED.includes(job.state)) return changed();
  }
}

function show(article, job) {
  if (!article.firstChild) build(article, job);
  const part = (name) => article.querySelector(name);
  setText(part("h3 .state"), STATES[job.state]);
  const finished = FINISHED.includes(job.state);
  const { phase, done, of, seconds_left: seconds = null } = job.progress ?? {};
  part("progress").hidden = finished;
  part(".cancel").hidden = finished;
  if (!finished && of) Object.assign(part("progress"), { max: of, value: Math.min(done, of) });
  else part("progress").removeAttribute("value");
  setText(part(".phase"), finished ? outcome(job) : job.state === "queued" ? QUEUED[phase] ?? QUEUED.queued : `${PHASES[phase] ?? phase} …`);
  setText(part(".left"), finished ? "" : [of ? `${done.toLocaleString("en")} of ${of.toLocaleString("en")}` : "", seconds === null ? "" : `about ${minutes(seconds)} left`].filter(Boolean).join(", "));
  if (uploads.has(job.id)) {
    setStatus(finished ? inShort(job) : part(".phase").textContent, finished);
    sending.hidden = finished || !of;
    Object.assign(sending, { max: of || 1, value: Math.min(done, of) || 0 });
  }
  part(".phase").classList.toggle("problem", job.state === "failed");
  if (job.state !== "done" || part(".outcome")) return;
  latest = job.result;
  const details = make("details", {}, make("summary", { textContent: "Details" }), ...accuracyTable(latest.class_accuracies), settings(latest), asCommand(job));
  article.append(make("div", { className: "outcome" }, ...warnings(latest.warnings), ...skippedFiles(latest.skipped), ...worst(job), details));
}

// The images of this update that look like another class, while the page still has them.
function worst(job) {
  const sent = uploads.get(job.id) ?? [];
  return doubts(job.result.doubtful, (each) => sent[each.index]?.file, "Images of this update that look like another class");
}

function asCommand(job) {
  const name = quoted(Object.keys(job.classes)[0]);
  return commands("For each image one files and one classes field; with engram, a folder with one sub-folder per class:", `curl -F files=@1.jpg -F classes=${name} ${server()}/api/teach`, "engram learn MODEL FOLDER");
}

function build(article, job) {
  const names = Object.entries(job.classes).flatMap(([name, count], index) => [index ? ", " : " ", named(name), ` (${count.toLocaleString("en")})`]);
  const bad = make("p", { className: "problem", role: "alert" });
  const cancel = button("Cancel this update", async () => {
    cancel.disabled = true;
    try {
      await remove(`/api/jobs/${encodeURIComponent(job.id)}`);
    } catch (error) {
      setText(bad, error.message);
      cancel.disabled = false;
    }
  }, { className: "quiet cancel" });
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

function outcome({ state, problem, result }) {
  if (state === "failed") return problem;
  if (state === "cancelled") return "Nothing was changed.";
  const measured = { ...result, images: result.held_out, measured: result.held_out_classes };
  return `Version ${result.version} knows ${counted(result.classes, "class")}. ${measuredAccuracy(measured)}`;
}

// The outcome for the bar; the rest is in the list of updates.
function inShort({ state, result, ...job }) {
  if (state !== "done") return `${STATES[state]}. ${outcome({ state, ...job })}`;
  const notes = [[result.skipped, "file was skipped", "files were skipped"], [result.warnings, "warning", "warnings"]];
  const texts = notes.filter(([found]) => found.length).map(([found, one, many]) => ` ${found.length} ${found.length === 1 ? one : many}.`);
  return `Learned: version ${result.version} is in use.${texts.join("")}`;
}

// The network, whether it was trained, and the classifier.
function settings(result) {
  const network = `Network ${result.network}, ${result.tuned ? "trained" : "not trained"} (${result.tuning}).`;
  const memory = `The images of this update took ${megabytes(result.seen_bytes)}; ${megabytes(result.memory_bytes)} are stored for all classes.`;
  return make("p", { className: "muted small", textContent: `${network} Classifier: ${result.classifier}. ${memory}` });
}

function warnings(texts) {
  return texts.length ? [make("ul", { className: "warnings", "aria-label": "Warnings" }, ...texts.map((text) => make("li", { textContent: text })))] : [];
}

function skippedFiles(files) {
  if (!files.length) return [];
  const items = files.slice(0, SKIPPED).map((each) => make("li", {}, named(each.path), `: ${each.reason}`));
  if (files.length > SKIPPED) items.push(make("li", { textContent: `and ${(files.length - SKIPPED).toLocaleString("en")} more` }));
  return [make("p", { textContent: `${counted(files.length, "file")} skipped:` }), make("ul", { className: "small" }, ...items)];
}

function accuracyTable(accuracies) {
  if (accuracies.every((each) => each.after === null)) return [];
  const rows = accuracies.map((each) => [
    [named(each.name), make("span", { className: "kind", textContent: each.kind })],
    each.before === null ? "–" : percent(each.before), each.after === null ? "–" : percent(each.after), each.images ? `${Math.round(each.after * each.images)} of ${each.images}` : "–",
  ]);
  const found = [table("Held-out images of each class that are recognised", ["Class", "Before", "After", "Images"], rows)];
  if (accuracies.some((each) => each.estimated)) {
    found.push(make("p", { className: "muted small" }, "These are estimates: the network has changed since some of the images were seen."));
  }
  return found;
}

export function knowClasses(names) {
  find("known-classes").replaceChildren(...names.map((name) => make("option", { value: name })));
}
