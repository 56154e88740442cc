// One tile of the dashboard: a title, the newest figures, and lines of the last minutes as SVG.

import { drawing, element } from "./dom.js";

const WIDTH = 320;
const HEIGHT = 84;
const MIN_MS = 60_000;
const NONE = "–";

export const clock = (timeMs) => new Date(timeMs).toLocaleTimeString("en-GB");
const ago = (ms) => (ms < 120_000 ? `${Math.round(ms / 1000)} s` : `${Math.round(ms / 60_000)} min`);

/** A question and its answers over time. */
export class Tile {
	points = [];

	/** form: value → text; least: what the plot's height stands for at least; lines: name → value or null; waits: for a value. */
	constructor(title, form, least, lines, waits = false) {
		this.form = form;
		this.least = least;
		this.lines = Object.entries(lines);
		this.figures = this.lines.map(() => element("strong", {}, NONE));
		this.top = element("span", { class: "top" });
		this.paths = this.lines.map((_, n) => drawing("path", { class: `line line-${n}`, "vector-effect": "non-scaling-stroke" }));
		this.area = drawing("path", { class: "area" });
		this.cursor = drawing("path", { class: "cursor", "vector-effect": "non-scaling-stroke" });
		this.plot = drawing(
			"svg",
			{ viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
			this.area, ...this.paths.toReversed(), this.cursor,
		);
		this.ago = element("span");
		this.time = element("span");
		this.node = element(
			"section",
			{ class: "tile" },
			element("h2", {}, title),
			element("dl", {}, ...this.lines.map(([name], n) =>
				element("div", { class: `line-${n}` }, element("dt", {}, name), element("dd", {}, this.figures[n])))),
			element("div", { class: "plot" }, this.plot, this.top),
			element("p", { class: "axis" }, this.ago, this.time),
		);
		this.node.hidden = waits;
		this.title = title;
		this.plot.addEventListener("pointermove", (event) => this.#point(event));
		this.plot.addEventListener("pointerleave", () => this.#show(this.#last, null));
	}

	/** A new point; the arguments after its time go to the lines' functions. */
	take(timeMs, ...sources) {
		const values = this.lines.map(([, valueOf]) => valueOf(...sources));
		this.points.push({ timeMs, values: values.map((value) => (Number.isFinite(value) ? value : null)) });
		if (values.some(Number.isFinite)) this.node.hidden = false;
	}

	/** Let the lines have a gap here. */
	pause() {
		const last = this.points.at(-1);
		if (last?.values.some((value) => value !== null)) this.points.push({ timeMs: last.timeMs, values: last.values.map(() => null) });
	}

	/** Draw what is known, `maxMs` back from `nowMs` and at least `MIN_MS`; end: what that moment is called. */
	draw(nowMs, maxMs, end = "now") {
		this.end = end;
		while (this.points[0]?.timeMs < nowMs - maxMs) this.points.shift();
		const spanMs = Math.max(MIN_MS, nowMs - (this.points[0]?.timeMs ?? nowMs));
		this.ago.textContent = `${ago(spanMs)} ${end === "now" ? "ago" : "before"}`;
		const highest = Math.max(this.least, ...this.points.flatMap((point) => point.values));
		this.x = (timeMs) => WIDTH * (1 - (nowMs - timeMs) / spanMs);
		const y = (value) => HEIGHT - 2 - ((HEIGHT - 6) * value) / highest;
		this.paths.forEach((path, n) => path.setAttribute("d", this.#course(n, y)));
		this.area.setAttribute("d", this.#filled(y));
		this.top.textContent = this.form(highest);
		if (!this.isPointed) this.#show(this.#last, null);
		this.plot.setAttribute("aria-label", `${this.title}, the last ${ago(spanMs)}`);
	}

	get #last() {
		return this.points.findLast(({ values }) => values.some((value) => value !== null)) ?? this.points.at(-1);
	}

	/** The line of one series, with gaps where it says nothing. */
	#course(n, y) {
		let pen = "M";
		return this.points
			.map(({ timeMs, values }) => {
				if (values[n] === null) return (pen = "M"), "";
				const step = `${pen}${this.x(timeMs).toFixed(1)} ${y(values[n]).toFixed(1)}`;
				pen = "L";
				return step;
			})
			.join("");
	}

	#filled(y) {
		const course = this.#course(0, y);
		const pieces = course.split("M").filter((piece) => piece.includes("L"));
		return pieces
			.map((piece) => {
				const ends = piece.split("L").map((place) => place.split(" ")[0]);
				return `M${piece}L${ends.at(-1)} ${HEIGHT}L${ends[0]} ${HEIGHT}Z`;
			})
			.join("");
	}

	#point(event) {
		const { left, width } = this.plot.getBoundingClientRect();
		const place = (WIDTH * (event.clientX - left)) / width;
		const distance = (point) => Math.abs(this.x(point.timeMs) - place) + (point.values.every((value) => value === null) ? 1 : 0);
		if (this.points.length) this.#show(this.points.reduce((best, point) => (distance(point) < distance(best) ? point : best)), true);
	}

	/** Figures of one point; marked when it is one that the reader points at. */
	#show(point, isPointed) {
		this.isPointed = Boolean(isPointed);
		this.time.textContent = isPointed ? clock(point.timeMs) : this.end;
		this.time.classList.toggle("pointed", this.isPointed);
		this.cursor.setAttribute("d", isPointed ? `M${this.x(point.timeMs).toFixed(1)} 0V${HEIGHT}` : "");
		this.figures.forEach((figure, n) => {
			const value = point?.values[n] ?? null;
			figure.textContent = value === null ? NONE : this.form(value);
		});
	}
}
