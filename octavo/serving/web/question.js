// How a question looks: its text, its files, its branches, and what may be done with it.

import { branchSwitch } from "./branches.js";
import { element } from "./dom.js";
import { editForm } from "./edit.js";
import { copyIcon, iconButton } from "./icons.js";
import { chip } from "./chips.js";

/** The view of one question; `acts` are what the reader may do with the turn. */
export class QuestionView {
	constructor(turn, acts) {
		Object.assign(this, { turn, acts });
		this.files = element("div", { class: "files" }, ...(turn.files ?? []).map((file) => chip(file)));
		this.text = element("div", { class: "text" }, turn.text);
		this.text.hidden = !turn.text;
		this.branches = element("span", { class: "branches" });
		this.out = iconButton("eye", "", () => acts.leaveOut(turn, !turn.isOut));
		this.buttons = element("span", { class: "actions" }, copyIcon(() => turn.text),
			iconButton("pencil", "Edit this question", () => this.edit()), this.out,
			iconButton("cross", "Remove this turn", () => acts.remove(turn)));
		this.line = element("div", { class: "notes" }, this.buttons, this.branches);
		this.node = element("li", { class: "user" }, this.files, this.text, this.line);
		this.node.dataset.turn = turn.id;
	}

	/** Show its state. */
	update(siblings) {
		const isOut = Boolean(this.turn.isOut);
		this.node.classList.toggle("left-out", isOut);
		this.branches.replaceChildren(...branchSwitch(this.turn, siblings, this.acts));
		const label = isOut ? "Tell this turn to the model again" : "Leave this turn out of the context";
		this.out.setAttribute("aria-label", label);
		this.out.title = label;
		this.out.setAttribute("aria-pressed", isOut);
	}

	/** Make it a field, until it is asked again or left as it was. */
	edit() {
		if (!this.text.isConnected) return; // it is a field already
		const form = editForm("Question", this.turn.text, "Ask again", (text) => this.acts.askInstead(this.turn, text), () => {
			form.replaceWith(this.text, this.line);
		});
		this.line.remove();
		this.text.replaceWith(form);
		form.focusField();
	}
}
