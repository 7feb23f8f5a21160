// Requests to the server. Errors have a message to show to the user.

import { minutes } from "./elements.js";

const BUSY = [429, 503]; // retried if they have a Retry-After header
const MAX_ATTEMPTS = 8;
const LONGEST_WAIT = 30; // seconds; a longer wait is left to the user

export class Problem extends Error {
  constructor(message, status) {
    super(message);
    this.status = status; // 0: no response
  }
}

// Called when there is no response, and when a token is required.
export const listeners = { lost: () => {}, unauthorised: () => {} };

export const get = (path, options = {}) => ask(path, {}, options); // {file: true}: as a file
export const remove = (path) => ask(path, { method: "DELETE" });
export const post = (path, value, options = {}) =>
  ask(path, { method: "POST", body: JSON.stringify(value), headers: { "Content-Type": "application/json" } }, options);
export const send = (path, form, { headers = {}, ...options } = {}) =>
  ask(path, { method: "POST", body: form, headers }, options);

// `waiting(seconds)` is called every second until a busy server is tried again.
// `sent(share)` is called during the upload of the body.
async function ask(path, request = {}, { waiting = () => {}, sent = null, file = false } = {}) {
  for (let attempt = 1; ; attempt += 1) {
    const response = await reach(path, request, sent);
    const busy = BUSY.includes(response.status) ? seconds(response.headers.get("Retry-After")) : 0;
    if (busy && busy <= LONGEST_WAIT && attempt < MAX_ATTEMPTS && path !== "/api/session") {
      await wait(busy, waiting);
      continue;
    }
    if (response.status === 401 && path !== "/api/session") listeners.unauthorised();
    if (!response.ok) throw new Problem(`${await message(response)}${busy ? ` Try again in ${minutes(busy)}.` : ""}`, response.status);
    return file ? download(response) : content(response);
  }
}

async function reach(path, request, sent) {
  try {
    const whole = { credentials: "same-origin", cache: "no-store", ...request };
    return await (sent ? upload(path, request, sent) : fetch(path, whole));
  } catch {
    listeners.lost();
    throw new Problem("The server does not answer.", 0);
  }
}

// Like fetch, with upload progress, which fetch does not report.
function upload(path, { method, body, headers }, sent) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open(method, path);
    for (const [name, value] of Object.entries(headers)) request.setRequestHeader(name, value);
    request.upload.onprogress = (event) => event.lengthComputable && sent(event.loaded / event.total);
    request.onerror = reject;
    request.onload = () => {
      const wait = request.getResponseHeader("Retry-After");
      resolve(new Response(request.response || null, { status: request.status, headers: wait ? { "Retry-After": wait } : {} }));
    };
    request.send(body);
  });
}

async function download(response) {
  const found = /filename\*?=(?:UTF-8''|utf-8'')?"?([^";]+)/.exec(response.headers.get("Content-Disposition") ?? "");
  return { blob: await response.blob(), name: found ? decodeURIComponent(found[1]) : "" };
}

async function content(response) {
  if (response.status === 204) return null;
  try {
    return await response.json();
  } catch {
    throw new Problem("The response of the server is incomplete.", 0);
  }
}

async function message(response) {
  try {
    const { detail } = await response.json();
    if (typeof detail === "string" && detail) return detail;
  } catch {
    // not a problem document: perhaps from a proxy
  }
  if (response.status === 413) return "The server does not accept that much at once.";
  if (response.status === 429) return "The server is busy. Try again later.";
  return `The server answered with status ${response.status}.`;
}

function seconds(header) {
  const found = Number(header ?? NaN);
  return Number.isFinite(found) && found > 0 ? found : 0;
}

async function wait(total, waiting) {
  for (let left = Math.ceil(total); left > 0; left -= 1) {
    waiting(left);
    await pause(1);
  }
}

export const pause = (length) => new Promise((resolve) => setTimeout(resolve, 1000 * length));
