// How an answer looks: its reasoning, its text, the tools it calls, its figures, and what may be done with it.

import { branchSwitch } from "./branches.js";
import { element } from "./dom.js";
import { editForm } from "./edit.js";
import { copyIcon, iconButton } from "./icons.js";
import { show } from "./markdown.js";
import { ENDS, FAILED } from "./reply.js";
import { tokenView } from "./tokens.js";

/** The view of one answer; `acts` are what the reader may do with the turn. `node` is its place in the conversation. */
export class AnswerView {
	#timer = 0;
	#costMs = 0;

	constructor(turn, acts) {
		Object.assign(this, { turn, acts });
		this.thoughtTitle = element("summary");
		this.thoughtText = element("div", { class: "thought" });
		this.thought = element("details", { class: "reasoning", hidden: true }, this.thoughtTitle, this.thoughtText);
		this.body = element("div", { class: "text" });
		this.called = element("div", { class: "calls" });
		this.facts = element("span", { class: "facts" });
		this.branches = element("span", { class: "branches" });
		this.copy = copyIcon(() => turn.text);
		this.chances = iconButton("chances", "Token probabilities", () => this.#showTokens(this.tokens === null));
		this.chances.setAttribute("aria-pressed", "false");
		this.more = iconButton("more", "Continue this answer", () => acts.more(turn));
		this.buttons = element("span", { class: "actions" }, this.copy,
			iconButton("again", "Answer again", () => acts.again(turn)), this.more,
			iconButton("pencil", "Edit this answer", () => this.#edit()), this.chances);
		this.notes = element("div", { class: "notes" }, this.branches, this.facts, this.buttons);
		this.tokens = null;
		this.node = element("li", { class: "assistant" }, this.thought, this.body, this.called, this.notes);
		this.node.dataset.turn = turn.id;
	}

	/** Show what there is; while it is running, more comes. */
	update(siblings, isRunning, isLast) {
		this.isRunning = isRunning;
		if (isRunning) this.#showTokens(false);
		this.node.classList.toggle("left-out", Boolean(this.acts.isOut(this.turn)));
		this.branches.replaceChildren(...branchSwitch(this.turn, siblings, this.acts));
		this.buttons.hidden = isRunning;
		this.copy.hidden = this.chances.hidden = !this.turn.text;
		this.more.hidden = !isLast || !this.turn.text;
		this.body.toggleAttribute("data-running", isRunning);
		if (isRunning) this.body.setAttribute("aria-busy", "true");
		else this.body.removeAttribute("aria-busy");
		clearTimeout(this.#timer);
		this.#paint();
	}

	/** Paint what has grown, at the pace of the screen, or slower when painting takes long. */
	grow() {
		this.#timer ||= setTimeout(() => this.#paint(), Math.max(16, 3 * this.#costMs));
	}

	/** Put what went wrong under the answer; null: nothing did. */
	tell(fault) {
		if (fault?.textContent === this.fault?.textContent) return;
		this.fault?.remove();
		this.fault = fault;
		if (fault) this.node.append(fault);
	}

	#paint() {
		const before = performance.now();
		const { text, reasoning, calls = [] } = this.turn;
		this.#timer = 0;
		this.node.classList.toggle("waiting", this.isRunning && !text && !reasoning && !calls.length);
		this.thought.hidden = !reasoning;
		this.thoughtTitle.textContent = this.isRunning && !text && !calls.length ? "Thinking …" : "Reasoning";
		if (reasoning) show(this.thoughtText, reasoning);
		show(this.body, text);
		this.called.replaceChildren(...calls.filter(Boolean).map((call) => drawn(call, this.isRunning)));
		this.facts.replaceChildren(...factsOf(this.turn, this.isRunning).map((fact) => element("span", {}, fact)));
		this.#costMs = performance.now() - before;
	}

	#showTokens(isWanted) {
		this.tokens?.remove();
		this.tokens = null;
		if (isWanted) {
			this.tokens = tokenView(this.turn, this.acts);
			this.body.after(this.tokens);
		}
		this.body.hidden = Boolean(isWanted && this.turn.tokens);
		this.chances.setAttribute("aria-pressed", Boolean(isWanted));
	}

	#edit() {
		this.#showTokens(false);
		const form = editForm("Answer", this.turn.text, "Save", (text) => this.acts.rewrite(this.turn, text), () => {
			form.replaceWith(this.body);
			this.notes.hidden = false;
		});
		this.body.replaceWith(form);
		this.notes.hidden = true;
		form.focusField();
	}
}

/** A call of a tool: folded, its name told. */
function drawn({ name, given }, isOpen) {
	const title = element("summary", {}, "calls ", element("strong", {}, name));
	return element("details", { class: "code call", open: isOpen }, title, element("pre", { tabindex: "0" }, pretty(given)));
}

/** Arguments as one reads them; as they are while they are not complete. */
function pretty(given) {
	try {
		return JSON.stringify(JSON.parse(given), null, 2);
	} catch {
		return given;
	}
}

/** What is told under an answer. */
export function factsOf({ facts, finish }, isRunning) {
	const { speed, firstMs, tokens } = facts ?? {};
	return [
		speed && `${speed.toFixed(speed < 10 ? 1 : 0)} tokens/s`,
		firstMs != null && `first token ${duration(firstMs)}`,
		tokens && (tokens === 1 ? "1 token" : `${tokens} tokens`),
		!isRunning && finish && finish !== FAILED && (ENDS[finish] ?? finish),
	].filter(Boolean);
}

const duration = (ms) => (ms < 1000 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(1)} s`);
