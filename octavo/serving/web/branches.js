// ‹ 2/3 ›: the switch between turns that stand in the same place.

import { element } from "./dom.js";
import { iconButton } from "./icons.js";

/** Its nodes; none when the turn stands alone. */
export function branchSwitch(turn, siblings, acts) {
	if (siblings.length < 2) return [];
	const at = siblings.indexOf(turn);
	const step = (name, label, next) => {
		const button = iconButton(name, label, () => acts.choose(next, label));
		button.disabled = !next;
		return button;
	};
	return [
		step("back", "Branch before", siblings[at - 1]),
		element("span", { role: "status", "aria-label": `Branch ${at + 1} of ${siblings.length}` }, `${at + 1}/${siblings.length}`),
		step("forth", "Branch after", siblings[at + 1]),
	];
}
