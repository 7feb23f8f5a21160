// When an image is answered with “none of these”: one choice for the camera and for files.

import { counted, find, make, percent, setText } from "./elements.js";

let thresholds = []; // of the model in use, each with its rate and the share of known images it accepts

export function setUpRejection() {
  find("rate").addEventListener("change", showKnown);
  for (const name of ["rate", "probability"]) find(name).addEventListener("input", () => (find(`by-${name}`).checked = true));
  find("rejection").addEventListener("input", showChoice);
}

// By probability only with calibrated ones; by rate only if it can be estimated for this model.
export function showRejection(calibrated) {
  find("probability-option").hidden = !calibrated;
  find("uncalibrated").hidden = calibrated;
  showChoice();
}

export function showThresholds(found) {
  const chosen = find("rate").value || "5";
  thresholds = found;
  find("rate-option").hidden = !found.length;
  find("rate").replaceChildren(...found.map((each) => make("option", { value: `${+(100 * each.rate).toFixed(6)}`, textContent: `${+(100 * each.rate).toFixed(6)} %` })));
  find("rate").value = chosen;
  showKnown();
  showChoice();
}

// Beside the heading, since the choice is folded.
function showChoice() {
  const text = chosen("rate") ? `to images that resemble no class (${find("rate").value} %)` : chosen("probability") ? `below ${find("probability").value} %` : "never";
  setText(find("rejection-chosen"), text);
}

function showKnown() {
  const threshold = thresholds[find("rate").selectedIndex];
  setText(find("known-accepted"), threshold ? `Of images of known classes, ${percent(threshold.known_accepted)} are accepted (${counted(threshold.images, "held-out image")}).` : "");
}

const chosen = (name) => find(`by-${name}`).checked && !find(`${name}-option`).hidden;

// As part of the address of a request to classify.
export function rejection() {
  if (chosen("rate")) return `&reject=${find("rate").value}%25`;
  return chosen("probability") ? `&reject=${Math.min(Math.max(Number(find("probability").value) || 50, 1), 100) / 100}` : "";
}
