// A menu under a button: reached and left by keyboard as menus are.

import { element } from "./dom.js";

const EDGE_PX = 8;
let open = null;

/** Show a menu at `button`; items: [words, what it does, whether that loses something]. */
export function showMenu(button, items) {
	const wasOpen = open?.button === button;
	open?.close();
	if (wasOpen) return;
	const node = element("div", { class: "menu", role: "menu", popover: "auto", "aria-label": button.getAttribute("aria-label") });
	const entries = items.map(([words, act, isLoss]) => {
		const entry = element("button", { type: "button", role: "menuitem", tabindex: -1, class: isLoss ? "loss" : null }, words);
		entry.addEventListener("click", () => (node.hidePopover(), act()));
		return entry;
	});
	node.append(...entries);
	node.addEventListener("keydown", (event) => move(event, entries));
	node.addEventListener("toggle", ({ newState }) => newState === "closed" && close());
	const close = () => {
		if (node.contains(document.activeElement)) button.focus();
		button.setAttribute("aria-expanded", "false");
		node.remove();
		open = null;
	};
	(button.closest("dialog, aside, main") ?? document.body).append(node);
	node.showPopover();
	place(node, button.getBoundingClientRect());
	button.setAttribute("aria-expanded", "true");
	open = { button, close };
	entries[0].focus();
}

/** Below the button, or above where there is no room. */
export function place(node, { left, top, bottom }) {
	const { offsetWidth, offsetHeight } = node;
	const isLow = bottom + offsetHeight + EDGE_PX > innerHeight;
	node.style.left = `${Math.max(EDGE_PX, Math.min(left, innerWidth - offsetWidth - EDGE_PX))}px`;
	node.style.top = `${Math.max(EDGE_PX, isLow ? top - offsetHeight - 4 : bottom + 4)}px`;
}

function move(event, entries) {
	const at = entries.indexOf(document.activeElement);
	const next = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: -1 }[event.key];
	if (next === undefined) return event.key === "Tab" && open?.close();
	event.preventDefault();
	entries.at(next % entries.length).focus();
}
