// The open conversation: asks, shows and keeps its turns. What a turn looks like is in question.js and answer.js.

import { AnswerView } from "./answer.js";
import { chat } from "./api.js";
import { byId } from "./dom.js";
import { faultNode } from "./fault.js";
import { Follower } from "./follow.js";
import { canMakeRoom, isFull, leaveOutOldest } from "./context.js";
import { messagesOf } from "./messages.js";
import { QuestionView } from "./question.js";
import { ENDS, FAILED, Reply } from "./reply.js";
import { Tree } from "./tree.js";

const SAVE_MS = 2000;

/** Tells "change" when what may be pressed has changed, "keep" when the conversation is to be kept. */
export class Chat extends EventTarget {
	#views = new Map();
	#running = null;
	#keptMs = 0;

	/** settings: gives the system prompt and the other fields of a request; server: its model. */
	constructor(settings, server, onRefused) {
		super();
		Object.assign(this, { settings, server, onRefused, tree: new Tree(), list: byId("messages"), follower: new Follower() });
		this.acts = this.#acts();
	}

	get isRunning() {
		return this.#running !== null;
	}

	/** Show another conversation; an answer that is coming to this one ends. */
	open(tree) {
		this.stop();
		this.#running = null;
		this.tree = tree;
		this.#views.clear();
		this.#draw();
		this.follower.follow(true);
	}

	/** Say `text` at the end, and show the answer. */
	async ask(text, files = []) {
		const question = this.tree.add(this.tree.path().at(-1), { role: "user", text, ...(files.length && { files }) });
		await this.#answer(this.#room(question));
	}

	/** End the answer that is coming; what has come stays. */
	stop() {
		this.#running?.abort();
	}

	/** Take this state for the conversation. */
	restore(data) {
		this.open(new Tree(data));
		this.#keep();
	}

