// Starts the page and ties its parts together. What they do is in their own files.

import { Chat } from "./chat.js";
import { Compare } from "./compare.js";
import { Composer } from "./composer.js";
import { Dashboard } from "./dashboard.js";
import { byId } from "./dom.js";
import { fillIcons } from "./icons.js";
import { Library } from "./library.js";
import { Playground } from "./playground.js";
import { Presets } from "./presets.js";
import { Server } from "./server.js";
import { Settings } from "./settings.js";
import { takeShared } from "./shared.js";
import { listenForKeys } from "./shortcuts.js";
import { Sidebar } from "./sidebar.js";
import { get } from "./store.js";
import { say } from "./toast.js";
import { Tree } from "./tree.js";

/** Views and their nodes: no id is the address itself, for there the browser would take the focus away. */
const VIEWS = { chat: "chat", complete: "plain", compare: "compare", dashboard: "dashboard" };

fillIcons();
const server = new Server();
const settings = new Settings(() => server.list());
const chat = new Chat(settings, server, askForKey);
const composer = new Composer(chat, server, (text, files) => {
	if (chat.isRunning || !settings.check()) return false;
	chat.ask(text, files);
	return true;
});
const library = new Library();
const playground = new Playground(settings, server, askForKey);
const compare = new Compare(server, askForKey);
const dashboard = new Dashboard();
const sidebar = new Sidebar();
new Presets(settings);

function askForKey(error) {
	if (error.status === 401) settings.askForKey();
}

/** Show what the address says: a view, a conversation, or one that a link holds. */
async function route() {
	const [name, rest = ""] = location.hash.slice(1).split("/");
	if (name === "shared") return takeShared(rest, library);
	const { generates } = server;
	const isThere = Object.hasOwn(VIEWS, name) && (name === "dashboard" || (name === "compare") !== generates);
	const view = isThere ? name : generates ? "chat" : "compare";
	for (const node of document.querySelectorAll(".view")) node.hidden = node.id !== VIEWS[view];
	for (const link of document.querySelectorAll("nav a")) {
		if (link.dataset.view === view) link.setAttribute("aria-current", "page");
		else link.removeAttribute("aria-current");
	}
	dashboard.isShown = view === "dashboard";
	if (view === "chat" && rest !== chat.tree.id) await open(rest);
	if (view === "chat" && !document.querySelector("dialog[open]")) composer.focus();
	if (view === "complete") playground.focus();
	if (view === "compare") compare.focus();
}

/** Open a kept conversation; without an id the one that is open stays, and its address is shown. */
async function open(id) {
	if (!id) return chat.tree.turns.size ? history.replaceState(null, "", `#chat/${chat.tree.id}`) : undefined;
	const found = await get(id);
	if (!found) {
		say("This conversation is not kept in this browser.");
		return startAnew();
	}
	chat.open(new Tree(found));
	library.openId = id;
	sidebar.closeOverlay();
}

function startAnew() {
	chat.open(new Tree());
	library.openId = "";
	location.hash = "#chat";
	sidebar.closeOverlay();
	composer.focus();
}

chat.addEventListener("change", () => composer.tidy());
chat.addEventListener("keep", ({ detail: tree }) => {
	if (tree === chat.tree && tree.turns.size && !location.hash.startsWith("#chat/")) {
		library.openId = tree.id;
		if (["", "#chat"].includes(location.hash)) history.replaceState(null, "", `#chat/${tree.id}`);
	}
	library.keep(tree);
});
chat.addEventListener("removed", ({ detail: before }) => {
	composer.focus();
	say("A turn was removed.", () => chat.tree.id === before.id && chat.restore(before));
});
library.addEventListener("gone", startAnew);
library.addEventListener("renamed", ({ detail: title }) => (chat.tree.title = title));
library.addEventListener("foreign", async () => {
	const found = chat.isRunning ? null : await get(chat.tree.id);
	if (found && found.changed > chat.tree.changed) chat.open(new Tree(found));
});
server.addEventListener("refused", ({ detail }) => askForKey(detail));
server.addEventListener("model", () => {
	const before = document.body.classList.contains("pools");
	document.body.classList.toggle("pools", !server.generates);
	for (const link of document.querySelectorAll("nav a")) link.hidden = link.dataset.view !== "dashboard" && (link.dataset.view === "compare") === server.generates;
	settings.showDefaults(server.model.default_parameters);
	compare.show(server.model);
	composer.tidy();
	if (before === server.generates) route();
});
byId("reset").addEventListener("click", startAnew);
byId("new-chat").addEventListener("click", startAnew);
byId("ideas").addEventListener("click", ({ target }) => {
	if (target.matches("button") && !chat.isRunning && settings.check()) chat.ask(target.textContent);
});
window.addEventListener("hashchange", route);
listenForKeys({
	"Ctrl+Shift+O": startAnew,
	"Ctrl+K": () => (sidebar.show(), library.search.focus()),
	"Ctrl+B": () => sidebar.toggle(),
	"Ctrl+,": () => settings.open(),
	"/": () => (byId("plain").hidden ? ((location.hash = `#chat/${chat.tree.turns.size ? chat.tree.id : ""}`), composer.prompt.focus()) : playground.focus()),
	Esc: () => !document.querySelector("dialog[open], :popover-open") && (chat.isRunning ? composer.stop() : playground.stop()),
});

composer.tidy();
route();
library.show();
server.start();
dashboard.start();
