// What the reader may choose: system prompt, sampling, key. All but the key outlives the tab.

import { key } from "./api.js";
import { byId } from "./dom.js";

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

  /** What a request bears of them: `system`, and the sampling fields that are filled in and valid. */
  values() {
    const filled = this.#chosen().filter((field) => field.value.trim() && field.validity.valid);
    return Object.fromEntries(filled.map((field) => [field.name, field.type === "number" ? field.valueAsNumber : field.value]));
  }

  #chosen() {
    return [...this.fields].filter((field) => field.name && field.name !== "key");
  }

  #save() {
    const stored = Object.fromEntries(this.#chosen().map((field) => [field.name, field.value]));
    localStorage.setItem(STORE, JSON.stringify(stored));
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
    this.onKey();
  }
}
