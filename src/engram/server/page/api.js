// Requests to the server. What goes wrong is an error whose message is a sentence for the person.

import { minutes } from "./words.js";

const BUSY = [429, 503]; // with how long to wait: otherwise it is not for a moment
const PATIENCE = 8; // how often a busy server is asked again
const LONGEST_WAIT = 30; // seconds; a longer wait is for the person to decide on

export class Problem extends Error {
  constructor(message, status) {
    super(message);
    this.status = status; // 0: no answer came
  }
}

// Who wants to know: that no answer came, that a token is needed.
export const listeners = { lost: () => {}, unauthorised: () => {} };

export const get = (path) => ask(path);
export const remove = (path) => ask(path, { method: "DELETE" });
export const post = (path, value, options = {}) =>
  ask(path, { method: "POST", body: JSON.stringify(value), headers: { "Content-Type": "application/json" } }, options);
export const send = (path, form, { headers = {}, ...options } = {}) =>
  ask(path, { method: "POST", body: form, headers }, options);

// `waiting(seconds)` is called while the server is busy: it is asked again after as long as it said.
// `sent(share)` is called while the body is on its way.
async function ask(path, request = {}, { waiting = () => {}, sent = null } = {}) {
  for (let attempt = 1; ; attempt += 1) {
    const answer = await reach(path, request, sent);
    const busy = BUSY.includes(answer.status) ? seconds(answer.headers.get("Retry-After")) : 0;
    if (busy && busy <= LONGEST_WAIT && attempt < PATIENCE && path !== "/api/session") {
      await wait(busy, waiting);
      continue;
    }
    if (answer.status === 401 && path !== "/api/session") listeners.unauthorised();
    if (!answer.ok) throw new Problem(`${await sentence(answer)}${busy ? ` There may be room in ${minutes(busy)}.` : ""}`, answer.status);
    return content(answer);
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

// As fetch does, but telling how much has been sent, which fetch cannot.
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

async function content(answer) {
  if (answer.status === 204) return null;
  try {
    return await answer.json();
  } catch {
    throw new Problem("The answer of the server broke off.", 0);
  }
}

async function sentence(answer) {
  try {
    const { detail } = await answer.json();
    if (typeof detail === "string" && detail) return detail;
  } catch {
    // not a problem document: a proxy may have answered
  }
  if (answer.status === 413) return "That is more than the server takes at once.";
  if (answer.status === 429) return "The server is busy. Try again later.";
  return `The server refused with status ${answer.status} and did not say why.`;
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
