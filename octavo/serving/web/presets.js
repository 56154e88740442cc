// Settings under a name: three to begin with, and the reader's own, kept in this browser.

import { byId, element } from "./dom.js";
import { say } from "./toast.js";

const STORE = "octavo-presets";
const GIVEN = {
	Precise: { temperature: "0" },
	Balanced: {},
	Creative: { temperature: "1.2", min_p: "0.05" },
};

export class Presets {
	#own = JSON.parse(localStorage.getItem(STORE) ?? "{}");

	constructor(settings) {
		this.settings = settings;
		this.select = byId("preset");
		this.name = byId("preset-name");
		this.select.addEventListener("change", () => this.#take());
		byId("preset-save").addEventListener("click", () => this.#add());
		byId("preset-delete").addEventListener("click", () => this.#remove());
		this.#list("");
	}

	/** A preset leaves the system prompt as it is unless it has one. */
	#take() {
		const chosen = this.#own[this.select.value] ?? GIVEN[this.select.value];
		if (chosen) this.settings.set({ system: this.settings.stored.system, ...chosen });
		this.#tidy();
	}

	#add() {
		const name = this.name.value.trim();
		if (!name) return this.name.focus();
		const values = Object.entries(this.settings.stored).filter(([, value]) => value.trim());
		this.#keep({ ...this.#own, [name]: Object.fromEntries(values) }, name);
		this.name.value = "";
		say(`Preset “${name}” is kept in this browser.`);
	}

	#remove() {
		const before = this.#own;
		const name = this.select.value;
		this.#keep(Object.fromEntries(Object.entries(before).filter(([other]) => other !== name)), "");
		say(`Preset “${name}” was deleted.`, () => this.#keep(before, name));
	}

	#keep(own, chosen) {
		this.#own = own;
		localStorage.setItem(STORE, JSON.stringify(own));
		this.#list(chosen);
	}

	#list(chosen) {
		const names = [...new Set([...Object.keys(GIVEN), ...Object.keys(this.#own)])];
		const options = names.map((name) => element("option", { value: name }, name));
		this.select.replaceChildren(element("option", { value: "" }, "choose …"), ...options);
		this.select.value = chosen;
		this.#tidy();
	}

	#tidy() {
		byId("preset-delete").disabled = !Object.hasOwn(this.#own, this.select.value);
	}
}
