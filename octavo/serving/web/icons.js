// The icons of the page: one path each, drawn in a field of 20 by 20.

import { copied, drawing, element } from "./dom.js";

const PATHS = {
	chat: "M4 4.500h12v9H9l-3.500 3v-3H4z",
	complete: "M4 5h12M4 9h12M4 13h5m4 0v3m-1.500-1.500h3",
	dashboard: "M3 14l4-5 3.500 3L17 5M3 17h14",
	list: "M3 5h14M3 10h14M3 15h9",
	plus: "M10 4v12M4 10h12",
	up: "M10 16V4m-5 5 5-5 5 5",
	down: "M10 4v12m-5-5 5 5 5-5",
	cross: "m5 5 10 10M15 5 5 15",
	pencil: "m4 16 1-4 8-8 3 3-8 8zM11 6l3 3",
	copy: "M7 7h9v9H7zM13 7V4H4v9h3",
	tick: "m4 10.500 4 4L16 6",
	again: "M16 10a6 6 0 1 1-2-4.500M16 3v3.500h-3.500",
	more: "M4 10h8m-3-4 4 4-4 4M16.500 5v10",
	chances: "M4 16v-5m4 5V6m4 10V9m4 7V4",
	menu: "M5 10h.010M10 10h.010M15 10h.010",
	clip: "m15 9-5.500 5.500a3 3 0 0 1-4.500-4.500L11 4.500a2 2 0 0 1 3 3L8.500 13a1 1 0 0 1-1.500-1.500L12 6.500",
	back: "m12 5-5 5 5 5",
	forth: "m8 5 5 5-5 5",
	eye: "M2.500 10C5 6 7.500 5 10 5s5 1 7.500 5c-2.500 4-5 5-7.500 5s-5-1-7.500-5zM10 8a2 2 0 1 0 0 4 2 2 0 0 0 0-4",
};

/** An icon, hidden from screen readers. */
export const icon = (name) =>
	drawing("svg", { viewBox: "0 0 20 20", "aria-hidden": "true" }, drawing("path", { d: PATHS[name] }));

/** A button that shows an icon, and its words to who points at it. */
export function iconButton(name, label, act, title = label) {
	const button = element("button", { type: "button", class: "icon", "aria-label": label, title }, icon(name));
	button.addEventListener("click", act);
	return button;
}

/** An icon that copies what `text()` says, and says that it did. */
export function copyIcon(text) {
	const button = iconButton("copy", "Copy", async () => {
		const isDone = await copied(text());
		button.replaceChildren(icon(isDone ? "tick" : "cross"));
		button.title = isDone ? "Copied" : "Not allowed";
		setTimeout(() => (button.replaceChildren(icon("copy")), (button.title = "Copy")), 1500);
	});
	return button;
}

/** Put the icons into the page where their names stand. */
export function fillIcons() {
	for (const place of document.querySelectorAll("i[data-icon]")) place.replaceWith(icon(place.dataset.icon));
}
