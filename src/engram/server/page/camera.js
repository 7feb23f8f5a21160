// The live camera: its images are classified one after another, and become images of a class while a button is held.

import { pause, send } from "./api.js";
import { stillImage, thumbnail } from "./images.js";
import { rejection } from "./rejection.js";
import { addTo, pendingImages } from "./teach.js";
import { answerRow, counted, find, make, named, setText } from "./elements.js";

const SHORT_SIDE = 256; // pixels of a frame: more than the network takes, little to send
const HOLD_SECONDS = 0.15; // between two images while the button is held
const ANSWER_SECONDS = 0.1; // between two answers, at least: the rest of the machine is for the update
const WEIGHT = 0.35; // of the newest answer in the smoothed probabilities
const SHOWN = 5; // classes
const NEWEST = 8; // thumbnails
const BUTTONS = 12; // classes with a button of their own
const ROW = 2.5; // rem: the height of a bar with its text
const IDLE_SECONDS = 0.5; // between looks whether there is something to classify

const [video, status, bars] = [find("live-video"), find("live-status"), find("live-bars")];
let stream = null;
let model = { names: [], takesImages: false, calibrated: false };
let smoothed = new Map(); // class → probability
let rejected = 0; // the smoothed share of answers that were “none of these”
let times = []; // of the newest answers
let recording = null; // the class whose images are taken
let taken = 0;

export function setUpCamera() {
  find("live-start").addEventListener("click", start);
  find("live-stop").addEventListener("click", () => stop());
  holdable(find("hold"), () => find("live-class").value.trim());
  find("live-class").addEventListener("keydown", (event) => event.key === "Enter" && find("hold").focus());
  document.addEventListener("visibilitychange", () => document.hidden && (recording = null));
  pendingImages.listeners.push(showButtons);
}

// The classes of the model in use; answers of another version are not mixed with its own.
export function cameraModel(names, takesImages, calibrated) {
  model = { names, takesImages, calibrated };
  smoothed = new Map();
  clearAnswer();
  showAnswers();
  bars.style.minBlockSize = `${ROW * Math.min(names.length, SHOWN)}rem`; // so that nothing moves when the first answer comes
  if (!stream) setText(status, offText());
  showButtons();
}

const showAnswers = () => (find("live-answer").hidden = !model.takesImages || !stream);
const offText = () => (model.takesImages ? "The camera’s images are classified as they come. They are not stored." : "The camera’s images stay in your browser until you press Teach.");

async function start() {
  if (!navigator.mediaDevices?.getUserMedia) {
    return setText(status, "This browser gives no camera to this page (it needs https or localhost). Use files instead.");
  }
  try {
    stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
  } catch {
    return setText(status, "There is no camera, or this page may not use it. Use files instead.");
  }
  video.srcObject = stream;
  for (const track of stream.getTracks()) track.addEventListener("ended", () => stop("The camera was disconnected."));
  show(true);
  find("live-class").focus();
  run(stream);
}

function stop(why = offText()) {
  for (const track of stream?.getTracks() ?? []) track.stop();
  stream = recording = null;
  video.srcObject = null;
  smoothed = new Map();
  show(false);
  setText(status, why);
  find("live-start").focus();
}

function clearAnswer() {
  find("live-none").hidden = true;
  bars.replaceChildren();
}

function show(on) {
  video.hidden = !on;
  find("record").hidden = !on;
  find("live-off").hidden = on;
  find("live").classList.toggle("off", !on);
  showAnswers();
  clearAnswer();
  setText(find("live-rate"), "");
  setText(status, "");
}

// Classify one frame after another; one request is in flight at a time.
async function run(own) {
  while (stream === own) {
    const seen = model.takesImages && !document.hidden && !find("live").hidden && video.videoWidth;
    const frame = seen ? await stillImage(video, "camera.jpg", SHORT_SIDE) : null;
    if (!frame) {
      await pause(IDLE_SECONDS);
      continue;
    }
    const form = new FormData();
    form.append("files", frame, frame.name);
    const [asked, begin] = [model, performance.now()];
    try {
      const { predictions: [found] } = await send(`/api/classify?top=20${rejection()}`, form);
      if (stream !== own) return;
      if (asked === model && found.top) showAnswer(found);
      setText(status, "");
      await pause(Math.max(0, ANSWER_SECONDS - (performance.now() - begin) / 1000));
    } catch (error) {
      if (stream === own) setText(status, error.message);
      await pause(1);
    }
  }
}

