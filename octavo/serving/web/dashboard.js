// The live view: reads /metrics, keeps the last minutes, draws one tile per question an operator has.

import { request } from "./api.js";
import { byId } from "./dom.js";
import { Reading, Span } from "./metrics.js";
import { clock, Tile } from "./tile.js";

const SHOWN_MS = 1000;
const HIDDEN_MS = 5000;
const HISTORY_MS = 5 * 60_000;
const STORE = "octavo-readings";
const RATE_MS = 5_000;
const QUANTILE_MS = 30_000;

const count = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
const percent = (value) => `${(100 * value).toFixed(0 < value && value < 0.1 ? 1 : 0)} %`;
const seconds = (value) => (value < 1 ? `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms` : `${value.toFixed(2)} s`);
const failures = (span) =>
	(60 * (span.growth("http_requests_total", { status: "5xx" }) + span.growth("request_success_total", { finished_reason: "error" }))) / span.seconds;
const lengthOfGuesses = (span) => {
	const numTrue = span.share("spec_decode_num_accepted_tokens_total", "spec_decode_num_drafts_total");
	return numTrue === null ? null : 1 + numTrue;
};
const refusals = (span) => 60 * span.rate("admission_rejections_total");

/** Title, form of the figures, least height of the plot, lines: name → its value from (now, 5 s, 30 s); shown once it has any. */
const TILES = [
	["Requests", count, 4, { running: (now) => now.sum("num_requests_running"), waiting: (now) => now.sum("num_requests_waiting") }],
	["Tokens per second", count, 10, { generated: (_, few) => few.rate("generation_tokens_total"), "of prompts": (_, few) => few.rate("prompt_tokens_total") }],
	["Time to first token", seconds, 0.01, { p50: (_, __, many) => many.quantile("time_to_first_token_seconds", 0.5), p95: (_, __, many) => many.quantile("time_to_first_token_seconds", 0.95) }],
	["Between tokens", seconds, 0.005, { p50: (_, __, many) => many.quantile("inter_token_latency_seconds", 0.5), p95: (_, __, many) => many.quantile("inter_token_latency_seconds", 0.95) }],
	["KV cache in use", percent, 1, { used: (now) => now.sum("kv_cache_usage_perc") }],
	["Prefix cache hits", percent, 1, { "of prompt tokens": (_, __, many) => many.share("prefix_cache_hits_total", "prefix_cache_queries_total") }],
	["Requests finished per minute", count, 4, { finished: (_, __, many) => 60 * many.rate("request_success_total") }],
	["Guessed tokens", percent, 1, { "came true": (_, __, many) => many.share("spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total") }, true],
	["Tokens per guess", count, 4, { mean: (_, __, many) => lengthOfGuesses(many) }, true],
	["Errors per minute", count, 1, { failed: (_, __, many) => failures(many), refused: (_, __, many) => refusals(many) }],
];

/** Reads and draws from `start` on; slowly while not shown. */
export class Dashboard {
	#readings = [];
	#timer = 0;
	#isShown = false;

	constructor() {
		this.tiles = TILES.map((told) => new Tile(...told));
		byId("tiles").append(...this.tiles.map((tile) => tile.node));
		this.#restore();
		window.addEventListener("pagehide", () => sessionStorage.setItem(STORE, JSON.stringify(this.tiles.map((tile) => tile.points))));
		document.addEventListener("visibilitychange", () => this.start());
	}

	set isShown(isShown) {
		this.#isShown = isShown;
		this.start();
	}

	/** Read now, and from then on while the page can be seen. */
	start() {
		clearTimeout(this.#timer);
		if (!document.hidden) this.#timer = setTimeout(() => this.#turn(), 0);
	}

	async #turn() {
		const timer = this.#timer;
		try {
			const text = await (await request("metrics")).text();
			this.#take(new Reading(text, Date.now()));
			this.#tell("live", "Live, from this server's metrics");
		} catch (error) {
			this.#end(error.status === 401 ? "The metrics need an API key: see the settings." : "The server does not answer.");
		}
		if (timer === this.#timer && !document.hidden) {
			this.#timer = setTimeout(() => this.#turn(), this.#isShown ? SHOWN_MS : HIDDEN_MS);
		}
	}

	#take(now) {
		const readings = this.#readings;
		readings.push(now);
		while (readings[0].timeMs < now.timeMs - HISTORY_MS) readings.shift();
		if (readings.length < 2) return;
		const [few, many] = [RATE_MS, QUANTILE_MS].map((ms) => new Span(this.#before(now, ms), now));
		for (const tile of this.tiles) tile.take(now.timeMs, now, few, many);
		if (this.#isShown) this.#draw(now.timeMs);
	}

	#draw(nowMs, end) {
		for (const tile of this.tiles) tile.draw(nowMs, HISTORY_MS, end);
	}

	/** There are no new readings: keep what is known as it was, and say of when it is. */
	#end(words) {
		const lastMs = this.tiles[0].points.findLast(({ values }) => values.some((value) => value !== null))?.timeMs;
		this.#readings = [];
		for (const tile of this.tiles) tile.pause();
		if (lastMs) this.#draw(lastMs, clock(lastMs));
		this.#tell("off", lastMs ? `${words} The last reading is of ${clock(lastMs)}.` : words);
	}

	/** What this tab knew before it was loaded again. */
	#restore() {
		const stored = JSON.parse(sessionStorage.getItem(STORE) ?? "[]");
		this.tiles.forEach((tile, n) => tile.points.push(...(stored[n] ?? [])));
		for (const tile of this.tiles) tile.pause();
	}

	/** The youngest reading that is at least `ms` old, else the oldest. */
	#before(now, ms) {
		return this.#readings.findLast((reading) => reading.timeMs <= now.timeMs - ms) ?? this.#readings[0];
	}

	#tell(state, text) {
		const pulse = byId("pulse");
		byId("tiles").classList.toggle("ended", state === "off");
		pulse.className = state;
		const place = pulse.querySelector(".text");
		if (place.textContent !== text) place.textContent = text;
	}
}
