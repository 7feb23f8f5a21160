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

// Who wants to know: that no answer came, that one came, that a token is needed.
export const listeners = { lost: () => {}, answered: () => {}, unauthorised: () => {} };

export const get = (path) => ask(path);
export const remove = (path) => ask(path, { method: "DELETE" });
export const post = (path, value, options = {}) =>
  ask(path, { method: "POST", body: JSON.stringify(value), headers: { "Content-Type": "application/json" } }, options);
export const send = (path, form, { headers = {}, ...options } = {}) =>
  ask(path, { method: "POST", body: form, headers }, options);

// `waiting(seconds)` is called while the server is busy: it is asked again after as long as it said.
async function ask(path, request = {}, { waiting = () => {} } = {}) {
  for (let attempt = 1; ; attempt += 1) {
    const answer = await reach(path, request);
    const busy = BUSY.includes(answer.status) ? seconds(answer.headers.get("Retry-After")) : 0;
    if (busy && busy <= LONGEST_WAIT && attempt < PATIENCE) {
      await wait(busy, waiting);
      continue;
    }
    if (answer.status === 401 && path !== "/api/session") listeners.unauthorised();
    if (!answer.ok) throw new Problem(`${await sentence(answer)}${busy ? ` There may be room in ${minutes(busy)}.` : ""}`, answer.status);
    return content(answer);
  }
}

async function reach(path, request) {
  try {
    const answer = await fetch(path, { credentials: "same-origin", cache: "no-store", ...request });
    listeners.answered();
    return answer;
  } catch {
    listeners.lost();
    throw new Problem("The server does not answer.", 0);
  }
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
