// LaTeX's commands that take arguments, its environments, and text within formulas. Used by math.js alone.

import { formula as make } from "./dom.js";
import { LIMITS } from "./symbols.js";

/** Environments: brackets left and right, and how the columns stand. */
const TABLES = {
	matrix: ["", ""], smallmatrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"], Bmatrix: ["{", "}"], vmatrix: ["|", "|"], Vmatrix: ["‖", "‖"],
	cases: ["{", "", "left"], rcases: ["", "}", "left"], array: ["", ""], gathered: ["", ""], gather: ["", ""], equation: ["", ""],
	aligned: ["", "", "pairs"], align: ["", "", "pairs"], alignedat: ["", "", "pairs"], split: ["", "", "pairs"], eqnarray: ["", "", "pairs"],
};
const STYLES = { textbf: "font-weight", mathbf: "font-weight" };
const NOTHING = () => null;

/** Each takes its arguments from the parser and gives a node, or null for what shows nothing. */
export const COMMANDS = {
	frac: fraction(),
	dfrac: fraction({ displaystyle: "true" }),
	tfrac: fraction({ displaystyle: "false" }),
	cfrac: fraction({ displaystyle: "true" }),
	binom: binomial,
	dbinom: binomial,
	tbinom: binomial,
	sqrt: (p) => {
		const index = p.next === "[" ? (p.take("["), p.row((token) => token === "]")) : null;
		if (!index) return make("msqrt", {}, p.argument());
		p.take("]");
		return make("mroot", {}, p.argument(), index);
	},
	left: (p) => {
		const open = p.fence();
		const parts = [fence(open), p.row((token) => token === "\\right" || token === "\\middle")];
		for (; p.next === "\\middle"; ) parts.push((p.take(), fence(p.fence())), p.row((token) => token === "\\right" || token === "\\middle"));
		p.take("\\right");
		return make("mrow", {}, ...parts, fence(p.fence()));
	},
	overset: (p) => stacked("mover", p),
	stackrel: (p) => stacked("mover", p),
	underset: (p) => stacked("munder", p),
	xrightarrow: (p) => make("mover", {}, make("mo", { stretchy: "true", minsize: "2em" }, "→"), p.argument()),
	xleftarrow: (p) => make("mover", {}, make("mo", { stretchy: "true", minsize: "2em" }, "←"), p.argument()),
	boxed: (p) => make("mrow", { class: "boxed" }, p.argument()),
	cancel: (p) => make("menclose", { notation: "updiagonalstrike" }, p.argument()),
	phantom: (p) => make("mphantom", {}, p.argument()),
	mathit: (p) => p.argument(),
	bmod: () => make("mo", { lspace: "0.22em", rspace: "0.22em" }, "mod"),
	pmod: (p) => make("mrow", {}, make("mspace", { width: "0.6em" }), make("mo", { stretchy: "false" }, "("), make("mi", {}, "mod"), make("mspace", { width: "0.25em" }), p.argument(), make("mo", { stretchy: "false" }, ")")),
	not: (p) => {
		const node = p.argument();
		node.textContent += "\u0338";
		return node;
	},
	substack: (p) => (p.take("{"), table(p, (token) => token === "}", () => p.take("}"))),
	displaystyle: NOTHING,
	textstyle: NOTHING,
	scriptstyle: NOTHING,
	nonumber: NOTHING,
	notag: NOTHING,
	limits: NOTHING,
	hline: NOTHING,
	label: (p) => (p.argument(), null),
};

/** \text{…} and its kind; \operatorname{…} is a function's name. */
export function textNode(name, text) {
	if (name === "tag") return make("mtext", {}, `\u2003(${text})`);
	if (name.startsWith("operatorname")) {
		const node = make("mo", { lspace: "0.1em", rspace: "0.17em" }, text.replaceAll("\\,", " "));
		return Object.assign(node, { takesLimits: name.endsWith("*") || LIMITS.has(text) });
	}
	if (name === "mathrm") return make("mi", { mathvariant: "normal" }, text.trim());
	return make("mtext", { class: Object.hasOwn(STYLES, name) ? "bold" : null }, text.replaceAll(/^ | $/g, "\u00a0").replaceAll(/\\([_%&$#{}])/g, "$1"));
}

/** What stands between \begin{name} and \end{name}. */
export function environment(name, p) {
	const plain = name.replace("*", "");
	if (!Object.hasOwn(TABLES, plain)) throw new Error(`${name} is unknown`);
	const [open, close, stand] = TABLES[plain];
	if (["array", "alignedat"].includes(plain) && p.next === "{") p.argument(); // how the columns stand
	const rows = table(p, (token) => token.startsWith("\\end"), () => p.take(), stand);
	return open || close ? make("mrow", {}, fence(open), rows, fence(close)) : rows;
}

function table(p, isEnd, end, stand) {
	const rows = [[]];
	const isCut = (token) => token === "&" || token.startsWith("\\\\") || isEnd(token);
	while (p.next !== undefined) {
		rows.at(-1).push(p.row(isCut));
		if (p.next === undefined) throw new Error("its end is missing");
		if (isEnd(p.next)) break;
		if (p.take() !== "&") rows.push([]);
	}
	end();
	const cell = (node, n) => make("mtd", { class: stand === "left" ? "left" : stand === "pairs" ? (n % 2 ? "left" : "right") : null }, node);
	const filled = rows.filter((row) => row.length > 1 || row[0]?.childElementCount || row[0]?.textContent);
	return make("mtable", { displaystyle: stand === "pairs" ? "true" : null }, ...filled.map((row) => make("mtr", {}, ...row.map(cell))));
}

const fence = (sign) => make("mo", { fence: "true", stretchy: "true" }, sign);

function fraction(style) {
	return (p) => {
		const node = make("mfrac", {}, p.argument(), p.argument());
		return style ? make("mstyle", style, node) : node;
	};
}

function binomial(p) {
	return make("mrow", {}, fence("("), make("mfrac", { linethickness: "0" }, p.argument(), p.argument()), fence(")"));
}

function stacked(tag, p) {
	const script = p.argument();
	return make(tag, {}, p.argument(), script);
}
