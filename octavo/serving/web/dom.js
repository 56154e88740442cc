// Nodes of the page. Text of models and servers enters the document here, as text nodes and nothing else.

const SVG = "http://www.w3.org/2000/svg";
const MATH = "http://www.w3.org/1998/Math/MathML";

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

/** A new element. Attributes that are null or false are left out; children are nodes or strings. */
export function element(tag, attributes = {}, ...children) {
	return filled(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function drawing(tag, attributes = {}, ...children) {
	return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** The same for MathML. */
export function formula(tag, attributes = {}, ...children) {
	return filled(document.createElementNS(MATH, tag), attributes, children);
}

/** Keep a text for the life of this tab; an empty one is forgotten. */
export const keepDraft = (name, text) => (text ? sessionStorage.setItem(name, text) : sessionStorage.removeItem(name));

/** A button of words. */
export function wordButton(words, act) {
	const button = element("button", { type: "button", class: "quiet" }, words);
	button.addEventListener("click", act);
	return button;
}

/** A button that copies what `text()` says, and says that it did. */
export function copyButton(text) {
	const button = wordButton("Copy", async () => {
		button.textContent = (await copied(text())) ? "Copied" : "Not allowed";
		setTimeout(() => (button.textContent = "Copy"), 1500);
	});
	return button;
}

/** Put `text` on the clipboard; whether that was allowed. */
export async function copied(text) {
	try {
		await navigator.clipboard.writeText(text);
		return true;
	} catch {
		return copiedTheOldWay(text); // no clipboard without TLS, except on localhost
	}
}

function copiedTheOldWay(text) {
	const area = element("textarea", { class: "hidden" });
	area.value = text;
	document.body.append(area);
	area.select();
	const done = document.execCommand("copy");
	area.remove();
	return done;
}

function filled(node, attributes, children) {
	for (const [name, value] of Object.entries(attributes)) {
		if (value != null && value !== false) node.setAttribute(name, value === true ? "" : value);
	}
	node.append(...children);
	return node;
}