function showAnswer({ top, rejected: none }) {
  const found = new Map(top.map((each) => [each.class, each.probability]));
  const first = !smoothed.size;
  for (const name of new Set([...smoothed.keys(), ...found.keys()])) {
    const [old, now] = [smoothed.get(name) ?? 0, found.get(name) ?? 0];
    smoothed.set(name, first ? now : old + WEIGHT * (now - old));
  }
  rejected = first ? Number(none) : rejected + WEIGHT * (none - rejected);
  const unknown = rejected > 0.5;
  const best = [...smoothed].toSorted((one, other) => other[1] - one[1]).slice(0, SHOWN);
  find("live-none").hidden = !unknown;
  bars.classList.toggle("rejected", unknown);
  bars.replaceChildren(...best.map(([name, probability]) => answerRow(name, probability, model.calibrated)));
  times = [...times, performance.now()].slice(-11);
  if (times.length > 2) setText(find("live-rate"), `${((1000 * (times.length - 1)) / (times.at(-1) - times[0])).toFixed(1)} answers per second`);
}

// While the button is held (pointer, space bar or Enter), images are taken. A click by a screen reader takes one.
function holdable(button, className) {
  const begin = (event) => {
    event.preventDefault();
    if (recording === null) record(button, className());
  };
  const end = () => (recording = null);
  button.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    button.focus();
    button.setPointerCapture(event.pointerId);
    begin(event);
  });
  for (const kind of ["pointerup", "pointercancel", "lostpointercapture", "blur"]) button.addEventListener(kind, end);
  button.addEventListener("contextmenu", (event) => event.preventDefault()); // a long touch
  button.addEventListener("keydown", (event) => [" ", "Enter"].includes(event.key) && (event.repeat ? event.preventDefault() : begin(event)));
  button.addEventListener("keyup", (event) => [" ", "Enter"].includes(event.key) && end());
  button.addEventListener("click", (event) => event.detail === 0 && event.isTrusted && recording === null && record(button, className()).then(end, end));
}

async function record(button, name) {
  if (!name) {
    setText(find("held"), "Type the name of the class first.");
    return find("live-class").focus();
  }
  const own = (recording = { name });
  button.classList.add("on");
  do {
    taken += 1;
    const file = await stillImage(video, `camera ${taken}.jpg`, SHORT_SIDE);
    if (!file) break;
    const count = addTo(name, [file]);
    setText(find("held"), `${name}: ${counted(count, "image")}`);
    find("held-strip").prepend(make("li", {}, thumbnail(file)));
    while (find("held-strip").children.length > NEWEST) find("held-strip").lastChild.remove();
    await pause(HOLD_SECONDS);
  } while (recording === own);
  button.classList.remove("on");
  showButtons(); // not while it is held: they move
}

// One button for each class, known or new in the next update, as long as they are few.
function showButtons() {
  const pending = pendingImages.counts();
  if (![...pending.values()].some(Boolean)) {
    find("held-strip").replaceChildren();
    setText(find("held"), "");
  }
  const names = [...new Set([...model.names, ...pending.keys()])].toSorted((one, other) => one.localeCompare(other));
  const list = find("hold-classes");
  const wanted = names.length > BUTTONS ? [] : names;
  const shown = [...list.children].map((item) => item.dataset.name);
  if (JSON.stringify(shown) !== JSON.stringify(wanted) && recording === null) {
    list.replaceChildren(...wanted.map((name) => {
      const button = make("button", { type: "button", className: "quiet hold", "aria-label": `Hold to add images of ${name}` }, named(name), make("span", { className: "count" }));
      holdable(button, () => name);
      const item = make("li", {}, button);
      item.dataset.name = name;
      return item;
    }));
  }
  for (const item of list.children) {
    const count = pending.get(item.dataset.name) ?? 0;
    setText(item.querySelector(".count"), count ? ` +${count}` : "");
  }
}
