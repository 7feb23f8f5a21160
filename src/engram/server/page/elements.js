// Formatting of numbers, and elements made of text only.

const SPACE = "\u00a0"; // between a number and its unit: no line break

export const counted = (number, what) => {
  const plural = what.endsWith("s") ? `${what}es` : `${what}s`;
  return `${number.toLocaleString("en")} ${number === 1 ? what : plural}`;
};

export const megabytes = (count) =>
  count >= 100 * 2 ** 10 ? `${(count / 2 ** 20).toFixed(2)}${SPACE}MB` : `${(count / 2 ** 10).toFixed(1)}${SPACE}KB`;

export const minutes = (seconds) => {
  if (seconds < 90) return `${Math.max(seconds, 1).toFixed(0)} s`;
  return seconds < 5400 ? `${(seconds / 60).toFixed(0)} minutes` : `${(seconds / 3600).toFixed(1)} hours`;
};

export const percent = (share) => {
  if (share > 0 && share < 0.001) return `<${SPACE}0.1${SPACE}%`;
  if (share < 1 && share > 0.999) return `>${SPACE}99.9${SPACE}%`;
  return `${share === 0 || share === 1 ? 100 * share : (100 * share).toFixed(1)}${SPACE}%`;
};

// A share with its interval.
export const withInterval = (share, [low, high]) => `${percent(share)} (95${SPACE}% interval ${percent(low)} to ${percent(high)})`;

// A sentence: the accuracy with its interval and what it was measured on.
export function measuredAccuracy({ accuracy, interval, images, measured, classes, estimated }) {
  if (accuracy === null) return "Its accuracy is not known: no image could be held out.";
  const over = measured === classes ? "" : ` of ${measured} of its ${counted(classes, "class")}`;
  return `${estimated ? "Estimated accuracy" : "Accuracy"} ${withInterval(accuracy, interval)} on ${counted(images, "held-out image")}${over}.`;
}

export const moment = (text) => {
  const date = new Date(text);
  return Number.isNaN(date.getTime()) ? String(text) : date.toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
};

export const find = (id) => document.getElementById(id);

// An element with properties and children. Strings become text, never markup.
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "list") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// A button; `act` is called when it is clicked. `about` is its name where its text alone does not say enough.
export function button(text, act, { about, className = "quiet", ...properties } = {}) {
  const made = make("button", { type: "button", className, ...(about ? { "aria-label": about } : {}), ...properties }, text);
  made.addEventListener("click", act);
  return made;
}

// A table whose first column has the names, in a region that scrolls by itself.
export function table(title, heads, rows) {
  const head = heads.map((text, index) => make("th", { scope: "col", textContent: text, className: index ? "" : "name" }));
  const body = rows.map(([name, ...values]) => make("tr", {}, make("th", { scope: "row", className: "name" }, ...name), ...values.map((text) => make("td", { textContent: text }))));
  const made = make("table", {}, make("caption", { className: "hidden", textContent: title }), make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body));
  return make("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": title }, made);
}

// A name from outside: it may be written from right to left.
export const named = (text, tag = "bdi") => make(tag, { dir: "auto", textContent: text });

// A bar that shows a share; the number is written beside it.
export function bar(share) {
  const filled = make("span");
  filled.style.setProperty("inline-size", `${100 * Math.min(Math.max(share, 0), 1)}%`);
  return make("span", { className: "bar", "aria-hidden": "true" }, filled);
}

// A class with its probability, as a row of a list; without a number where the probability is not calibrated.
export function answerRow(name, probability, calibrated) {
  const number = calibrated ? [make("span", { className: "number", textContent: percent(probability) }), bar(probability)] : [];
  return make("li", {}, named(name), ...number);
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
