// The text of a PDF's page: runs its drawing commands, and makes lines of where the letters come to stand.

import { fontOf } from "./pdffont.js";
import { Syntax, Word } from "./pdfsyntax.js";

const MAX_DEPTH = 8;
const WORD_GAP = 0.18;
const UNKNOWN = "with letters that the file does not name";
const times = ([a, b, c, d, e, f], [g, h, i, j, k, l]) => [a * g + b * i, a * h + b * j, c * g + d * i, c * h + d * j, e * g + f * i + k, e * h + f * j + l];
const ONE = [1, 0, 0, 1, 0, 0];

/** Its text; `note(words)` is told what could not be read. */
export async function pageText(file, page, note) {
	const run = new Run(file, note);
	const contents = page.get("Contents");
	const list = file.get(contents);
	const parts = [];
	for (const part of Array.isArray(list) ? list : [contents]) parts.push(await file.stream(part).catch((error) => (note(error.message), "")));
	await run.draw(parts.join("\n"), file.get(page.get("Resources")), ONE, 0);
	return run.text;
}

class Run {
	text = "";
	#fonts = new Map();
	#end = null;

	constructor(file, note) {
		Object.assign(this, { file, note });
	}

	async draw(source, resources, matrix, depth) {
		const syntax = new Syntax(source);
		let state = { matrix, font: null, size: 1, lead: 0, spread: 0, gap: 0, scale: 1 };
		const stack = [];
		let values = [];
		let [place, line] = [ONE, ONE];
		const move = (x, y) => (place = line = times([1, 0, 0, 1, x, y], line));
		const show = (bytes) => (place = this.#show(bytes, place, state));
		const acts = {
			q: () => stack.push({ ...state }),
			Q: () => (state = stack.pop() ?? state),
			cm: (...m) => (state.matrix = times(m, state.matrix)),
			BT: () => (place = line = ONE),
			Tf: async (name, size) => Object.assign(state, { font: await this.#font(resources, name), size }),
			TL: (lead) => (state.lead = lead),
			Tc: (spread) => (state.spread = spread),
			Tw: (gap) => (state.gap = gap),
			Tz: (percent) => (state.scale = percent / 100),
			Td: move,
			TD: (x, y) => ((state.lead = -y), move(x, y)),
			Tm: (...m) => (place = line = m),
			"T*": () => move(0, -state.lead),
			Tj: show,
			"'": (bytes) => (move(0, -state.lead), show(bytes)),
			'"': (gap, spread, bytes) => (Object.assign(state, { gap, spread }), move(0, -state.lead), show(bytes)),
			TJ: (list) => list.forEach((item) => (typeof item === "number" ? (place = times([1, 0, 0, 1, (-item / 1000) * state.size * state.scale, 0], place)) : show(item))),
			Do: (name) => this.#form(resources, name, state.matrix, depth),
		};
		for (;;) {
			const value = syntax.next();
			if (value === undefined && syntax.at >= source.length) return;
			if (value === undefined) syntax.at++;
			else if (!(value instanceof Word)) values.push(value);
			else {
				if (String(value) === "ID") syntax.at = Math.max(syntax.at, source.indexOf("EI", syntax.at)); // a picture among the commands
				if (Object.hasOwn(acts, value)) await acts[value](...values);
				values = [];
			}
		}
	}

	async #font(resources, name) {
		const font = this.file.get(this.file.get(resources?.get("Font"))?.get(String(name)));
		if (!(font instanceof Map)) return null;
		if (!this.#fonts.has(font)) this.#fonts.set(font, await fontOf(this.file, font));
		return this.#fonts.get(font);
	}

	/** A form: commands of their own, as headers and stamps are. */
	async #form(resources, name, matrix, depth) {
		const reference = this.file.get(resources?.get("XObject"))?.get(String(name));
		const map = this.file.get(reference);
		if (!(map instanceof Map) || String(map.get("Subtype")) !== "Form" || depth >= MAX_DEPTH) return;
		const source = await this.file.stream(reference).catch((error) => (this.note(error.message), ""));
		const own = this.file.get(map.get("Resources")) ?? resources;
		await this.draw(source, own, times(this.file.get(map.get("Matrix")) ?? ONE, matrix), depth + 1);
	}

	/** Add letters where they stand; returns the place after them. */
	#show(bytes, place, state) {
		if (typeof bytes !== "string" || !state.font) return place;
		for (const [letter, width, isSpace] of state.font.letters(bytes)) {
			const [a, b, c, d, x, y] = times(place, state.matrix);
			if (letter === undefined) this.note(UNKNOWN);
			else this.#put(letter, x, y, state.size * Math.hypot(c, d));
			place = times([1, 0, 0, 1, (width * state.size + state.spread + (isSpace ? state.gap : 0)) * state.scale, 0], place);
			const after = times(place, state.matrix);
			this.#end = { x: after[4], y };
		}
		return place;
	}

	#put(letter, x, y, size) {
		const { x: before, y: level } = this.#end ?? { x, y };
		const down = Math.abs(y - level);
		if (down > 0.5 * size) this.text += down > 1.9 * size || y > level + size ? "\n\n" : "\n";
		else if (x - before > WORD_GAP * size || x < before - 2 * size) this.text += /\s$/.test(this.text) || letter === " " ? "" : " ";
		this.text += letter;
	}
}
