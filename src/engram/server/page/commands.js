// The same as a command: with curl, and with engram on the server.

import { find, make, setText } from "./elements.js";

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
  const shown = lines.map((line) => {
    const text = line.replace(/^curl /, settings.token ? 'curl -H "Authorization: Bearer $ENGRAM_TOKEN" ' : "curl ").replace("MODEL", quoted(settings.model));
    const copy = make("button", { type: "button", className: "quiet", textContent: "Copy", "aria-label": `Copy: ${text.slice(0, 60)}` });
    copy.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(text);
        setText(copy, "Copied");
      } catch {
        setText(copy, "Select the text to copy it");
      }
    });
    return make("li", {}, make("code", { textContent: text }), copy);
  });
  return make("details", { className: "commands" }, make("summary", { textContent: "As a command" }), note ? make("p", { className: "muted small", textContent: note }) : null, make("ul", { role: "list" }, ...shown));
}
