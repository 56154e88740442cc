// The field in which a turn's text is changed.

import { element, wordButton } from "./dom.js";

const MAX_ROWS = 14;

/** A form with the text; `save(text)` is called with another one, `close()` always. */
export function editForm(label, text, words, save, close) {
	const rows = Math.min(MAX_ROWS, text.split("\n").length + 1 + Math.floor(text.length / 80));
	const field = element("textarea", { "aria-label": label, rows });
	const note = element("small", {}, "A new branch: what was said before stays.");
	const form = element("form", { class: "edit" }, field, note, element("button", { class: "quiet strong" }, words), wordButton("Cancel", close));
	form.addEventListener("submit", (event) => {
		event.preventDefault();
		const changed = field.value.trim();
		if (!changed) return;
		close();
		save(changed);
	});
	form.addEventListener("keydown", (event) => {
		if (event.key === "Escape") {
			event.stopPropagation();
			close();
		} else if (event.key === "Enter" && event.target === field && !event.shiftKey && !event.isComposing) {
			event.preventDefault();
			form.requestSubmit();
		}
	});
	field.value = text;
	form.focusField = () => field.focus();
	return form;
}
