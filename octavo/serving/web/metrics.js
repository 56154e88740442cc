// Figures from the text of /metrics: totals by name, and what two of them say about the time between.

const LINE = /^([a-zA-Z_][\w:]*)(?:\{(.*)\})? ([^ ]+)/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;
const PREFIX = /^(vllm|octavo):/;

/** One reading of /metrics; names are without their prefix. */
export class Reading {
	#series = new Map();

	constructor(text, timeMs) {
		this.timeMs = timeMs;
		const seen = new Set(); // a server may show each series under two prefixes
		for (const line of text.split("\n")) {
			const match = LINE.exec(line);
			if (!match) continue;
			const name = match[1].replace(PREFIX, "");
			const key = `${name}{${match[2] ?? ""}}`;
			if (seen.has(key)) continue;
			seen.add(key);
			if (!this.#series.has(name)) this.#series.set(name, []);
			this.#series.get(name).push({ labels: labelsOf(match[2] ?? ""), value: Number(match[3]) });
		}
	}

	/** The sum over all series of this name whose labels match; 0 when there is none. */
	sum(name, wanted = {}) {
		const matching = (this.#series.get(name) ?? []).filter(({ labels }) =>
			Object.entries(wanted).every(([label, value]) => labels[label] === value));
		return matching.reduce((total, { value }) => total + value, 0);
	}

	/** Upper limit → observations up to it, ascending. */
	buckets(name) {
		const found = new Map();
		for (const { labels, value } of this.#series.get(`${name}_bucket`) ?? []) {
			const limit = labels.le === "+Inf" ? Infinity : Number(labels.le);
			found.set(limit, (found.get(limit) ?? 0) + value);
		}
		return new Map([...found].sort(([a], [b]) => a - b));
	}
}

/** What happened from one reading to a later one. */
export class Span {
	constructor(first, last) {
		this.first = first;
		this.last = last;
		this.seconds = (last.timeMs - first.timeMs) / 1000;
	}

	/** How much counters of this name grew; a restarted server begins at 0 again. */
	growth(name, labels) {
		const before = this.first.sum(name, labels);
		const after = this.last.sum(name, labels);
		return after < before ? after : after - before;
	}

	/** The same per second; null when no time has passed. */
	rate(name, labels) {
		return this.seconds > 0 ? this.growth(name, labels) / this.seconds : null;
	}

	/** The growth of one counter as a share of another's; null when that did not grow. */
	share(part, whole) {
		const total = this.growth(whole);
		return total > 0 ? this.growth(part) / total : null;
	}

	/** The q-quantile of what a histogram took in, linear within a bucket; null when it took in nothing. */
	quantile(name, q) {
		const before = this.first.buckets(name);
		const steps = [...this.last.buckets(name)].map(([limit, count]) => [limit, Math.max(0, count - (before.get(limit) ?? 0))]);
		const total = steps.at(-1)?.[1] ?? 0;
		if (!total) return null;
		const rank = q * total;
		let [below, lower] = [0, 0];
		for (const [limit, count] of steps) {
			if (count >= rank) return limit === Infinity ? lower : lower + ((limit - lower) * (rank - below)) / (count - below || 1);
			[below, lower] = [count, limit];
		}
		return lower;
	}
}

function labelsOf(text) {
	return Object.fromEntries([...text.matchAll(LABEL)].map(([, name, value]) => [name, value]));
}
