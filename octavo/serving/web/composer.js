// The field for the question, its files, and the buttons to send and to stop.

import { chip } from "./chips.js";
import { byId, keepDraft } from "./dom.js";
import { say } from "./toast.js";

const MAX_PROMPT_PX = 240;
const DRAFT = "octavo-draft";
const CHARACTERS_PER_TOKEN = 4;
export const HAS_KEYBOARD = matchMedia("(hover: hover)").matches;

/** `send(text, files)` says whether the question was taken; server: whether its model takes pictures. */
export class Composer {
	#files = [];

	constructor(chat, server, send) {
		Object.assign(this, { chat, server, send, prompt: byId("prompt") });
		this.prompt.value = sessionStorage.getItem(DRAFT) ?? "";
		byId("composer").addEventListener("submit", (event) => (event.preventDefault(), this.#submit()));
		byId("stop").addEventListener("click", () => this.stop());
		byId("attach").addEventListener("click", () => byId("files").click());
		byId("files").addEventListener("change", async ({ target }) => {
			await this.attach([...target.files]);
			target.value = "";
		});
		this.prompt.addEventListener("input", () => this.tidy());
		this.prompt.addEventListener("keydown", (event) => this.#onKey(event));
		this.prompt.addEventListener("paste", (event) => this.#take(event, event.clipboardData));
		const view = byId("chat");
		view.addEventListener("dragover", (event) => (event.preventDefault(), view.classList.add("dropping")));
		view.addEventListener("dragleave", (event) => view.contains(event.relatedTarget) || view.classList.remove("dropping"));
		view.addEventListener("drop", (event) => (view.classList.remove("dropping"), this.#take(event, event.dataTransfer)));
	}

	get #takesPictures() {
		return this.server.model.input_modalities?.includes("image") ?? false;
	}

	focus() {
		if (HAS_KEYBOARD) this.prompt.focus();
	}

	stop() {
		this.chat.stop();
		this.focus();
	}

	/** Read files, and keep them with the question. */
	async attach(files) {
		const { readFile } = await import("./files.js");
		for (const file of files) {
			try {
				this.#files.push(await readFile(file, this.#takesPictures));
			} catch (error) {
				say(`${file.name} ${error.message}`);
			}
			this.tidy();
		}
		this.focus();
	}

	/** What may be pressed, how high the field is, and which files are there. */
	tidy() {
		const { isRunning } = this.chat;
		byId("send").hidden = isRunning;
		byId("stop").hidden = !isRunning;
		byId("send").disabled = !this.prompt.value.trim() && !this.#files.length;
		this.prompt.style.height = "auto";
		this.prompt.style.height = `${Math.min(this.prompt.scrollHeight, MAX_PROMPT_PX)}px`;
		keepDraft(DRAFT, this.prompt.value);
		byId("files").accept = this.#takesPictures ? "" : "text/*,.pdf,.md,.json,.csv,.py,.js,.ts,.c,.cpp,.h,.rs,.go,.java,.yaml,.yml,.toml,.xml,.log,.sh,.sql";
		byId("attached").replaceChildren(...this.#files.map((file) => chip(file, () => {
			this.#files = this.#files.filter((other) => other !== file);
			this.tidy();
			this.focus();
		})));
		this.#tellContext();
	}

	/** How much of the context is used, by the newest answer's count and the files' sizes. */
	#tellContext() {
		const most = this.server.model.max_model_len;
		const used = this.chat.tree.path().findLast((turn) => turn.facts)?.facts.used ?? 0;
		const more = this.#files.reduce((sum, { text = "" }) => sum + text.length, 0) / CHARACTERS_PER_TOKEN;
		const share = most ? (used + more) / most : 0;
		const place = byId("context");
		place.hidden = share < 0.01;
		place.classList.toggle("high", share > 0.8);
		place.textContent = `${Math.round(100 * share)} % of the context`;
		place.title = `${more ? "About " : ""}${Math.round(used + more).toLocaleString("en")} of ${most?.toLocaleString("en")} tokens`;
	}

	#submit() {
		const text = this.prompt.value.trim();
		if ((!text && !this.#files.length) || !this.send(text, this.#files)) return this.tidy();
		this.prompt.value = "";
		this.#files = [];
		this.tidy();
	}

	#take(event, { files }) {
		if (!files.length) return;
		event.preventDefault();
		this.attach([...files]);
	}

	#onKey(event) {
		if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
		event.preventDefault();
		this.#submit();
	}
}
