// Formatting of numbers, and elements made of text only.

export const counted = (number, what) => {
  const plural = what.endsWith("s") ? `${what}es` : `${what}s`;
  return `${number.toLocaleString("en")} ${number === 1 ? what : plural}`;
};

export const megabytes = (count) =>
  count >= 100 * 2 ** 10 ? `${(count / 2 ** 20).toFixed(2)} MB` : `${(count / 2 ** 10).toFixed(1)} KB`;

export const minutes = (seconds) => {
  if (seconds < 90) return `${Math.max(seconds, 1).toFixed(0)} s`;
  return seconds < 5400 ? `${(seconds / 60).toFixed(0)} minutes` : `${(seconds / 3600).toFixed(1)} hours`;
};

export const percent = (share) => {
  if (share > 0 && share < 0.001) return "< 0.1 %";
  if (share < 1 && share > 0.999) return "> 99.9 %";
  return `${(100 * share).toFixed(1)} %`;
};

// Accuracy with its interval and what it was measured on.
export const accuracyText = (accuracy, [low, high], measured, classes, images) => {
  const over = measured === classes ? "all classes" : `${measured} of ${counted(classes, "class")}`;
  return `${accuracy.toFixed(3)} (95 % interval ${low.toFixed(3)} to ${high.toFixed(3)}) over ${over}, on ${counted(images, "held-out image")}`;
};

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

// A name from outside: it may be written from right to left.
export const named = (text, tag = "bdi") => make(tag, { dir: "auto", textContent: text });

// A bar that shows a share; the number is written beside it.
export function bar(share) {
  const filled = make("span");
  filled.style.setProperty("inline-size", `${100 * Math.min(Math.max(share, 0), 1)}%`);
  return make("span", { className: "bar", "aria-hidden": "true" }, filled);
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
