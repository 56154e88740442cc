// The server as it is now: its state, its models, and what holds where a request leaves something open.

import { fetched, request } from "./api.js";
import { byId, element } from "./dom.js";

const CALM_MS = 5000;
const ALERT_MS = 1500;
const STATES = {
	ready: "ready",
	starting: "starting …",
	restarting: "restarting …",
	draining: "shutting down",
	stalled: "not answering",
	dead: "engine has stopped",
	gone: "no server",
	locked: "no access",
};

/** Watches the server from `start` on. Its list of models is the page's. */
export class Server extends EventTarget {
	#models = new Map();
	#state = "";
	#timer = 0;
	#told = "";

	constructor() {
		super();
		this.select = byId("model");
		this.place = byId("server-state");
		this.select.addEventListener("change", () => this.#tell());
		document.addEventListener("visibilitychange", () => this.#look());
	}

	start() {
		this.#look();
	}

	/** The chosen model: { id, tasks, max_model_len, default_parameters, input_modalities }, as far as they are known. */
	get model() {
		return this.#models.get(this.select.value) ?? {};
	}

	/** Whether it writes text; one that is not known yet may. */
	get generates() {
		return this.model.tasks?.includes("generate") ?? true;
	}

	get state() {
		return this.#state;
	}

	/** Ask for the models; with another key they may be told. */
	async list() {
		try {
			const { data } = await (await request("v1/models")).json();
			this.#show("ready");
			if (JSON.stringify(data) === this.#told) return;
			this.#told = JSON.stringify(data);
			this.#models = new Map(data.map((model) => [model.id, model]));
			const chosen = this.select.value;
			this.select.replaceChildren(...data.map((model) => element("option", { value: model.id, title: model.id }, labelOf(model))));
			if (this.#models.has(chosen)) this.select.value = chosen;
		} catch (error) {
			this.#show(error.status === 401 ? "locked" : error.status ? "starting" : "gone");
			if (error.status === 401) this.dispatchEvent(new CustomEvent("refused", { detail: error }));
		}
		this.select.disabled = this.#models.size < 2;
		this.#tell();
	}

	async #look() {
		clearTimeout(this.#timer);
		if (document.hidden) return;
		const before = this.#state;
		const state = await stateNow();
		if (state !== "ready") this.#show(state);
		else if (!["ready", "locked"].includes(before) || this.#models.size > 1) await this.list(); // several come and go
		clearTimeout(this.#timer);
		this.#timer = setTimeout(() => this.#look(), this.#state === "ready" ? CALM_MS : ALERT_MS);
	}

	#show(state) {
		if (state === this.#state) return;
		this.#state = state;
		this.place.dataset.state = state;
		this.place.querySelector(".text").textContent = STATES[state] ?? state;
		if (!this.#models.size) this.select.replaceChildren(element("option", { value: "" }, STATES[state] ?? state));
		this.dispatchEvent(new Event("state"));
	}

	#tell() {
		this.select.title = this.select.value;
		this.dispatchEvent(new Event("model"));
	}
}

async function stateNow() {
	try {
		const response = await fetched("health");
		const { status } = await response.json().catch(() => ({}));
		return status in STATES ? status : response.ok ? "ready" : "starting";
	} catch {
		return "gone";
	}
}

/** With the state of a model that a request would wait for. */
const labelOf = ({ id, status: { value } = {} }) => shortName(id) + (value && value !== "loaded" ? ` · ${value}` : "");

/** Folders are named by their last part. */
const shortName = (id) => id.replace(/[/\\]+$/, "").split(/[/\\]/).at(-1) || id;
