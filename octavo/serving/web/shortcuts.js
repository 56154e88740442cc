// Keys that do something wherever one is, and the list of them under `?`.

import { byId, element } from "./dom.js";

const KEYS = [
	["Ctrl+Shift+O", "New conversation"],
	["Ctrl+K", "Search the conversations"],
	["Ctrl+B", "Show or hide the conversations"],
	["Ctrl+,", "Settings"],
	["/", "To the field for the question"],
	["Esc", "Stop the answer"],
	["Enter", "Send"],
	["Shift+Enter", "A new line"],
	["?", "This list"],
];

/** acts: by key; those with a single letter count only outside fields. */
export function listenForKeys(acts) {
	const dialog = byId("keys");
	byId("key-list").append(...KEYS.flatMap(([keys, words]) => [
		element("dt", {}, ...keys.split("+").map((key) => element("kbd", {}, key))), element("dd", {}, words)]));
	const open = () => dialog.open || dialog.showModal();
	byId("open-keys").addEventListener("click", open);
	dialog.addEventListener("click", ({ target }) => target === dialog && dialog.close());
	document.addEventListener("keydown", (event) => {
		const isField = event.target.closest?.("input, textarea, select, [contenteditable]");
		const name = nameOf(event);
		const act = name === "?" ? open : acts[name];
		if (!act || event.defaultPrevented || (name.length === 1 && isField) || (name !== "Esc" && document.querySelector("dialog[open]"))) return;
		if (act() !== false) event.preventDefault();
	});
}

function nameOf({ key, code, ctrlKey, metaKey, shiftKey, altKey }) {
	if (altKey) return "";
	if (key === "Escape") return "Esc";
	if (!ctrlKey && !metaKey) return key;
	return `Ctrl+${shiftKey ? "Shift+" : ""}${code.startsWith("Key") ? code.slice(3) : key}`;
}
