// The screens of the page: one is shown, named by the address after the “#”.

import { find } from "./elements.js";

const WITH_CAMERA = ["classify", "teach"];

let available = [];
export let screen = "";
export const whenShown = []; // called after another screen is shown

export function setUpScreens() {
  addEventListener("hashchange", () => openScreen(location.hash.slice(1), { heading: true }));
}

// Only these screens exist for the model in use. The first is shown unless the address names another one.
export function offerScreens(names) {
  available = names;
  for (const link of find("contents").querySelectorAll("a")) link.parentElement.hidden = !names.includes(link.hash.slice(1));
  find("contents").querySelector("ul").hidden = names.length < 2;
  if (!names.includes(screen)) openScreen(names.includes(location.hash.slice(1)) ? location.hash.slice(1) : names[0]);
}

export function openScreen(name, { heading = false } = {}) {
  if (name === screen || !available.includes(name)) return;
  screen = name;
  for (const section of document.querySelectorAll("#signed-in > section")) section.hidden = section.id !== name;
  find("live").hidden = !WITH_CAMERA.includes(name);
  for (const link of find("contents").querySelectorAll("a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  for (const listener of whenShown) listener();
  if (!heading) return;
  scrollTo(0, 0);
  find(`${name}-heading`).focus({ preventScroll: true });
}
