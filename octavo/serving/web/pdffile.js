// A PDF file: its objects, its streams, its pages. Objects are looked for by their marks, so that a damaged table of
// contents does no harm.

import { hexBytes, Reference, Syntax } from "./pdfsyntax.js";

const MAX_STREAM = 100 * 2 ** 20;
const OBJECT = /(?<![\d.])(\d{1,8})[\0\t\n\f\r ]+\d{1,5}[\0\t\n\f\r ]+obj(?![a-z])/g;

export class PdfFile {
	#objects = new Map();
	#places = new Map();

	constructor(bytes) {
		this.text = binary(bytes);
	}

	/** Find the objects. Throws an Error that completes "NAME …". */
	async open() {
		for (const match of this.text.matchAll(OBJECT)) this.#places.set(Number(match[1]), match.index + match[0].length);
		const tops = [...this.text.matchAll(/trailer/g)].map(({ index }) => new Syntax(this.text, index + 7).next());
		const packed = [];
		for (const number of this.#places.keys()) {
			const { map } = this.#stored(number);
			if (String(map?.get("Type")) === "XRef") tops.push(map);
			if (String(map?.get("Type")) === "ObjStm") packed.push(number);
		}
		if (tops.some((top) => top instanceof Map && top.has("Encrypt"))) throw new Error("is encrypted and cannot be read.");
		for (const number of packed) await this.#unpack(number);
		const roots = tops.flatMap((top) => (top instanceof Map ? [this.get(top.get("Root"))] : []));
		this.root = roots.findLast((root) => root instanceof Map && root.has("Pages")) ?? this.#find("Catalog");
		if (!this.root) throw new Error("is damaged: it has no pages.");
	}

	/** What a value is, behind references. */
	get(value) {
		for (let n = 0; value instanceof Reference && n < 20; n++) value = this.#stored(value.number).map;
		return value;
	}

	/** The bytes of a stream, unpacked, one letter each. Throws for a filter that is not known. */
	async stream(reference) {
		if (!(reference instanceof Reference)) return "";
		const { map, start } = this.#stored(reference.number);
		if (start === undefined) return "";
		const length = this.get(map.get("Length"));
		const isRight = this.text.slice(start + length, start + length + 20).trimStart().startsWith("endstream");
		const end = isRight ? start + length : this.text.indexOf("endstream", start);
		let data = this.text.slice(start, end < 0 ? undefined : end);
		const filters = [this.get(map.get("Filter")) ?? []].flat().map((filter) => String(this.get(filter)));
		for (const filter of filters) data = await this.#decoded(data, filter);
		return data;
	}

	/** The pages as maps, with the resources that they inherit. */
	async pages(most) {
		const found = [];
		const seen = new Set();
		const visit = (node, resources) => {
			const map = this.get(node);
			if (!(map instanceof Map) || seen.has(map) || found.length >= most) return;
			seen.add(map);
			const own = map.get("Resources") ?? resources;
			const kids = this.get(map.get("Kids"));
			if (Array.isArray(kids)) for (const kid of kids) visit(kid, own);
			else found.push(new Map(map).set("Resources", own));
		};
		visit(this.root.get("Pages"));
		return found;
	}

	#stored(number) {
		if (!this.#objects.has(number) && this.#places.has(number)) this.#objects.set(number, this.#read(this.#places.get(number)));
		return this.#objects.get(number) ?? {};
	}

	#read(at) {
		const syntax = new Syntax(this.text, at);
		const map = syntax.next();
		if (!(map instanceof Map) || !(String(syntax.next()) === "stream")) return { map };
		const [gap] = /^\r?\n?/.exec(this.text.slice(syntax.at, syntax.at + 2));
		return { map, start: syntax.at + gap.length };
	}

	/** Objects that stand in a stream. */
	async #unpack(number) {
		const { map } = this.#stored(number);
		const data = await this.stream(new Reference(number)).catch(() => "");
		const heads = new Syntax(data);
		const first = this.get(map.get("First"));
		for (let n = 0; n < this.get(map.get("N")); n++) {
			const [id, place] = [heads.next(), heads.next()];
			if (typeof place !== "number") return;
			if (!this.#places.has(id)) this.#objects.set(id, { map: new Syntax(data, first + place).next() });
		}
	}

	#find(type) {
		const numbers = [...this.#places.keys(), ...this.#objects.keys()];
		return numbers.map((number) => this.#stored(number).map).findLast((map) => map instanceof Map && String(map.get("Type")) === type);
	}

	async #decoded(data, filter) {
		if (filter === "FlateDecode" || filter === "Fl") return inflated(data);
		if (filter === "ASCIIHexDecode" || filter === "AHx") return hexBytes(data.split(">")[0]);
		if (filter === "ASCII85Decode" || filter === "A85") return ascii85(data);
		throw new Error(`packed with ${filter}`);
	}
}

const binary = (bytes) => {
	const parts = [];
	for (let at = 0; at < bytes.length; at += 32768) parts.push(String.fromCharCode(...bytes.subarray(at, at + 32768)));
	return parts.join("");
};

/** Deflated bytes, as far as they can be read. */
async function inflated(data) {
	const bytes = Uint8Array.from(data, (letter) => letter.charCodeAt(0));
	const reader = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate")).getReader();
	const parts = [];
	try {
		for (let size = 0, part; size < MAX_STREAM && !(part = await reader.read()).done; size += part.value.length) parts.push(binary(part.value));
	} catch {
		if (!parts.length) throw new Error("damaged");
	}
	reader.cancel().catch(() => {});
	return parts.join("");
}

function ascii85(data) {
	const letters = data.replace(/\s|^<~/g, "").split("~")[0].replaceAll("z", "!!!!!");
	return letters.replace(/[!-u]{1,5}/g, (group) => {
		const value = [...group.padEnd(5, "u")].reduce((sum, letter) => sum * 85 + letter.charCodeAt(0) - 33, 0);
		return [24, 16, 8, 0].map((shift) => String.fromCharCode((value / 2 ** shift) & 255)).join("").slice(0, group.length - 1);
	});
}
