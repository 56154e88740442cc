// A question of the reader's and the answer to it: its nodes, and what is said of it to the model.

import { drawing, element, wordButton } from "./dom.js";

const PENCIL = "m4 16 1-4 8-8 3 3-8 8zM11 6l3 3";
const CROSS = "m5 5 10 10M15 5 5 15";

/** One turn. `node` is the question's place in the conversation; the answer stands behind it. */
export class Turn {
  answer = null;
  #question;

  /** actions: what `edit` and `remove` do when they are asked for. */
  constructor(question, { edit, remove }) {
    this.#question = question;
    this.text = element("div", { class: "text" }, question);
    const buttons = [iconButton("Edit this question", PENCIL, edit), iconButton("Remove this turn", CROSS, remove)];
    this.actions = element("div", { class: "actions" }, ...buttons);
    this.node = element("li", { class: "user" }, this.text, this.actions);
  }

  get asked() {
    return { role: "user", content: this.#question };
  }

  /** What later questions are asked after: nothing while there is no answer, as roles alternate. */
  get messages() {
    return this.answer?.text ? [this.asked, { role: "assistant", content: this.answer.text }] : [];
  }

  /** Put this answer in the place of the earlier one. */
  show(answer) {
    this.answer?.node.remove();
    this.answer = answer;
    this.node.after(answer.node);
  }

  remove() {
    this.node.remove();
    this.answer?.node.remove();
  }

  /** Make the question a field, until it is asked again or left as it was. */
  edit(endsWhatFollows, askAgain) {
    if (!this.text.isConnected) return; // it is a field already
    const field = element("textarea", { "aria-label": "Question", rows: Math.min(12, this.#question.split("\n").length + 1) });
    const note = endsWhatFollows ? element("small", {}, "What follows it will be removed.") : "";
    const form = element("form", { class: "edit" }, field, note, element("button", { class: "quiet" }, "Ask again"));
    const close = () => form.replaceWith(this.text, this.actions);
    form.append(wordButton("Cancel", close));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!field.value.trim()) return;
      this.#question = this.text.textContent = field.value.trim();
      close();
      askAgain();
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      else if (event.key === "Enter" && event.target === field && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    this.actions.remove();
    this.text.replaceWith(form);
    field.value = this.#question;
    field.focus();
  }
}

function iconButton(label, path, act) {
  const icon = drawing("svg", { viewBox: "0 0 20 20", "aria-hidden": "true" }, drawing("path", { d: path }));
  const button = element("button", { type: "button", class: "icon", "aria-label": label, title: label }, icon);
  button.addEventListener("click", act);
  return button;
}
