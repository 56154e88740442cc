// An answer token by token: each coloured by its probability, its alternatives on a click.

import { element, wordButton } from "./dom.js";
import { place } from "./menu.js";

const LEVELS = [0.9, 0.6, 0.3, 0.1];
const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(logprob < -2.4 ? 1 : 0)} %`;
const visible = (token) => token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";

/** The tokens of a turn, or the offer to ask for them. acts.recordTokens: answer again with them. */
export function tokenView(turn, acts) {
	if (!turn.tokens?.length) {
		return element("div", { class: "tokens none" }, element("p", {}, "No probabilities were asked for with this answer."),
			wordButton("Answer again with them", () => acts.recordTokens(turn)));
	}
	const node = element("div", { class: "tokens", role: "group", "aria-label": "Tokens with their probabilities" });
	let before = "";
	for (const entry of turn.tokens) {
		node.append(tokenButton(entry, before, turn, acts));
		before += entry[0];
	}
	return node;
}

function tokenButton(entry, before, turn, acts) {
	const [token, logprob] = entry;
	const level = LEVELS.findIndex((least) => Math.exp(logprob) >= least);
	const button = element("button", { type: "button", class: `token level-${level < 0 ? LEVELS.length : level}`,
		"aria-label": `${visible(token)} ${percent(logprob)}`, "aria-haspopup": "dialog" }, token);
	button.addEventListener("click", () => showAlternatives(button, entry, (other) => acts.takeInstead?.(turn, before + other)));
	return button;
}

/** What else could have stood in a token's place. */
function showAlternatives(button, [token, logprob, others], take) {
	const known = others.some(([other]) => other === token) ? others : [[token, logprob], ...others];
	const rows = known.toSorted((a, b) => b[1] - a[1]).map(([other, value]) => {
		const bar = element("meter", { min: 0, max: 1, value: Math.exp(value), "aria-label": `Probability of ${visible(other)}` });
		const name = other === token ? element("strong", {}, visible(other)) : wordButton(visible(other), () => (node.hidePopover(), take(other)));
		if (other !== token) name.title = "Go on from here with this token, as a new branch";
		return element("div", { class: "alternative" }, name, bar, element("span", {}, percent(value)));
	});
	const node = element("div", { class: "menu alternatives", role: "dialog", "aria-label": "Alternatives", popover: "auto" }, ...rows);
	node.addEventListener("toggle", ({ newState }) => newState === "closed" && node.remove());
	document.body.append(node);
	node.showPopover();
	place(node, button.getBoundingClientRect());
	(node.querySelector("button") ?? node).focus();
}
