// Markdown as nodes: what models write, and no more. Never makes HTML of text; links go to the web or to mail
// only; pictures become links, so that an answer cannot make the page ask other servers for anything.
// Patterns have bounds and nesting has a depth: no text makes it slow.

import { copyButton, element } from "./dom.js";
import { coloured } from "./highlight.js";
import { formulaNode, inline, MAX_DEPTH } from "./inline.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]{0,30})[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,12})([-*+]|\d{1,9}[.)])(?:\s+|$)/;
const TABLE_LINE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
/** A formula on lines of its own, and where it ends. */
const FORMULA = /^ {0,3}(\\\[|\$\$)/;
const FORMULA_ENDS = { "\\[": "\\]", $$: "$$" };
const MAX_FORMULA_LINES = 100;
/** A footnote's text, and the box of a task. */
const NOTE = /^ {0,3}\[\^([^\]\s]{1,50})\]:\s*/;
const TASK = /^\[([ xX])\]\s+/;

/** Shows `text` in `container`, touching only the blocks that changed since the last call. */
export function show(container, text) {
	const sources = blocks(text.split("\n"));
	const old = container.sources ?? [];
	let same = 0;
	while (same < sources.length && old[same] === sources[same]) same++;
	while (container.childNodes.length > same) container.lastChild.remove();
	for (const source of sources.slice(same)) container.append(inOrder(block(source.split("\n"), 0), container));
	container.sources = sources;
}

/** A heading no more than one level below the one before it, as screen readers want it; other blocks as they are. */
function inOrder(node, container) {
	if (!/^H\d/.test(node.tagName)) return node;
	const before = [...container.children].findLast(({ tagName }) => /^H\d/.test(tagName));
	const level = Math.min(Number(node.tagName[1]), Number(before?.tagName[1] ?? 2) + 1);
	return element(`h${level}`, {}, ...node.childNodes);
}

/** The texts of the top blocks, one node each. */
function blocks(lines) {
	const found = [];
	for (let at = 0; at < lines.length; ) {
		const end = endOfBlock(lines, at);
		if (lines[at].trim()) found.push(lines.slice(at, end).join("\n"));
		at = end;
	}
	return found;
}

/** The line after the block that begins at line `at`. */
function endOfBlock(lines, at) {
	const first = lines[at];
	const until = (isEnd) => {
		let end = at + 1;
		while (end < lines.length && !isEnd(lines[end], end)) end++;
		return end;
	};
	const fence = FENCE.exec(first);
	if (fence) return until((line) => line.trim().startsWith(fence[1]) && !line.trim().slice(fence[1].length).trim()) + 1;
	if (HEADING.test(first) || RULE.test(first) || !first.trim()) return at + 1;
	if (QUOTE.test(first)) return until((line) => !QUOTE.test(line));
	if (ITEM.test(first)) return until((line, n) => endsList(first, lines, n));
	const formula = endOfFormula(lines, at);
	if (formula) return formula;
	if (isTable(lines, at)) return until((line) => !line.includes("|"));
	return until((line, n) => !line.trim() || begins(line) || isTable(lines, n) || endOfFormula(lines, n));
}

/** The line after a formula that begins at line `at`; 0 when none does, or it does not end soon. */
function endOfFormula(lines, at) {
	const [whole, mark] = FORMULA.exec(lines[at]) ?? [];
	if (!mark) return 0;
	const [first, ...rest] = lines.slice(at, at + MAX_FORMULA_LINES);
	const last = [first.slice(whole.length), ...rest].findIndex((line) => line.includes(FORMULA_ENDS[mark]));
	return last < 0 ? 0 : at + last + 1;
}

const begins = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM, NOTE].some((pattern) => pattern.test(line));
const isTable = (lines, at) =>
	lines[at].includes("|") && TABLE_LINE.test(lines[at + 1] ?? "") && lines[at + 1].includes("-");
const isOrdered = (line) => /\d/.test(ITEM.exec(line)[2]);
const indentOf = (line) => line.length - line.trimStart().length;

function endsList(first, lines, at) {
	const line = lines[at];
	if (!line.trim()) {
		const next = lines.slice(at).find((later) => later.trim());
		return next === undefined || endsAfterGap(first, next);
	}
	if (RULE.test(line)) return true;
	if (indentOf(line) > indentOf(first)) return false;
	if (ITEM.test(line)) return isOrdered(line) !== isOrdered(first);
	return begins(line) || !lines[at - 1].trim();
}

