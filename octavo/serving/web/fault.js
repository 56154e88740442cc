// What went wrong with an answer, and what may help.

import { element, wordButton } from "./dom.js";

/** A node that says it; null when nothing did. */
export function faultNode(turn, acts) {
	const isFull = acts.isFull(turn);
	if (!turn.fault && !isFull) return null;
	const text = turn.fault ?? "The context is full: the model can read no more of this conversation.";
	const node = element("div", { class: turn.fault ? "fault" : "fault notice", role: "alert" }, element("p", {}, text));
	const offer = (words, act) => node.append(wordButton(words, () => act(turn)));
	if (turn.fault) offer("Try again", acts.retry);
	if (isFull && turn.fault) offer("Edit", acts.editQuestion);
	if (isFull && acts.canMakeRoom(turn)) offer("Leave out the oldest turns", acts.makeRoom);
	return node;
}
