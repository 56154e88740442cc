// Starts the page: its two views, the list of models, the composer. Everything else is in its own file.

import { models } from "./api.js";
import { Conversation } from "./chat.js";
import { Dashboard } from "./dashboard.js";
import { byId, element } from "./dom.js";
import { Settings } from "./settings.js";

const RETRY_MS = 2000;
const MAX_PROMPT_PX = 240;
const HAS_KEYBOARD = matchMedia("(hover: hover)").matches;

const prompt = byId("prompt");
const model = byId("model");
const settings = new Settings(listModels);
// Until the list of models is there, none is named: the server takes its own.
const conversation = new Conversation(() => ({ model: model.value || undefined, ...settings.values() }), askForKey);
const dashboard = new Dashboard();
let retry = 0;

/** Fill the list of models; again later when the server is not ready. */
async function listModels() {
  clearTimeout(retry);
  try {
    const ids = await models();
    model.replaceChildren(...ids.map((id) => element("option", { value: id, title: id }, shortName(id))));
    model.disabled = ids.length < 2;
    model.title = model.value;
  } catch (error) {
    model.replaceChildren(element("option", { value: "" }, error.status === 401 ? "no access" : "no server"));
    model.disabled = true;
    if (error.status !== 401) retry = setTimeout(listModels, RETRY_MS);
    askForKey(error);
  }
  tidy();
}

/** Folders are named by their last part. */
const shortName = (id) => id.replace(/[/\\]+$/, "").split(/[/\\]/).at(-1) || id;

function askForKey(error) {
  if (error.status === 401) settings.askForKey();
}

function ask(text) {
  if (!text || conversation.isRunning || !settings.check()) return false;
  conversation.ask(text);
  return true;
}

function askPrompt() {
  if (ask(prompt.value.trim())) prompt.value = "";
  tidy();
}

/** What may be pressed, and how high the field is. */
function tidy() {
  byId("send").hidden = conversation.isRunning;
  byId("stop").hidden = !conversation.isRunning;
  byId("send").disabled = !prompt.value.trim();
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight, MAX_PROMPT_PX)}px`;
}

function chooseView() {
  const wanted = location.hash === "#dashboard" ? "dashboard" : "chat";
  for (const view of document.querySelectorAll(".view")) view.hidden = view.id !== wanted;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === wanted) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  dashboard.isShown = wanted === "dashboard";
  if (wanted === "chat" && HAS_KEYBOARD) prompt.focus();
}

function onKey(event) {
  if (event.key === "Enter" && event.target === prompt && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    askPrompt();
  } else if (event.key === "Escape" && conversation.isRunning && !settings.dialog.open) {
    stop();
  }
}

function stop() {
  conversation.stop();
  prompt.focus();
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  askPrompt();
});
byId("stop").addEventListener("click", stop);
byId("reset").addEventListener("click", () => {
  conversation.reset();
  location.hash = "#chat";
  prompt.focus();
});
byId("ideas").addEventListener("click", (event) => {
  if (event.target.matches("button")) ask(event.target.textContent);
});
model.addEventListener("change", () => (model.title = model.value));
prompt.addEventListener("input", tidy);
document.addEventListener("conversation", tidy);
document.addEventListener("keydown", onKey);
window.addEventListener("hashchange", chooseView);

chooseView();
listModels();
dashboard.start();
