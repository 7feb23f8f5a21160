// The page: the session, the connection to the server, and the present model.

import { get, listeners, pause, post, remove } from "./api.js";
import { keepAnswersOf, setUpClassify } from "./classify.js";
import { isCalibrated, setUpMemory, showMemory } from "./memory.js";
import { catchPasted } from "./pictures.js";
import { knowClasses, setUpTeach, showJobs } from "./teach.js";
import { counted, find, megabytes, tell } from "./words.js";

const HEARTBEAT = 15; // seconds between looks at whether someone else has changed the model
const connection = find("connection");
let lost = false;
let session = { authenticated: false, token_required: false };
let shown = ""; // the model as it was last shown

listeners.lost = () => {
  if (lost) return;
  lost = true;
  tell(connection, "The server does not answer. Trying again every few seconds; nothing you have prepared here is lost.");
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
      await fetch("/readyz", { cache: "no-store" });
      lost = false;
    } catch {
      continue;
    }
  }
  await start();
  if (lost) return;
  tell(connection, "The server answers again.");
  connection.hidden = false;
  setTimeout(() => (connection.hidden = !lost), 4000);
}

async function start() {
  try {
    session = await get("/api/session");
    showSession();
    if (!allowed()) return;
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
  find("sign-out").hidden = !(session.token_required && session.authenticated);
  if (allowed()) return;
  tell(find("summary"), "Sign in to see it.");
  shown = "";
  find("token").focus();
}

async function showModel() {
  let model = null;
  try {
    model = await get("/api/model");
  } catch (error) {
    if (error.status !== 404) throw error;
  }
  if (!lost) connection.hidden = true;
  const text = JSON.stringify(model);
  if (text === shown) return;
  shown = text;
  const classes = model?.classes ?? [];
  tell(find("summary"), model ? `Generation ${model.generation}: it knows ${counted(classes.length, "class")} and stores ${megabytes(model.bytes.memory)}.` : "There is no model yet.");
  const sees = Boolean(model) && model.image_size !== null;
  find("no-model").hidden = sees;
  find("asking").hidden = !sees;
  if (model && !sees) tell(find("no-model"), "This model takes vectors, not pictures. Use it from Python.");
  const calibrated = !sees || isCalibrated(model);
  find("reject-option").hidden = !calibrated;
  find("uncalibrated").hidden = calibrated;
  tell(find("what-is-kept"), kept(model));
  knowClasses(classes.map((each) => each.name));
  keepAnswersOf(classes.map((each) => each.name));
  showMemory(model);
}

function kept(model) {
  const images = model?.settings?.images_per_class || model?.bytes?.images;
  return `Of each picture a feature vector is stored, not the picture itself${images ? ", but this model is set to store some of the pictures too" : ""}. Feature vectors are not anonymous: they reveal something about the picture.`;
}

function complain(error) {
  tell(connection, error.message);
  connection.hidden = false;
}

find("sign-in-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const [input, problem] = [find("token"), find("sign-in-problem")];
  tell(problem, "");
  try {
    await post("/api/session", { token: input.value });
    input.value = "";
    await start();
    find("main").focus();
  } catch (error) {
    tell(problem, error.message);
    input.select();
  }
});
find("sign-out").addEventListener("click", async () => {
  try {
    await remove("/api/session");
  } catch (error) {
    return complain(error);
  }
  location.reload(); // nothing of the model stays in the page
});

async function heartbeat() {
  for (;;) {
    await pause(HEARTBEAT);
    if (document.hidden || lost || !allowed() || document.querySelector("dialog[open]")) continue;
    try {
      await showJobs();
      await showModel(); // also where there is none yet: it may be made by others
    } catch {
      // what is wrong is said already, or will be when something is asked for
    }
  }
}

setUpClassify();
setUpTeach(() => showModel().catch(() => {}));
setUpMemory(async () => {
  await showModel();
  await showJobs(); // some may be forgotten with a class
});
catchPasted(find("classify-drop"));
start();
heartbeat();
