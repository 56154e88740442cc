// A conversation from elsewhere, made anew of what is understood of it: nothing else of it comes in.

import { newId, titleOf } from "./tree.js";

const MAX_TURNS = 10_000;
const ROLES = ["user", "assistant"];

/** A conversation that can be kept; it gets ids of its own. Throws an Error that says what is wrong. */
export function checked(given) {
	if (!Array.isArray(given?.turns)) throw new Error("it holds no conversation.");
	if (given.turns.length > MAX_TURNS) throw new Error(`it has more than ${MAX_TURNS} turns.`);
	const known = new Map();
	const isTree = given.turns.some((turn) => turn && "parent" in turn);
	let last = null;
	for (const turn of given.turns.filter((turn) => ROLES.includes(turn?.role))) {
		const parent = isTree ? (known.get(turn.parent)?.id ?? null) : last;
		if (isTree && turn.parent !== null && parent === null) throw new Error("a turn stands before the one it follows.");
		const made = { id: newId(), parent, role: turn.role, ...partsOf(turn) };
		known.set(turn.id ?? made.id, made);
		last = made.id;
	}
	if (!known.size) throw new Error("it holds no turns.");
	const turns = [...known.values()];
	const head = known.get(given.head)?.id ?? last;
	const created = time(given.created);
	return { id: newId(), title: string(given.title) || titleOf(turns[0].text), created, changed: time(given.changed), head, turns };
}

const string = (value, most = 10_000_000) => (typeof value === "string" ? value.slice(0, most) : "");
const time = (value) => (Number.isFinite(value) && value > 0 ? Math.min(value, Date.now()) : Date.now());
const number = (value) => (Number.isFinite(value) ? value : null);
const list = (value) => (Array.isArray(value) ? value : []);

/** What a turn has besides its place; what is empty is left out. */
function partsOf({ text, content, reasoning, finish, fault, model, isOut, calls, files, facts, tokens }) {
	const parts = {
		reasoning: string(reasoning),
		finish: string(finish, 100),
		fault: string(fault),
		model: string(model, 1000),
		isOut: isOut === true,
		calls: list(calls).map((call) => ({ name: string(call?.name), given: string(call?.given) })),
		files: list(files).map(fileOf),
		tokens: list(tokens).map(tokenOf),
		facts: facts && typeof facts === "object" ? Object.fromEntries(["speed", "firstMs", "tokens", "used"].map((name) => [name, number(facts[name])])) : null,
	};
	const filled = Object.entries(parts).filter(([, value]) => (Array.isArray(value) ? value.length : value));
	return { text: string(text ?? (typeof content === "string" ? content : textOf(content))), ...Object.fromEntries(filled) };
}

/** The text of a message whose content has parts. */
const textOf = (parts) => list(parts).map((part) => string(part?.text)).join("\n");

const fileOf = (file) => ({
	name: string(file?.name, 300),
	text: string(file?.text),
	note: string(file?.note, 1000),
	...(/^data:image\/(png|jpeg|webp|gif);base64,[\w+/=]*$/.test(string(file?.image)) && { image: file.image }),
});

const tokenOf = (entry) => [string(entry?.[0]), number(entry?.[1]) ?? 0, list(entry?.[2]).map((top) => [string(top?.[0]), number(top?.[1]) ?? 0])];
