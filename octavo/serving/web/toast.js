// A line at the bottom that says what has just happened, for a while, and offers to take it back.

import { byId, element, wordButton } from "./dom.js";

const SHOWN_MS = 10_000;
let timer = 0;

/** Say `text`; `undo`, when given, is offered as a button. */
export function say(text, undo) {
	const place = byId("toast");
	const close = () => place.replaceChildren();
	place.replaceChildren(element("p", {}, text));
	if (undo) place.append(wordButton("Undo", () => (close(), undo())));
	clearTimeout(timer);
	const closeLater = () => (timer = setTimeout(() => (place.matches(":hover, :focus-within") ? closeLater() : close()), SHOWN_MS));
	closeLater();
}
