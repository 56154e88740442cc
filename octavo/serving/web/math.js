// LaTeX's formulas as MathML, which browsers set themselves: the part of LaTeX that models write. What is not
// understood throws, and the formula is shown as it was written.

import { COMMANDS, environment, textNode } from "./commands.js";
import { formula as make } from "./dom.js";
import { ACCENTS, ALPHABETS, ELSEWHERE, FUNCTIONS, LARGE, LETTERS, LIMITS, SIGNS, SPACES, UNDERS } from "./symbols.js";

const MAX_DEPTH = 40;
/** Text and the names of environments are one token with their braces. */
const TOKEN = /\\(?:text\w*|mbox|mathrm|operatorname\*?|begin|end|tag)\s*\{[^{}]*\}|\\\\(?:\[[^\]]{0,20}\])?|\\(?:[a-zA-Z]+|[^])|%[^\n]*|\s+|[^]/gu;
const WITH_TEXT = /^\\([a-z]+\*?)\s*\{([^]*)\}$/i;
const FENCES = { ".": "", "\\|": "‖", "\\{": "{", "\\}": "}", "<": "⟨", ">": "⟩" };
const ENDS = ["}", "\\right", "&"];

/** The node of a formula, without the marks around it; isBlock: on a line of its own. Throws an Error. */
export function mathNode(tex, isBlock) {
	const parser = new Parser(tex, isBlock);
	const content = parser.row(() => false);
	return make("math", { display: isBlock ? "block" : null }, content);
}

class Parser {
	#tokens;
	#at = 0;
	#depth = 0;

	constructor(tex, isBlock) {
		this.#tokens = [...tex.matchAll(TOKEN)].map(([token]) => token).filter((token) => !/^[%\s]/.test(token));
		this.isBlock = isBlock;
	}

	/** The token that comes next; undefined at the end. */
	get next() {
		return this.#tokens[this.#at];
	}

	/** Everything until `isEnd(token)`, which is not taken. */
	row(isEnd) {
		if (++this.#depth > MAX_DEPTH) throw new Error("nested too deep");
		const nodes = [];
		while (this.#at < this.#tokens.length && !isEnd(this.next)) {
			if (ENDS.includes(this.next) || this.next.startsWith("\\end")) throw new Error(`unexpected ${this.next}`);
			if (this.next === "\\over") return this.#over(nodes, isEnd);
			const node = this.#scripted();
			if (node) nodes.push(node);
		}
		this.#depth--;
		return nodes.length === 1 ? nodes[0] : make("mrow", {}, ...nodes);
	}

	#over(above, isEnd) {
		this.#at++;
		this.#depth--;
		return make("mfrac", {}, make("mrow", {}, ...above), this.row(isEnd));
	}

