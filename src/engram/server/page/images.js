// Images as input: dropped, pasted, chosen, or taken with the camera.

import { button, counted, find, make } from "./elements.js";

const IMAGE = /\.(png|jpe?g|gif|webp|bmp|tiff?|ppm|pgm|pbm|jfif|avif|hei[cf]|hif)$/i;

const paths = new WeakMap(); // file of a dropped folder → its path

// The name of the folder of a chosen or dropped file, or "".
export const folderOf = (file) => (paths.get(file) ?? file.webkitRelativePath ?? "").split("/").at(-2) ?? "";

export const isImage = (file) => file.type.startsWith("image/") || IMAGE.test(file.name);

// Turn `place` into a drop zone. `accept(files)` gets the files; `about` describes them to a screen reader.
export function dropZone(place, accept, about, { once = false, hint = "Drop or paste images here, or" } = {}) {
  const chooser = make("input", { type: "file", multiple: true, accept: "image/*", hidden: true, "aria-label": `Images ${about}` });
  const capture = make("input", { type: "file", accept: "image/*", hidden: true, "aria-label": `A photo ${about}` });
  capture.setAttribute("capture", "environment");
  const choose = button("Choose images", () => chooser.click(), { about: `Choose images ${about}`, className: "choose" });
  const camera = button("Camera", () => takeImages((file) => accept([file]), capture, once), { about: `Camera: an image ${about}`, className: "camera" });
  for (const input of [chooser, capture]) onChosen(input, accept);
  place.append(make("p", { className: "hint" }, hint), make("p", { className: "row" }, choose, camera), chooser, capture);
  handleDrop(place, accept);
  place.paste = accept;
}

// Call `accept(files)` with files that are chosen in an input.
export function onChosen(input, accept) {
  input.addEventListener("change", () => {
    const files = [...input.files];
    input.value = ""; // so that the same files can be chosen again
    if (files.length) accept(files);
  });
}

export function handleDrop(place, accept) {
  let inside = 0; // dragenter and dragleave also fire for every child
  place.addEventListener("dragenter", () => place.classList.toggle("over", (inside += 1) > 0));
  place.addEventListener("dragleave", () => place.classList.toggle("over", (inside -= 1) > 0));
  place.addEventListener("dragover", (event) => event.preventDefault());
  place.addEventListener("drop", async (event) => {
    event.preventDefault();
    inside = 0;
    place.classList.remove("over");
    const files = await dropped(event.dataTransfer);
    if (files.length) accept(files);
  });
}

// The dropped files, including those in dropped folders.
async function dropped(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  if (!entries.some((entry) => entry.isDirectory)) return [...transfer.files];
  return (await Promise.all(entries.map(within))).flat().filter(isImage);
}

async function within(entry) {
  if (entry.isFile) {
    const file = await new Promise((resolve, reject) => entry.file(resolve, reject));
    paths.set(file, entry.fullPath);
    return [file];
  }
  const reader = entry.createReader();
  const found = [];
  for (;;) {
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject)); // returns up to 100
    if (!some.length) return found;
    for (const each of some) found.push(...(await within(each)));
  }
}

// Pasted images go to the focused class, else to the drop zone that `otherwise()` returns.
export function handlePaste(otherwise) {
  document.addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])].filter(isImage);
    if (!files.length || document.querySelector("dialog[open]")) return;
    event.preventDefault();
    (document.activeElement?.closest("fieldset") ?? otherwise()).paste(files);
  });
  // An image dropped outside a drop zone would replace the page.
  for (const kind of ["dragover", "drop"]) document.addEventListener(kind, (event) => event.preventDefault());
}

async function takeImages(accept, capture, once) {
  if (!navigator.mediaDevices?.getUserMedia) return capture.click();
  let stream;
  try {
    stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
  } catch {
    return capture.click(); // no camera, or no permission: let the system ask for a photo
  }
  const dialog = find("camera");
  const viewfinder = find("viewfinder");
  const status = find("camera-status");
  let taken = 0;
  const take = find("camera-take");
  take.disabled = true; // until the camera delivers
  viewfinder.onloadeddata = () => (take.disabled = false);
  viewfinder.srcObject = stream;
  status.textContent = "";
  take.onclick = async () => {
    const file = await stillImage(viewfinder, `camera ${(taken += 1)}.jpg`);
    if (!file) return;
    accept(file);
    if (once) dialog.close();
    else status.textContent = `${counted(taken, "image")} taken.`;
  };
  find("camera-close").onclick = () => dialog.close();
  dialog.addEventListener("close", () => {
    for (const track of stream.getTracks()) track.stop();
    viewfinder.srcObject = null;
  }, { once: true });
  dialog.showModal();
}

// The current frame of a video as a file, with its shorter side scaled down to `side` pixels.
export async function stillImage(video, name, side = Infinity) {
  const { videoWidth: width, videoHeight: height } = video;
  if (!width) return null;
  const scale = Math.min(1, side / Math.min(width, height));
  const canvas = make("canvas", { width: Math.round(scale * width), height: Math.round(scale * height) });
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(video, 0, 0, canvas.width, canvas.height);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.92));
  return blob && new File([blob], name, { type: "image/jpeg" });
}

// A thumbnail of a file, or an empty frame if the browser cannot show it.
export function thumbnail(file, text = "") {
  const image = make("img", { alt: text, decoding: "async" });
  const address = URL.createObjectURL(file);
  const done = () => URL.revokeObjectURL(address);
  image.addEventListener("load", done, { once: true });
  image.addEventListener("error", () => {
    done();
    image.replaceWith(make("span", { className: "unseen", role: "img", "aria-label": text || "A file that cannot be shown" }));
  }, { once: true });
  image.src = address;
  return image;
}
