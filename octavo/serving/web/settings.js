// The dialog of settings: system prompt, fields of requests, key. All but the key outlives the tab.

import { key } from "./api.js";
import { byId, element } from "./dom.js";
import { FIELDS, GROUPS, KINDS, requestFields } from "./fields.js";

const STORE = "octavo-settings";
const NUMBERS = ["number", "whole"];

/** `onKey` is called when another key was given. */
export class Settings {
	constructor(onKey) {
		this.dialog = byId("settings");
		this.keyFault = byId("key-fault");
		this.onKey = onKey;
		byId("groups").append(...GROUPS.map(groupNode));
		this.fields = this.dialog.querySelector("form").elements;
		this.set(JSON.parse(localStorage.getItem(STORE) ?? "{}"), false);
		this.fields.key.value = key.get();
		byId("open-settings").addEventListener("click", () => this.open());
		byId("defaults").addEventListener("click", () => this.set({}));
		this.dialog.addEventListener("input", ({ target }) => target.name in this.stored && this.#save());
		this.dialog.addEventListener("close", () => this.#takeKey());
		this.dialog.addEventListener("click", (event) => {
			if (event.target === this.dialog) this.dialog.close(); // beside the form
		});
	}

	/** Show the dialog, at the field of this name. */
	open(name) {
		if (!this.dialog.open) this.dialog.showModal();
		const field = this.fields[name];
		field?.closest("details")?.setAttribute("open", "");
		field?.focus();
	}

	/** The server has refused a request for want of the right key: say so, at its field. */
	askForKey() {
		this.keyFault.textContent = key.get() ? "The server does not accept this key." : "This server asks for an API key.";
		this.open("key");
	}

	/** Whether every field has a value that can be sent; shows the first that has not. */
	check() {
		const wrong = FIELDS.find((field) => this.#faultOf(field));
		if (wrong) this.open(wrong.name);
		return !wrong;
	}

	/** What a request bears of them: `system`, and the fields that are filled in. To be asked for after `check`. */
	values() {
		const given = FIELDS.filter(({ name, kind }) => this.stored[name].trim() && !(kind === "flag" && !this.stored[name]));
		const values = Object.fromEntries(given.map(({ name, kind }) => [name, KINDS[kind](this.stored[name])]));
		return { ...(this.stored.system.trim() && { system: this.stored.system }), ...requestFields(values) };
	}

	/** What is written in every field, by name. */
	get stored() {
		const texts = FIELDS.map(({ name }) => [name, this.fields[name].value]);
		return { system: this.fields.system.value, ...Object.fromEntries(texts) };
	}

	/** Fill in the fields; those that are not given become empty. */
	set(stored, isNew = true) {
		for (const name of Object.keys(this.stored)) this.fields[name].value = String(stored[name] ?? "");
		for (const details of byId("groups").querySelectorAll("details")) details.open ||= hasValue(details);
		if (isNew) this.#save();
		else this.#mark();
	}

	turnOn(name) {
		this.fields[name].value = "true";
		this.#save();
	}

	/** Show what holds where a field is empty. */
	showDefaults(defaults = {}) {
		for (const { name, kind, empty } of FIELDS) {
			const value = defaults[name];
			if (NUMBERS.includes(kind)) this.fields[name].placeholder = value ?? empty ?? "0";
		}
	}

	#save() {
		localStorage.setItem(STORE, JSON.stringify(this.stored));
		this.#mark();
	}

	/** Say at each field what is wrong with it. */
	#mark() {
		for (const field of FIELDS) {
			const fault = this.#faultOf(field);
			this.fields[field.name].setAttribute("aria-invalid", Boolean(fault));
			byId(`${field.name}-fault`).textContent = fault;
		}
	}

	/** What is wrong with the value of a field, in words; empty when nothing is. */
	#faultOf({ name, kind, min, max }) {
		const { value, validity } = this.fields[name];
		const isOut = validity.badInput || validity.rangeOverflow || validity.rangeUnderflow;
		if (isOut || (kind === "whole" && validity.stepMismatch)) {
			return `${kind === "whole" ? "A whole number" : "A number"}${max === undefined ? `, ${min} or more` : ` from ${min} to ${max}`}.`;
		}
		try {
			if (value.trim()) KINDS[kind](value);
			return "";
		} catch (error) {
			return error.message;
		}
	}

	#takeKey() {
		const given = this.fields.key.value.trim();
		if (given === key.get()) return;
		key.set(given);
		this.keyFault.textContent = "";
		this.onKey();
	}
}

const hasValue = (details) => [...details.querySelectorAll("[name]")].some((field) => field.value);

function groupNode([title, fields], n) {
	return element("details", { class: "group", open: n === 0 }, element("summary", {}, title), ...fields.map(fieldNode));
}

function fieldNode(field) {
	const fault = element("small", { class: "wrong", id: `${field.name}-fault`, role: "status" });
	const input = inputOf(field);
	input.setAttribute("aria-describedby", fault.id);
	const note = field.note ? element("small", {}, field.note) : "";
	return element("label", { class: input.tagName === "TEXTAREA" ? "tall" : null }, field.label, " ", input, note, fault);
}

function inputOf({ name, kind, min, max, step, hint, choices, isOn }) {
	if (NUMBERS.includes(kind)) return element("input", { name, type: "number", min, max, step, inputmode: kind === "whole" ? "numeric" : "decimal" });
	if (kind === "flag") return select(name, [["", isOn ? "on" : "off"], isOn ? ["false", "off"] : ["true", "on"]]);
	if (kind === "choice") return select(name, [["", "as it is"], ...choices.map((choice) => [choice, choice])]);
	if (kind === "ids" || name === "regex") return element("input", { name, placeholder: hint, spellcheck: "false" });
	return element("textarea", { name, rows: kind === "lines" ? 2 : 4, placeholder: hint, spellcheck: "false" });
}

const select = (name, options) => element("select", { name }, ...options.map(([value, words]) => element("option", { value }, words)));
