// A conversation as Markdown that people read, and that can be read back: comments tell whose each turn is, which turn
// it follows if not the one before, and what its files are.

import { Tree } from "./tree.js";

const MARK = /^<!-- octavo: (user|assistant|file|picture)(?: (\S+))? -->$/;
const HEADS = { user: "## Question", assistant: "## Answer" };
/** A line that looks like a mark gets a backslash, and one more where it has some. */
const escaped = (text) => text.replace(/^(?=\\*<!-- octavo:)/gm, "\\");
const plain = (text) => text.replace(/^\\(?=\\*<!-- octavo:)/gm, "");

/** The shown branch comes first. */
export function toMarkdown(chat) {
	const tree = new Tree(chat);
	const shown = tree.path();
	const turns = [...shown, ...[...tree.turns.values()].filter((turn) => !shown.includes(turn))];
	const numbers = new Map(turns.map(({ id }, n) => [id, n + 1]));
	const parts = turns.flatMap((turn, n) => {
		const place = n < shown.length ? "" : ` ${numbers.get(turn.parent) ?? 0}`;
		const title = HEADS[turn.role] + (place && (place === " 0" ? ", another beginning" : `, another branch after turn${place}`));
		return [part(turn.role + place, title, turn.text), ...(turn.files ?? []).map(filePart)];
	});
	return [`# ${chat.title}\n`, ...parts].join("\n");
}

const part = (mark, title, text) => `<!-- octavo: ${mark} -->\n${title}\n\n${escaped(text)}\n`;

function filePart({ name, text, image }) {
	const mark = encodeURIComponent(name) || "file";
	if (image) return part(`picture ${mark}`, `### ${name}`, `![](${image})`);
	const fence = "`".repeat(Math.max(2, ...(text.match(/`+/g) ?? []).map(({ length }) => length)) + 1);
	return part(`file ${mark}`, `### ${name}`, `${fence}\n${text}\n${fence}`);
}

/** Throws an Error for what `toMarkdown` has not written. */
export function fromMarkdown(text, name) {
	const lines = text.replaceAll("\r\n", "\n").split("\n");
	const starts = lines.flatMap((line, n) => (MARK.test(line) ? [n] : []));
	const turns = [];
	let head = null;
	starts.forEach((start, n) => {
		const end = n + 1 < starts.length ? starts[n + 1] - 1 : lines.length - 1;
		const [, kind, place] = MARK.exec(lines[start]);
		const said = lines.slice(start + 3, end);
		if (kind in HEADS) {
			const id = turns.length + 1;
			turns.push({ id, parent: (place ? Number(place) : id - 1) || null, role: kind, text: plain(said.join("\n")), files: [] });
			if (!place) head = id;
		} else turns.at(-1)?.files.push(fileOf(kind, place, said));
	});
	if (!turns.length) throw new Error("it is neither JSON nor Markdown that was exported here.");
	return { title: /^# (.+)/.exec(lines[0])?.[1] ?? name, turns, head };
}

function fileOf(kind, place, lines) {
	const name = decodeURIComponent(place ?? "");
	return kind === "picture" ? { name, image: lines.join("").slice(4, -1) } : { name, text: plain(lines.slice(1, -1).join("\n")) };
}
