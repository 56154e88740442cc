// Plain completion: a text, and what the model writes after it.

import { factsOf } from "./answer.js";
import { completion } from "./api.js";
import { byId, element, keepDraft, wordButton } from "./dom.js";
import { FAILED, Reply } from "./reply.js";
import { tokenView } from "./tokens.js";

const MAX_TOKENS = 128;
const DRAFT = "octavo-completion";
/** Fields that only chats have. */
const FOREIGN = ["system", "tools", "tool_choice", "reasoning_effort", "chat_template_kwargs", "top_logprobs"];

export class Playground {
	#running = null;

	constructor(settings, server, onRefused) {
		Object.assign(this, { settings, server, onRefused, prompt: byId("start"), output: byId("written") });
		this.prompt.value = sessionStorage.getItem(DRAFT) ?? "";
		this.prompt.addEventListener("input", () => this.#tidy());
		this.prompt.addEventListener("keydown", (event) => {
			if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.preventDefault(), this.#write(this.prompt.value);
		});
		byId("playground").addEventListener("submit", (event) => {
			event.preventDefault();
			if (this.#running) this.stop();
			else this.#write(this.prompt.value);
		});
		this.#tidy();
	}

	focus() {
		this.prompt.focus();
	}

	stop() {
		this.#running?.abort();
	}

	async #write(prompt) {
		if (!prompt || this.#running || !this.settings.check()) return;
		const running = (this.#running = new AbortController());
		const turn = { text: "" };
		const reply = new Reply(turn);
		this.#tidy();
		this.output.replaceChildren();
		const text = element("span", { class: "new" });
		this.output.append(element("span", { class: "given" }, prompt), text);
		try {
			for await (const chunk of completion(this.#body(prompt), running.signal)) {
				reply.take(chunk);
				text.textContent = turn.text;
				byId("written-facts").textContent = factsOf(turn, true).join(" · ");
			}
			reply.end();
		} catch (error) {
			reply.end(running.signal.aborted ? "abort" : FAILED);
			if (!running.signal.aborted) this.output.append(element("p", { class: "fault", role: "alert" }, error instanceof TypeError ? "The server cannot be reached." : error.message));
			this.onRefused(error);
		}
		this.#running = null;
		this.#tidy();
		this.#finish(prompt, turn);
	}

	#body(prompt) {
		const { max_tokens = MAX_TOKENS, ...values } = this.settings.values();
		const own = values.logprobs && { logprobs: values.top_logprobs };
		const fields = Object.fromEntries(Object.entries({ ...values, ...own }).filter(([name]) => !FOREIGN.includes(name)));
		return { model: this.server.select.value || undefined, ...fields, prompt, max_tokens };
	}

	#finish(prompt, turn) {
		const facts = element("span", {}, factsOf(turn, false).join(" · "));
		const take = wordButton("Go on with it", () => {
			this.prompt.value = prompt + turn.text;
			this.#tidy();
			this.#write(this.prompt.value);
		});
		byId("written-facts").replaceChildren(facts, ...(turn.text ? [take] : []));
		if (!turn.tokens) return;
		const acts = { takeInstead: (_, text) => {
			this.prompt.value = prompt + text;
			this.#tidy();
			this.#write(this.prompt.value);
		} };
		this.output.replaceChildren(element("span", { class: "given" }, prompt), tokenView(turn, acts));
	}

	#tidy() {
		const button = byId("write");
		button.textContent = this.#running ? "Stop" : "Complete";
		button.disabled = !this.#running && !this.prompt.value;
		keepDraft(DRAFT, this.prompt.value);
		byId("written").hidden = !this.output.childNodes.length;
	}
}
