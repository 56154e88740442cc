// Text with marks as nodes: emphasis, code, links, formulas, references to footnotes.

import { element } from "./dom.js";
import { mathNode } from "./math.js";

export const MAX_DEPTH = 8;
const INLINE = new RegExp(
	[
		/(?<math>\\\(.{1,2000}?\\\)|\\\[.{1,2000}?\\\]|\$\$.{1,2000}?\$\$|(?<![\w$])\$(?=[^\s$])[^$\n]{0,500}?(?<=\S)\$(?![\d$]))/,
		/\\(?<escaped>[!-/:-@[-`{-~])/,
		/(?<ticks>`+)(?<code>[^`]|[^`].{0,2000}?[^`])\k<ticks>(?!`)/,
		/\*\*(?=\S)(?<strong>.{1,2000}?\S?)\*\*(?!\*)/,
		/(?<![\w_])__(?=\S)(?<strong2>.{1,2000}?)__(?![\w_])/,
		/\*(?=[^\s*])(?<em>.{0,2000}?[^\s*])\*(?!\*)/,
		/(?<![\w_])_(?=[^\s_])(?<em2>.{0,2000}?[^\s_])_(?![\w_])/,
		/~~(?=\S)(?<del>.{1,2000}?)~~/,
		/\[\^(?<note>[^\]\s]{1,50})\]/,
		/!?\[(?<label>[^\]]{0,500})\]\((?<href>[^\s()]{1,2000}(?:\([^\s()]{0,200}\))?)(?:\s+"[^"]{0,500}")?\)/,
		/(?<url>https?:\/\/[^\s<>()"'`\]]{1,2000}[^\s<>()"'`\].,;:!?])/,
	]
		.map((part) => part.source)
		.join("|"),
	"s",
);

/** Text with marks as nodes. */
export function inline(text, depth = 0) {
	const nodes = [];
	for (let match; depth < MAX_DEPTH && (match = INLINE.exec(text)); text = text.slice(match.index + match[0].length)) {
		if (match.index) nodes.push(...lineBreaks(text.slice(0, match.index)));
		nodes.push(marked(match, depth + 1));
	}
	if (text) nodes.push(...lineBreaks(text));
	return nodes;
}

/** A formula with its marks around it, set; as it is written where it is not understood. */
export function formulaNode(source) {
	const width = source.startsWith("$") && !source.startsWith("$$") ? 1 : 2;
	try {
		return mathNode(source.slice(width, -width), source.startsWith("\\[") || source.startsWith("$$"));
	} catch (error) {
		return element("code", { class: "tex", title: error.message }, source);
	}
}

function marked({ 0: whole, groups: g }, depth) {
	if (g.math) return formulaNode(whole);
	if (g.escaped) return g.escaped;
	if (g.code) return element("code", {}, g.code);
	if (g.strong ?? g.strong2) return element("strong", {}, ...inline(g.strong ?? g.strong2, depth));
	if (g.em ?? g.em2) return element("em", {}, ...inline(g.em ?? g.em2, depth));
	if (g.del) return element("del", {}, ...inline(g.del, depth));
	if (g.note) return noteMark(g.note);
	const href = g.url ?? g.href;
	if (!/^(https?:\/\/|mailto:)/i.test(href)) return whole;
	const content = g.url ? [g.url] : inline(g.label || href, depth);
	return element("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...content);
}

/** What stands for a footnote in the text, and leads to it. */
function noteMark(name) {
	const button = element("button", { type: "button", class: "note-mark", "aria-label": `Footnote ${name}` }, name);
	button.addEventListener("click", () => {
		const notes = button.closest(".text, .thought")?.querySelectorAll(".footnote") ?? [];
		const note = [...notes].find((node) => node.dataset.note === name);
		note?.scrollIntoView({ block: "center" });
		note?.focus();
	});
	return element("sup", {}, button);
}

/** Two spaces or a backslash at its end break a line. */
function lineBreaks(text) {
	return text
		.split(/(?: {2,}|\\)\n/)
		.flatMap((line, n) => (n ? [element("br"), line] : [line]))
		.filter((node) => node !== "");
}