	/** An atom with what stands above and below it. */
	#scripted() {
		const token = this.next;
		const base = "^_'".includes(token) ? make("mrow") : this.#atom();
		if (!base) return null;
		let takesLimits = base.takesLimits && (this.isBlock || base.takesLimits === "always");
		let [below, above] = [null, null];
		for (; ["^", "_", "'", "\\limits", "\\nolimits"].includes(this.next); ) {
			const mark = this.#tokens[this.#at++];
			if (mark === "^") above = above ? make("mrow", {}, above, this.argument()) : this.argument();
			else if (mark === "_") below = this.argument();
			else if (mark === "'") above = make("mrow", {}, ...(above ? [above] : []), make("mo", { lspace: 0, rspace: 0 }, "′"));
			else takesLimits = mark === "\\limits";
		}
		const kind = takesLimits ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
		if (below && above) return make(kind[2], {}, base, below, above);
		return below ? make(kind[0], {}, base, below) : above ? make(kind[1], {}, base, above) : base;
	}

	/** What one command or letter stands for; null when it shows nothing. */
	#atom() {
		const token = this.#tokens[this.#at++];
		if (token === undefined) throw new Error("it ends too soon");
		if (token === "{") return this.#group();
		const [, name, text] = WITH_TEXT.exec(token) ?? [];
		if (name === "begin") return environment(text, this);
		if (name) return textNode(name, text);
		if (token.startsWith("\\")) return this.#command(token.slice(1));
		if (/\d/.test(token)) return this.#number(token);
		if (/\p{L}/u.test(token)) return make("mi", {}, token);
		if (token === "~") return make("mspace", { width: "0.25em" });
		return make("mo", "()[]".includes(token) ? { stretchy: "false" } : "|/".includes(token) ? { stretchy: "false", lspace: 0, rspace: 0 } : {}, { "-": "−", "*": "∗" }[token] ?? token);
	}

	#group() {
		const content = this.row((token) => token === "}");
		this.take("}");
		return make("mrow", {}, content);
	}

	#number(first) {
		let digits = first;
		while (/^[\d.]$/.test(this.next ?? "") && !(this.next === "." && !/\d/.test(this.#tokens[this.#at + 1] ?? ""))) digits += this.#tokens[this.#at++];
		return make("mn", {}, digits);
	}

	/** The next token, which must be this one if one is named. */
	take(wanted) {
		const token = this.#tokens[this.#at++];
		if (token === undefined || (wanted && token !== wanted)) throw new Error(`${wanted ?? "more"} is missing`);
		return token;
	}

	/** The next group, or the next atom. */
	argument() {
		const node = this.#atom();
		if (!node) throw new Error("an argument is missing");
		return node;
	}

	#command(name) {
		if (Object.hasOwn(LETTERS, name)) return make("mi", /^[A-ZΓ-Ω∞∂]/.test(LETTERS[name]) ? { mathvariant: "normal" } : {}, LETTERS[name]);
		if (Object.hasOwn(SIGNS, name)) return make("mo", {}, SIGNS[name]);
		if (Object.hasOwn(LARGE, name)) return Object.assign(make("mo", {}, LARGE[name]), { takesLimits: !LARGE[name].match(/[∫-∮]/) });
		if (FUNCTIONS.has(name)) return make("mi", {}, name);
		if (LIMITS.has(name)) return Object.assign(make("mo", { lspace: "0", rspace: "0.17em" }, name), { takesLimits: true });
		if (Object.hasOwn(SPACES, name)) return make("mspace", { width: SPACES[name] });
		if (Object.hasOwn(ALPHABETS, name)) return this.#lettered(name);
		if (Object.hasOwn(ACCENTS, name)) return Object.assign(make("mover", { accent: "true" }, this.argument(), make("mo", { stretchy: String(name.length > 5) }, ACCENTS[name])), { takesLimits: name === "overbrace" && "always" });
		if (Object.hasOwn(UNDERS, name)) return Object.assign(make("munder", {}, this.argument(), make("mo", { stretchy: "true" }, UNDERS[name])), { takesLimits: name === "underbrace" && "always" });
		if (/^[bB]ig{1,2}[lrm]?$/.test(name)) return make("mo", { minsize: "1.4em", stretchy: "true" }, this.fence());
		if (/^[{}|$%&#_]$/.test(name)) return make("mo", { stretchy: "false" }, name === "|" ? "‖" : name);
		if (!Object.hasOwn(COMMANDS, name)) throw new Error(`\\${name} is unknown`);
		return COMMANDS[name](this);
	}

	#lettered(name) {
		const [capitals, small, digits] = ALPHABETS[name];
		const node = this.argument();
		const changed = (letter) => {
			const code = letter.codePointAt(0);
			const start = /[A-Z]/.test(letter) ? capitals - 65 : /[a-z]/.test(letter) ? small - 97 : /\d/.test(letter) && digits ? digits - 48 : 0;
			return ELSEWHERE[name]?.[letter] ?? String.fromCodePoint(code + start);
		};
		const leaves = node.childElementCount ? [...node.querySelectorAll("mi, mn")] : [node];
		for (const leaf of leaves) leaf.textContent = [...leaf.textContent].map(changed).join("");
		return node;
	}

	/** A bracket; empty for none. */
	fence() {
		const token = this.take();
		const name = token.slice(1);
		const sign = FENCES[token] ?? (Object.hasOwn(SIGNS, name) ? SIGNS[name] : token);
		if ([...sign].length > 1) throw new Error(`${token} is no bracket`);
		return sign;
	}
}
