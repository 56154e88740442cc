// Models that do not generate: how well texts fit a query, or which class each text has.

import { request } from "./api.js";
import { byId, element, keepDraft } from "./dom.js";

const DRAFT = "octavo-compare";
const KINDS = { embed: "gives each text a vector", token_embed: "gives each token a vector", classify: "gives texts scores of classes", token_classify: "gives tokens scores of classes" };

export class Compare {
	constructor(server, onRefused) {
		Object.assign(this, { server, onRefused, query: byId("query"), texts: byId("texts"), output: byId("ranking") });
		this.texts.value = sessionStorage.getItem(DRAFT) ?? "";
		for (const field of [this.query, this.texts]) field.addEventListener("input", () => this.#tidy());
		byId("comparison").addEventListener("submit", (event) => {
			event.preventDefault();
			this.#run();
		});
		this.#tidy();
	}

	focus() {
		(this.query.hidden ? this.texts : this.query).focus();
	}

	/** Say what the chosen model is. */
	show({ id = "", tasks, max_model_len }) {
		this.ranks = tasks?.includes("score");
		for (const node of [this.query, byId("query-label")]) node.hidden = !this.ranks;
		const facts = [KINDS[tasks?.[0]] ?? "does not generate text", max_model_len && `texts of up to ${max_model_len} tokens`];
		byId("model-kind").textContent = id && `${id.split(/[/\\]/).at(-1)} ${facts.filter(Boolean).join(", ")}. It does not chat.`;
		this.#tidy();
	}

	async #run() {
		const texts = this.#lines();
		const model = this.server.select.value || undefined;
		byId("compare-button").disabled = true;
		try {
			const path = this.ranks ? "rerank" : "classify";
			const body = this.ranks ? { model, query: this.query.value, documents: texts } : { model, input: texts };
			const answer = await (await request(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) })).json();
			const rows = this.ranks ? answer.results.map((found) => [texts[found.index], found.relevance_score])
				: answer.data.map((found) => [`${texts[found.index]} — ${found.label ?? "class " + found.probs.indexOf(Math.max(...found.probs))}`, Math.max(...found.probs)]);
			this.output.replaceChildren(...rows.map(([text, score]) => element("li", {}, element("span", {}, text), element("strong", {}, score.toFixed(4)))));
			byId("compare-facts").textContent = `${answer.usage.total_tokens ?? answer.usage.prompt_tokens} tokens`;
		} catch (error) {
			this.output.replaceChildren(element("li", { class: "fault", role: "alert" }, error instanceof TypeError ? "The server cannot be reached." : error.message));
			this.onRefused(error);
		}
		this.#tidy();
	}

	#lines() {
		return this.texts.value.split("\n").filter((line) => line.trim());
	}

	#tidy() {
		byId("compare-button").disabled = !this.#lines().length || (this.ranks && !this.query.value.trim());
		keepDraft(DRAFT, this.texts.value);
		this.output.hidden = !this.output.childNodes.length;
	}
}
