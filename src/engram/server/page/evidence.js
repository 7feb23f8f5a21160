// Evidence about the model: how well each class is recognised, evaluation on test images, and exports.

import { get, send } from "./api.js";
import { folderOf, handleDrop, isImage, onChosen, thumbnail } from "./images.js";
import { commands, server } from "./commands.js";
import { showThresholds } from "./rejection.js";
import { bar, counted, find, make, named, percent, setText, table, withInterval } from "./elements.js";

const WRONG = 24; // wrong predictions that are shown
const MANY_SIMILAR = 4; // if more than one in so many images nearly equals another, the accuracy is too high
const ADVICE = {
  enough: () => "More of the same would hardly help.",
  more: ([, half]) => `More images would help: with half of them, ${percent(half)} are recognised.`,
  different: ([, half]) => `More of the same would hardly help: with half of the images, ${percent(half)} are recognised. Add images that show how it differs.`,
  unknown: () => "Add images: these are too few to tell how well it is recognised.",
};

let testFiles = [];

// What is known of each class, as an element by its name; empty while it is unknown.
export async function loadEvidence() {
  const { version, evidence, rejections } = await get("/api/evidence");
  showThresholds(rejections);
  find("curve").replaceChildren(...curve(evidence));
  return { version, classes: new Map(evidence.classes.map((each) => [each.name, aboutClass(each)])) };
}

// Would more images help? Accuracy with growing shares of them.
function curve({ curve: shares, interval, held_out: images, classes }) {
  if (!shares.length) return [];
  const similar = classes.reduce((sum, each) => sum + each.similar, 0);
  const optimistic = similar > images / MANY_SIMILAR ? [make("p", { className: "notice" }, `${counted(similar, "image")} nearly equal another image of their class, as camera images taken in a row do. The accuracy on other images will be lower: `, make("a", { href: "#test" }, "test it"), " with images of another day.")] : [];
  const rows = shares.map((share, index) => make("li", {}, `With ${["a quarter of", "half of", "all"][index]} the images`, make("span", { className: "number" }, percent(share)), bar(share)));
  return [
    ...optimistic,
    make("h3", {}, "Would more images help?"),
    make("p", {}, `Accuracy on ${counted(images, "held-out image")}: each was classified as if it had not been taught. Yes, if the last bar is longer than the one before by more than chance, here ${percent((interval[1] - interval[0]) / 2)}.`),
    make("ol", { className: "bars" }, ...rows),
  ];
}

function aboutClass(each) {
  if (each.accuracy === null) return ["Not measured yet: it needs at least two images and another class."];
  const right = Math.round(each.accuracy * each.held_out);
  const others = each.confused_with.flatMap((other, index) => [index ? ", " : " Confused with ", named(other.name), ` (${other.images})`]);
  const advice = each.similar > each.held_out / MANY_SIMILAR ? `${each.similar} nearly equal another one: add different ones.` : ADVICE[each.advice](each.curve);
  const [low, high] = each.interval;
  const text = make("p", {}, `${right} of ${each.held_out} held-out images recognised (95\u00a0% interval ${percent(low)} to ${percent(high)}).`, ...others, others.length ? "." : "", ` ${advice}`);
  return [bar(each.accuracy), text];
}

export function setUpEvidence() {
  const accept = (files) => evaluate(files.filter(isImage));
  handleDrop(find("evaluate-drop"), accept);
  find("choose-test").addEventListener("click", () => find("test-folder").click());
  onChosen(find("test-folder"), accept);
  find("export-model").addEventListener("click", () => download("/api/export", "model.zip", "Exporting. This takes some seconds …"));
  find("export-summary").addEventListener("click", () => download("/api/summary", "summary.html", "Writing the summary …"));
}

async function evaluate(files) {
  const [status, place] = [find("evaluate-status"), find("evaluation")];
  place.replaceChildren();
  testFiles = files.filter(folderOf);
  if (!testFiles.length) return setText(status, "Drop a folder with one sub-folder per class: the names of the sub-folders say what the images are.");
  const form = new FormData();
  for (const file of testFiles) {
    form.append("files", file, file.name);
    form.append("classes", folderOf(file));
  }
  const sent = (share) => setText(status, share < 1 ? `Sending ${counted(testFiles.length, "image")}: ${percent(share)} …` : `Classifying ${counted(testFiles.length, "image")} …`);
  sent(0);
  try {
    const found = await send("/api/evaluate", form, { sent, waiting: (seconds) => setText(status, `The server is busy. Trying again in ${seconds} s.`) });
    setText(status, `Version ${found.version}: accuracy ${withInterval(found.accuracy, found.interval)} on ${counted(found.images, "test image")}.`);
    place.replaceChildren(...evaluation(found));
  } catch (error) {
    setText(status, error.message);
  }
}

function evaluation({ classes, confusion, unknown, wrong, skipped }) {
  const rows = classes.flatMap((each, row) => {
    const taken = classes.flatMap(({ name }, column) => (column !== row && confusion[row][column] ? [`${name} (${confusion[row][column]})`] : []));
    return each.images ? [[[named(each.name)], `${confusion[row][row]} of ${each.images}`, taken.join(", ") || "–"]] : [];
  });
  const notes = [];
  if (unknown.length) notes.push(make("p", {}, `Not counted: ${counted(unknown.reduce((sum, each) => sum + each.images, 0), "image")} of classes that the model does not know: ${unknown.map((each) => each.name).join(", ")}.`));
  if (skipped.length) notes.push(make("p", {}, `${counted(skipped.length, "file")} cannot be read: ${skipped.slice(0, 5).map((each) => each.path).join(", ")}${skipped.length > 5 ? ", …" : ""}.`));
  const shown = doubts(wrong.slice(0, WRONG), (each) => testFiles[each.index], `Wrong: ${wrong.length.toLocaleString("en")} of ${counted(classes.reduce((sum, each) => sum + each.images, 0), "image")}`);
  return [
    table("Test images of each class", ["Class", "Recognised", "Taken for"], rows),
    ...notes,
    ...(wrong.length ? shown : []),
    commands(`for each file: -F files=@FILE -F classes=CLASS`, `curl -F files=@test/rose/1.jpg -F classes=rose ${server()}/api/evaluate`, "engram evaluate MODEL test"),
  ];
}

// Images whose label and prediction differ, as thumbnails.
export function doubts(found, fileOf, title) {
  const items = found.filter(fileOf).map((each) =>
    make("li", {}, make("div", { className: "thumbnail" }, thumbnail(fileOf(each), `${each.name}, looks like ${each.predicted}`)),
      make("p", { className: "small" }, "Labelled ", named(each.name, "strong"), ", looks like ", named(each.predicted, "strong"), ` (${percent(each.probability)})`)),
  );
  return items.length ? [make("h4", { textContent: title }), make("ul", { role: "list", className: "doubts", "aria-label": title }, ...items)] : [];
}

async function download(path, otherwise, text) {
  const status = find("export-status");
  setText(status, text);
  find("export-model").disabled = find("export-summary").disabled = true;
  try {
    const { blob, name } = await get(path, { file: true });
    const link = make("a", { href: URL.createObjectURL(blob), download: name || otherwise });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
    setText(status, `Saved as ${name || otherwise}.`);
  } catch (error) {
    setText(status, error.message);
  } finally {
    find("export-model").disabled = find("export-summary").disabled = false;
  }
}
