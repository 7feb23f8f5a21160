// The page: session, connection to the server, and the current model.

import { get, listeners, pause, post, remove } from "./api.js";
import { cameraModel, setUpCamera } from "./camera.js";
import { removeOutdated, setUpClassify } from "./classify.js";
import { accuracyOf, isCalibrated, setUpMemory, showMemory } from "./memory.js";
import { setUpCommands } from "./commands.js";
import { setUpEvidence } from "./evidence.js";
import { handlePaste } from "./images.js";
import { setUpRejection, showRejection } from "./rejection.js";
import { offerScreens, screen, setUpScreens } from "./screens.js";
import { knowClasses, setUpTeach, showJobs } from "./teach.js";
import { counted, find, measuredAccuracy, setText } from "./elements.js";

const POLL_SECONDS = 15; // between checks whether another client has changed the model
const connection = find("connection");
let lost = false;
let session = { authenticated: false, token_required: false };
let shown = ""; // the model last shown, as JSON

listeners.lost = () => {
  if (lost) return;
  lost = true;
  setText(connection, "The server does not answer. Trying again every few seconds. Nothing you have entered is lost.");
  connection.hidden = false;
  reconnect();
};
listeners.unauthorised = () => {
  if (!find("sign-in").hidden) return;
  session.authenticated = false;
  showSession();
};

async function reconnect() {
  while (lost) {
    await pause(3);
    try {
      await fetch("/livez", { cache: "no-store" });
      lost = false;
    } catch {
      continue;
    }
  }
  await start();
  if (lost) return;
  setText(connection, "The server answers again.");
  connection.hidden = false;
  setTimeout(() => (connection.hidden = !lost), 4000);
}

async function start() {
  try {
    session = await get("/api/session");
    showSession();
    if (!allowed()) return;
    setUpCommands(session);
    await showJobs();
    await showModel();
  } catch (error) {
    if (error.status) complain(error);
  }
}

const allowed = () => session.authenticated || !session.token_required;

function showSession() {
  find("sign-in").hidden = allowed();
  find("signed-in").hidden = !allowed();
  find("contents").hidden = !allowed();
  const name = session.model ?? "Image classifier";
  setText(find("model-name"), name);
  document.title = session.model ? `${name} – engram` : "engram";
  find("sign-out").hidden = !(session.token_required && session.authenticated);
  if (allowed()) return;
  setText(find("summary"), "Sign in to see it.");
  shown = "";
  find("token").focus();
}

async function showModel() {
  const model = await get("/api/model"); // null: there is none yet
  if (!lost) connection.hidden = true;
  const text = JSON.stringify(model);
  if (text === shown) return;
  shown = text;
  const names = (model?.classes ?? []).map((each) => each.name);
  setText(find("summary"), model ? summary(model) : "There is no model yet.");
  const takesImages = Boolean(model) && model.image_size !== null;
  find("introduction").hidden = Boolean(model);
  offerScreens(screens(model));
  const calibrated = !takesImages || isCalibrated(model);
  showRejection(calibrated);
  setText(find("what-is-stored"), storage(model));
  knowClasses(names);
  removeOutdated(names);
  cameraModel(names, takesImages, calibrated);
  showMemory(model);
}

const screens = (model) => (!model ? ["teach"] : [...(model.image_size === null ? [] : ["classify", "teach"]), "classes", ...(model.image_size === null ? [] : ["test"]), "versions", "export"]);

function summary(model) {
  const vectors = model.image_size === null ? " It takes vectors, not images: use it from Python." : "";
  return `Version ${model.version}: it knows ${counted(model.classes.length, "class")}.${vectors} ${measuredAccuracy(accuracyOf(model))}`;
}

function storage(model) {
  const images = model?.settings.images_per_class || model?.bytes.images;
  return `Of each image a feature vector is stored, not the image itself${images ? ", but this model is set to store some of the images too" : ""}. Feature vectors are not anonymous: they reveal something about the image.`;
}

function complain(error) {
  setText(connection, error.message);
  connection.hidden = false;
}

find("sign-in-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const [input, problem] = [find("token"), find("sign-in-problem")];
  setText(problem, "");
  try {
    await post("/api/session", { token: input.value });
    input.value = "";
    await start();
    find("main").focus();
  } catch (error) {
    setText(problem, error.message);
    input.select();
  }
});
find("sign-out").addEventListener("click", async () => {
  try {
    await remove("/api/session");
  } catch (error) {
    return complain(error);
  }
  location.reload(); // so that nothing about the model stays in the page
});

async function poll() {
  for (;;) {
    await pause(POLL_SECONDS);
    if (document.hidden || lost || !allowed() || document.querySelector("dialog[open]")) continue;
    try {
      await showJobs();
      await showModel(); // even if there is none yet: another client may create it
    } catch {
      // shown already, or when the user does something
    }
  }
}

setUpScreens();
setUpCamera();
setUpClassify();
setUpRejection();
setUpEvidence();
setUpTeach(() => showModel().catch(() => {}));
setUpMemory(async () => {
  await showModel();
  await showJobs(); // forgetting a class deletes jobs
});
handlePaste(() => (screen === "teach" ? document.querySelector("fieldset") : find("classify-drop")));
start();
poll();