function endsAfterGap(first, line) {
	if (indentOf(line) > indentOf(first)) return false;
	return !ITEM.test(line) || RULE.test(line) || isOrdered(line) !== isOrdered(first);
}

/** One block as a node. */
function block(lines, depth) {
	const [first] = lines;
	if (depth > MAX_DEPTH) return element("p", {}, lines.join("\n"));
	const fence = FENCE.exec(first);
	if (fence) return code(lines, fence);
	const heading = HEADING.exec(first);
	if (heading) return element(`h${Math.min(6, heading[1].length + 2)}`, {}, ...inline(heading[2]));
	if (RULE.test(first)) return element("hr");
	if (QUOTE.test(first)) {
		return element("blockquote", {}, ...nested(lines.map((line) => line.replace(QUOTE, "")), depth));
	}
	if (ITEM.test(first)) return list(lines, depth);
	if (isTable(lines, 0)) return table(lines);
	if (NOTE.test(first)) return footnote(lines);
	if (endOfFormula(lines, 0) === lines.length) return mathBlock(lines.join("\n").trim());
	return element("p", {}, ...inline(lines.map((line) => line.trimStart()).join("\n")));
}

const nested = (lines, depth) => blocks(lines).map((source) => block(source.split("\n"), depth + 1));

function code(lines, [, marks, language]) {
	const closed = lines.length > 1 && lines.at(-1).trim().startsWith(marks);
	const text = lines.slice(1, closed ? -1 : undefined).join("\n");
	return element(
		"figure",
		{ class: "code" },
		element("figcaption", {}, element("span", {}, language || "text"), copyButton(() => text)),
		element("pre", { tabindex: 0 }, element("code", {}, ...coloured(text, language))),
	);
}

function list(lines, depth) {
	const [, indent, mark] = ITEM.exec(lines[0]);
	const items = [];
	for (const line of lines) {
		const item = ITEM.exec(line);
		if (item && item[1].length <= indent.length + 1) items.push([line.slice(item[0].length)]);
		else items.at(-1).push(line);
	}
	const ordered = /\d/.test(mark);
	const entries = items.map((item) => element("li", {}, ...entry(item, depth)));
	return element(ordered ? "ol" : "ul", { start: ordered ? parseInt(mark, 10) : null }, ...entries);
}

/** The content of a list entry: a single paragraph goes without its <p>. */
function entry([first, ...rest], depth) {
	const indent = Math.min(...rest.filter((line) => line.trim()).map(indentOf), 12);
	const [box, state] = TASK.exec(first) ?? [""];
	const nodes = nested([first.slice(box.length), ...rest.map((line) => line.slice(Math.min(indent, indentOf(line))))], depth);
	const content = nodes.flatMap((node, n) => (n === 0 && node.tagName === "P" ? [...node.childNodes] : [node]));
	const isDone = state !== " ";
	return box ? [element("input", { type: "checkbox", class: "task", disabled: true, checked: isDone, "aria-label": isDone ? "done" : "to do" }), ...content] : content;
}

function footnote([first, ...rest]) {
	const [mark, name] = NOTE.exec(first);
	const text = [first.slice(mark.length), ...rest.map((line) => line.trimStart())].join("\n");
	return element("div", { class: "footnote", tabindex: -1, "data-note": name }, element("sup", {}, name), element("p", {}, ...inline(text)));
}

/** A formula on lines of its own; a text after it on its last line stands beside it. */
function mathBlock(source) {
	const end = FORMULA_ENDS[source.slice(0, 2)];
	const length = source.indexOf(end, 2) + 2;
	return length === source.length ? element("div", { class: "formula", tabindex: 0 }, formulaNode(source)) : element("p", {}, ...inline(source));
}

function table([head, marks, ...rows]) {
	const sides = cells(marks).map((mark) => (/:$/.test(mark) ? (/^:/.test(mark) ? "center" : "end") : null));
	const line = (tag, source) =>
		element("tr", {}, ...cells(source).slice(0, sides.length).map((cell, n) =>
			element(tag, { "data-align": sides[n], scope: tag === "th" ? "col" : null }, ...inline(cell))));
	const body = element("tbody", {}, ...rows.map((row) => line("td", row)));
	return element("div", { class: "table", tabindex: 0 }, element("table", {}, element("thead", {}, line("th", head)), body));
}

const cells = (line) =>
	line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
