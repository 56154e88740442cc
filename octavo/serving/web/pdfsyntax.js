// PDF's syntax: numbers, names, strings, lists, maps, references. Binary text is one letter per byte.

const GAP = /(?:[\0\t\n\f\r ]|%[^\n\r]*)*/y;
const REFERENCE = /(\d+)[\0\t\n\f\r ]+\d+[\0\t\n\f\r ]+R(?![a-zA-Z])/y;
const NUMBER = /[+-]?(?:\d+\.?\d*|\.\d+)/y;
const NAME = /\/([^\0\t\n\f\r ()<>[\]{}/%]*)/y;
const HEX = /<([\da-fA-F\s]*)>/y;
const WORD = /[^\0\t\n\f\r ()<>[\]{}/%]+/y;
const ESCAPES = { n: "\n", r: "\r", t: "\t", b: "\b", f: "\f" };
const MAX_DEPTH = 60;

export class Name extends String {}
export class Word extends String {}
export class Reference {
	constructor(number) {
		this.number = number;
	}
}
export const hexBytes = (text) => text.replace(/\s/g, "").replace(/..?/g, (pair) => String.fromCharCode(parseInt(pair.padEnd(2, "0"), 16)));

export class Syntax {
	constructor(text, at = 0) {
		this.text = text;
		this.at = at;
		this.depth = 0;
	}

	#match(pattern) {
		pattern.lastIndex = this.at;
		const match = pattern.exec(this.text);
		if (match) this.at = pattern.lastIndex;
		return match;
	}

	/** The next value or Word; undefined at the end, and at the end of a list or map. */
	next() {
		this.#match(GAP);
		const { text, at } = this;
		if (at >= text.length) return undefined;
		let match;
		if ((match = this.#match(REFERENCE))) return new Reference(Number(match[1]));
		if ((match = this.#match(NUMBER))) return Number(match[0]);
		if ((match = this.#match(NAME))) return new Name(match[1].replace(/#([\da-fA-F]{2})/g, (_, code) => hexBytes(code)));
		if (text.startsWith("<<", at)) return this.#map();
		if ((match = this.#match(HEX))) return hexBytes(match[1]);
		if (text[at] === "(") return this.#string();
		if (text[at] === "[") return this.#list("]", 1);
		if (text[at] === "]" || text[at] === ">") return undefined;
		if ((match = this.#match(WORD))) return new Word(match[0]);
		this.at++;
		return this.next();
	}

	#list(end, width) {
		if (++this.depth > MAX_DEPTH) throw new Error("nested too deep");
		this.at += width;
		const values = [];
		for (let value; (value = this.next()) !== undefined; ) values.push(value);
		if (this.text.startsWith(end, this.at)) this.at += width;
		else if (this.at < this.text.length) this.at++;
		this.depth--;
		return values;
	}

	#map() {
		const values = this.#list(">>", 2);
		const map = new Map();
		for (let n = 0; n + 1 < values.length; n += 2) map.set(String(values[n]), values[n + 1]);
		return map;
	}

	#string() {
		let found = "";
		for (let depth = 1; ++this.at < this.text.length; ) {
			const letter = this.text[this.at];
			if (letter === "\\") found += this.#escaped();
			else if (letter === ")" && !--depth) break;
			else {
				depth += letter === "(";
				found += letter;
			}
		}
		this.at++;
		return found;
	}

	#escaped() {
		const [octal] = /^[0-7]{1,3}/.exec(this.text.slice(this.at + 1, this.at + 4)) ?? [];
		this.at += octal?.length ?? 1;
		if (octal) return String.fromCharCode(parseInt(octal, 8) & 255);
		const letter = this.text[this.at];
		return ESCAPES[letter] ?? (letter === "\n" || letter === "\r" ? "" : letter);
	}
}
