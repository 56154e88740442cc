// What the model is told: the turns of a path as messages of the API.

/** The messages for an answer after `path`; the last question is asked, earlier ones only with their answers. */
export function messagesOf(system, path) {
	const told = path.filter((turn, n) => isTold(turn, path[n + 1], n === path.length - 1) && !isLeftOut(turn, path[n - 1]));
	const messages = told.map((turn) => ({ role: turn.role, content: turn.role === "user" ? contentOf(turn) : turn.text }));
	return system ? [{ role: "system", content: system }, ...messages] : messages;
}

/** An answer goes with its question. */
const isLeftOut = (turn, before) => (turn.role === "user" ? turn : before)?.isOut;

/** Roles alternate: neither an answer without text nor its question is said again. */
const isTold = (turn, next, isLast) => isLast || (turn.role === "user" ? Boolean(next?.text) : Boolean(turn.text));

/** A question's text behind the texts of its files; pictures go beside it. */
function contentOf({ text, files = [] }) {
	const texts = files.filter((file) => !file.image).map(({ name, text }) => `<document name="${name}">\n${text}\n</document>`);
	const whole = [...texts, text].filter(Boolean).join("\n\n");
	const pictures = files.filter((file) => file.image).map(({ image }) => ({ type: "image_url", image_url: { url: image } }));
	return pictures.length ? [...pictures, { type: "text", text: whole }] : whole;
}
