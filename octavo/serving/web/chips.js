// A file beside a question: its name, what could be read of it, and its text or picture on a click.

import { element } from "./dom.js";
import { iconButton } from "./icons.js";

const MAX_SHOWN = 20_000;

/** file: { name, text or image, note }; `remove`, when given, takes it away. */
export function chip(file, remove) {
	const facts = [file.note, !file.image && `${file.text.length.toLocaleString("en")} characters`].filter(Boolean);
	const summary = element("summary", {}, element("strong", {}, file.name), element("small", { class: file.note ? "wrong" : null }, facts.join(" · ")));
	const details = element("details", { class: "chip" }, summary);
	details.addEventListener("toggle", () => details.append(contentOf(file)), { once: true });
	return remove ? element("div", { class: "chip-row" }, details, iconButton("cross", `Remove ${file.name}`, remove)) : details;
}

function contentOf({ text, image }) {
	if (image) return pictureOf(image);
	return element("pre", { tabindex: 0 }, text.slice(0, MAX_SHOWN), text.length > MAX_SHOWN ? "\n…" : "");
}

/** A picture, drawn: the page's policy lets no picture in from anywhere. */
function pictureOf(address) {
	const canvas = element("canvas", { role: "img", "aria-label": "The picture" });
	const bytes = Uint8Array.from(atob(address.split(",")[1] ?? ""), (letter) => letter.charCodeAt(0));
	createImageBitmap(new Blob([bytes])).then((picture) => {
		const scale = Math.min(1, 480 / Math.max(picture.width, picture.height));
		canvas.width = picture.width * scale;
		canvas.height = picture.height * scale;
		canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
	}, () => canvas.replaceWith("This picture cannot be shown."));
	return canvas;
}
