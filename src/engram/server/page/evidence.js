// Evidence about the model: how well each class is recognised, evaluation on test images, and exports.

import { get, send } from "./api.js";
import { folderOf, handleDrop, isImage, onChosen, thumbnail } from "./images.js";
import { commands, server } from "./commands.js";
import { showThresholds } from "./rejection.js";
import { accuracyText, bar, counted, find, make, named, percent, setText, share, table } from "./elements.js";

const WRONG = 24; // wrong predictions that are shown
const ADVICE = {
  enough: () => "More images are not needed.",
  more: ([, half, all]) => `More images would help: with half of them ${half.toFixed(2)} is reached, with all ${all.toFixed(2)}.`,
  different: ([, half, all]) => `More of the same would hardly help (with half of the images ${half.toFixed(2)}, with all ${all.toFixed(2)}). Add images that show how it differs from the classes it is confused with.`,
  unknown: () => "Too few images to tell whether more would help. Add some.",
};

let testFiles = [];

// What is known of each class, as an element by its name; empty while it is unknown.
export async function loadEvidence() {
  const { generation, evidence, rejections } = await get("/api/evidence");
  showThresholds(rejections);
  setText(find("curve"), curveText(evidence));
  return { generation, classes: new Map(evidence.classes.map((each) => [each.name, aboutClass(each)])) };
}

function curveText({ curve: [quarter, half, all], held_out: images, classes }) {
  if (all === undefined) return "";
  const similar = classes.reduce((sum, each) => sum + each.similar, 0);
  const optimistic = similar > images / 4 ? ` ${counted(similar, "image")} nearly equal another image of their class, as camera images taken in a row do: the accuracy on images of another day is lower. Evaluate with such images.` : "";
  return `Do I need more images? Accuracy with a quarter of the stored features: ${quarter.toFixed(3)}, with half: ${half.toFixed(3)}, with all: ${all.toFixed(3)}.${optimistic}`;
}

function aboutClass(each) {
  if (each.accuracy === null) return [`${counted(each.seen, "image")}. Not measured: it needs at least two images and another class.`];
  const right = Math.round(each.accuracy * each.held_out);
  const others = each.confused_with.flatMap((other, index) => [index ? ", " : " Confused with ", named(other.name), ` (${other.images})`]);
  const similar = each.similar > each.held_out / 4 ? ` ${each.similar} nearly equal another one.` : "";
  const text = make("p", {}, `${right} of ${each.held_out} held-out images recognised (${percent(each.accuracy)}).`, ...others, others.length ? "." : "", `${similar} ${ADVICE[each.advice](each.curve)}`);
  return [bar(each.accuracy), text];
}

export function setUpEvidence() {
  const accept = (files) => evaluate(files.filter(isImage));
  handleDrop(find("evaluate-drop"), accept);
  find("choose-test").addEventListener("click", () => find("test-folder").click());
  onChosen(find("test-folder"), accept);
  find("export").addEventListener("click", () => download("/api/export", "model.zip", "Exporting. This takes some seconds …"));
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
  setText(status, `Evaluating ${counted(testFiles.length, "image")} …`);
  try {
    const found = await send("/api/evaluate", form, { waiting: (seconds) => setText(status, `The server is busy. Trying again in ${seconds} s.`) });
    setText(status, `Version ${found.generation}: accuracy ${accuracyText(found.accuracy, found.interval)} on ${counted(found.images, "test image")}; mean over classes ${found.mean_accuracy.toFixed(3)}. None of the images is stored.`);
    place.replaceChildren(...evaluation(found));
  } catch (error) {
    setText(status, error.message);
  }
}

function evaluation({ classes, unknown, wrong, skipped }) {
  const rows = classes.filter((each) => each.images).map((each) => [[named(each.name)], each.images.toLocaleString("en"), share(each.accuracy), share(each.precision)]);
  const notes = [];
  if (unknown.length) notes.push(make("p", {}, `Not counted: ${counted(unknown.reduce((sum, each) => sum + each.images, 0), "image")} of classes that the model does not know: ${unknown.map((each) => each.name).join(", ")}.`));
  if (skipped.length) notes.push(make("p", {}, `${counted(skipped.length, "file")} cannot be read: ${skipped.slice(0, 5).map((each) => each.path).join(", ")}.`));
  const shown = doubts(wrong.slice(0, WRONG), (each) => testFiles[each.index], `Wrong: ${wrong.length.toLocaleString("en")} of ${counted(classes.reduce((sum, each) => sum + each.images, 0), "image")}`);
  return [
    table("Evaluation of each class", ["Class", "Images", "Recognised", "Precision"], rows),
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
  find("export").disabled = find("export-summary").disabled = true;
  try {
    const { blob, name } = await get(path, { file: true });
    const link = make("a", { href: URL.createObjectURL(blob), download: name || otherwise });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
    setText(status, `Saved as ${name || otherwise}.`);
  } catch (error) {
    setText(status, error.message);
  } finally {
    find("export").disabled = find("export-summary").disabled = false;
  }
}