	#acts() {
		const acts = {
			choose: (turn) => this.#show(() => this.tree.choose(turn), turn),
			again: (turn) => this.#answer(this.#room(this.tree.turns.get(turn.parent))),
			retry: (turn) => this.#answer(Object.assign(turn, { text: "", reasoning: "", calls: [], tokens: null, facts: null })),
			more: (turn) => this.#answer(turn, turn.text),
			askInstead: (turn, text) => this.#askBeside(turn, text),
			rewrite: (turn, text) => this.#show(() => this.#room(this.tree.turns.get(turn.parent), text)),
			takeInstead: (turn, text) => {
				const beside = this.#room(this.tree.turns.get(turn.parent), text);
				this.#answer(beside, text);
			},
			recordTokens: (turn) => (this.settings.turnOn("logprobs"), acts.again(turn)),
			editQuestion: (turn) => this.#views.get(turn.parent).edit(),
			leaveOut: (turn, isOut) => this.#show(() => (turn.isOut = isOut)),
			makeRoom: (turn) => this.#makeRoom(turn),
			remove: (turn) => this.#remove(turn),
		};
		const whenIdle = ([name, act]) => [name, (...given) => this.isRunning || act(...given)];
		return {
			...Object.fromEntries(Object.entries(acts).map(whenIdle)),
			isOut: (turn) => this.tree.turns.get(turn.parent)?.isOut,
			isFull: (turn) => isFull(turn, this.server.model) && (turn.fault || turn.id === this.tree.head),
			canMakeRoom: (turn) => canMakeRoom(this.tree.path(turn)),
		};
	}

	/** An empty answer to a question, or one with a beginning. */
	#room(question, text = "") {
		return this.tree.add(question, { role: "assistant", text, model: this.server.select.value });
	}

	#askBeside(turn, text) {
		const { files } = turn;
		const question = this.tree.add(this.tree.turns.get(turn.parent), { role: "user", text, ...(files && { files }) });
		return this.#answer(this.#room(question));
	}

	/** Let the model answer in this turn; beginning: what of the answer is there. */
	async #answer(turn, beginning = "") {
		const running = new AbortController();
		this.#running = Object.assign(running, { turn });
		const { tree } = this;
		delete turn.fault;
		delete turn.finish;
		if (beginning) turn.tokens = null; // the first ones' are not known any more
		const reply = new Reply(turn);
		this.#draw();
		this.follower.follow(turn.id === tree.head);
		this.#keep(tree);
		try {
			for await (const chunk of chat(this.#body(turn, beginning), running.signal)) {
				reply.take(chunk);
				this.#views.get(turn.id)?.grow();
				this.follower.follow();
				this.#keepSometimes();
			}
			reply.end();
		} catch (error) {
			reply.end(running.signal.aborted ? "abort" : FAILED);
			if (!running.signal.aborted) this.#fail(turn, error);
		}
		if (this.#running === running) this.#running = null;
		byId("announcer").textContent = `The answer ${turn.finish ? (ENDS[turn.finish] ?? turn.finish) : "is complete"}.`;
		if (tree !== this.tree) return this.#keep(tree);
		this.#draw();
		this.#keep();
		this.follower.follow();
	}

	#body(turn, beginning) {
		const { system, ...fields } = this.settings.values();
		const path = this.tree.path(turn);
		const model = this.server.select.value || undefined; // until they are known, none is named: the server takes its own
		const goesOn = beginning && { continue_final_message: true, add_generation_prompt: false };
		return { model, ...fields, ...goesOn, messages: messagesOf(system, beginning ? path : path.slice(0, -1)) };
	}

	#fail(turn, error) {
		turn.fault = error instanceof TypeError ? "The server cannot be reached." : error.message;
		this.onRefused(error);
	}

	/** Leave out the oldest turns, one by one, until there is an answer, or none is left. */
	async #makeRoom(turn) {
		let count = 0;
		const goesOn = !turn.fault && turn.text;
		while (leaveOutOldest(this.tree.path(turn))) {
			count++;
			await (goesOn ? this.#answer(turn, turn.text) : this.acts.retry(turn));
			if (!isFull(turn, this.server.model)) break;
		}
		byId("announcer").textContent = `${count} turns were left out of the context.`;
	}

	#remove(turn) {
		const before = structuredClone(this.tree.data);
		this.#show(() => this.tree.remove(turn));
		this.dispatchEvent(new CustomEvent("removed", { detail: before }));
	}

	/** Change the conversation, and show it. */
	#show(change, place) {
		change();
		this.#draw();
		this.#keep();
		if (place) this.list.querySelector(`[data-turn="${CSS.escape(place.id)}"] .branches button:enabled`)?.focus();
	}

	#draw() {
		const path = this.tree.path();
		const views = path.map((turn) => this.#viewOf(turn));
		const nodes = views.map(({ node }) => node);
		nodes.forEach((node, n) => this.list.children[n] === node || this.list.insertBefore(node, this.list.children[n] ?? null));
		while (this.list.children.length > nodes.length) this.list.lastChild.remove();
		views.forEach((view, n) => view.update(this.tree.siblings(path[n]), path[n] === this.#running?.turn, n === path.length - 1));
		views.forEach((view, n) => path[n].role === "assistant" && view.tell(faultNode(path[n], this.acts)));
		this.list.classList.toggle("busy", this.isRunning);
		byId("welcome").hidden = path.length > 0;
		this.dispatchEvent(new Event("change"));
	}

	#viewOf(turn) {
		if (!this.#views.has(turn.id)) this.#views.set(turn.id, new (turn.role === "user" ? QuestionView : AnswerView)(turn, this.acts));
		return this.#views.get(turn.id);
	}

	#keepSometimes() {
		if (performance.now() - this.#keptMs > SAVE_MS) this.#keep();
	}

	#keep(tree = this.tree) {
		this.#keptMs = performance.now();
		tree.changed = Date.now();
		this.dispatchEvent(new CustomEvent("keep", { detail: tree }));
	}
}
