// A conversation as data: a tree of turns, of which one path is shown. It knows nothing of the document.

const MAX_TITLE = 60;

export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(9)), (byte) => byte.toString(36).padStart(2, "0")).join("");

/** Turns have { id, parent, role, text }, and what their role brings besides; a parent stands before its children. */
export class Tree {
	constructor({ id = newId(), title = "", created = Date.now(), changed = created, head = null, turns = [] } = {}) {
		Object.assign(this, { id, title, created, changed, head });
		this.turns = new Map(turns.map((turn) => [turn.id, turn]));
	}

	/** What is stored and exported. */
	get data() {
		const { id, title, created, changed, head } = this;
		return { id, title, created, changed, head, turns: [...this.turns.values()] };
	}

	/** The turns that are shown, or those that lead to `last`. */
	path(last = this.turns.get(this.head)) {
		const found = [];
		for (let turn = last; turn; turn = this.turns.get(turn.parent)) found.push(turn);
		return found.reverse();
	}

	/** The turns that stand in the same place, oldest first. */
	siblings({ parent }) {
		return [...this.turns.values()].filter((turn) => turn.parent === parent);
	}

	/** Put a new turn after `parent`, or at the beginning, and show it. */
	add(parent, turn) {
		const added = { id: newId(), parent: parent?.id ?? null, text: "", ...turn };
		this.turns.set(added.id, added);
		this.head = added.id;
		this.title ||= titleOf(added.text);
		return added;
	}

	/** Show the path through a turn, and from there the newest branches. */
	choose(turn) {
		for (let next = turn; next; next = this.siblings({ parent: next.id }).at(-1)) this.head = next.id;
	}

	/** Take out a question with its answers; what follows the shown answer moves up, other branches of it go. */
	remove(question) {
		const path = this.path();
		const answer = path[path.indexOf(question) + 1];
		const next = this.siblings({ parent: answer?.id ?? question.id });
		const shown = path[path.indexOf(question) + 2];
		for (const turn of answer ? next : []) turn.parent = question.parent;
		this.#cut(question);
		if (!shown) this.#showEnd(question.parent);
	}

	#cut(turn) {
		for (const child of this.siblings({ parent: turn.id })) this.#cut(child);
		this.turns.delete(turn.id);
	}

	#showEnd(parent) {
		this.head = parent;
		this.choose(this.turns.get(parent) ?? this.siblings({ parent: null }).at(-1));
	}
}

/** The first line of a text, short. */
export function titleOf(text) {
	const line = text.trim().split("\n")[0].replace(/\s+/g, " ");
	return line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE).trimEnd()}…` : line;
}
