// What the reader may choose: system prompt, sampling, key. All but the key outlives the tab.

import { key } from "./api.js";
import { byId, element } from "./dom.js";

const STORE = "octavo-settings";

/** The dialog of settings; `onKey` is called when another key was given. */
export class Settings {
  constructor(onKey) {
    this.dialog = byId("settings");
    this.fields = this.dialog.querySelector("form").elements;
    this.onKey = onKey;
    this.#restore();
    byId("open-settings").addEventListener("click", () => this.open());
    byId("defaults").addEventListener("click", () => this.#clear());
    this.dialog.addEventListener("input", () => this.#save());
    this.keyFault = byId("key-fault");
    for (const field of this.#chosen()) field.after(element("small", { class: "wrong", id: `${field.name}-fault`, role: "status" }));
    this.#mark();
    this.dialog.addEventListener("close", () => this.#takeKey());
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) this.dialog.close(); // beside the form
    });
  }

  /** Show the dialog, at the field of this name. */
  open(name) {
    if (!this.dialog.open) this.dialog.showModal();
    if (name) this.fields[name].focus();
  }

  /** The server has refused a request for want of the right key: say so, at its field. */
  askForKey() {
    this.keyFault.textContent = key.get() ? "The server does not accept this key." : "This server asks for an API key.";
    this.open("key");
  }

  /** Whether every field has a value that can be sent; shows the first that has not. */
  check() {
    const wrong = this.#chosen().find(faultOf);
    if (wrong) this.open(wrong.name);
    return !wrong;
  }

  /** What a request bears of them: `system`, and the sampling fields that are filled in. */
  values() {
    const filled = this.#chosen().filter((field) => field.value.trim());
    return Object.fromEntries(filled.map((field) => [field.name, field.type === "number" ? field.valueAsNumber : field.value]));
  }

  #chosen() {
    return [...this.fields].filter((field) => field.name && field.name !== "key");
  }

  #save() {
    const stored = Object.fromEntries(this.#chosen().map((field) => [field.name, field.value]));
    localStorage.setItem(STORE, JSON.stringify(stored));
    this.#mark();
  }

  /** Say at each field what is wrong with it. */
  #mark() {
    for (const field of this.#chosen()) {
      const fault = faultOf(field);
      field.setAttribute("aria-invalid", Boolean(fault));
      field.setAttribute("aria-describedby", `${field.name}-fault`);
      byId(`${field.name}-fault`).textContent = fault;
    }
  }

  #restore() {
    const stored = JSON.parse(localStorage.getItem(STORE) ?? "{}");
    for (const field of this.#chosen()) field.value = stored[field.name] ?? "";
    this.fields.key.value = key.get();
  }

  #clear() {
    for (const field of this.#chosen()) field.value = "";
    this.#save();
  }

  #takeKey() {
    const given = this.fields.key.value.trim();
    if (given === key.get()) return;
    key.set(given);
    this.keyFault.textContent = "";
    this.onKey();
  }
}

/** What is wrong with the value of a field, in words; empty when nothing is. */
function faultOf({ validity, min, max, step }) {
  const isWhole = step === "1";
  const isOut = validity.badInput || validity.rangeOverflow || validity.rangeUnderflow;
  if (!isOut && !(isWhole && validity.stepMismatch)) return "";
  return `${isWhole ? "A whole number" : "A number"}${max ? ` from ${min} to ${max}` : `, ${min} or more`}.`;
}
