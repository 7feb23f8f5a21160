// The same as a command: with curl, and with engram on the server.

import { button, find, make, setText } from "./elements.js";

const settings = { token: false, model: "MODEL" };

export function setUpCommands({ token_required: token, model }) {
  Object.assign(settings, { token, model: model ?? "MODEL" });
  find("export-commands").replaceChildren(commands("", `curl -OJ ${server()}/api/export`, "engram export MODEL model.onnx"));
}

export const server = () => location.origin;

// A file name or a class as one word of a shell command.
export const quoted = (text) => (/^[\w./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

// A closed list of commands; MODEL is replaced by the name of the model's folder.
export function commands(note, ...lines) {
  const list = make("ul", { role: "list" });
  const place = make("details", { className: "commands" }, make("summary", { textContent: "As a command" }), list);
  place.addEventListener("toggle", () => list.replaceChildren(...(place.open ? [note ? make("li", { className: "muted small", textContent: note }) : "", ...items(lines)] : [])));
  return place;
}

function items(lines) {
  return lines.map((line) => {
    const text = line.replace(/^curl /, settings.token ? 'curl -H "Authorization: Bearer $ENGRAM_TOKEN" ' : "curl ").replace("MODEL", quoted(settings.model));
    const copy = button("Copy", async () => {
      try {
        await navigator.clipboard.writeText(text);
        setText(copy, "Copied");
      } catch {
        setText(copy, "Select the text to copy it");
      }
    }, { about: `Copy the ${text.split(" ")[0]} command` });
    return make("li", {}, make("code", { textContent: text }), copy);
  });
}
