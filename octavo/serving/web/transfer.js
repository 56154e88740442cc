// Conversations out of this browser and into it: as JSON, as Markdown, as a link that holds one. Nothing is uploaded.

import { checked } from "./checked.js";
import { copied, element } from "./dom.js";
import { packed } from "./packing.js";
import { fromMarkdown, toMarkdown } from "./transcript.js";
import { say } from "./toast.js";

const FORMAT = "octavo-conversations";
const MAX_LINK = 100_000;
const MAX_FILE = 200 * 2 ** 20;

/** Save conversations with all their branches as a file. */
export function saveJson(chats) {
	const name = chats.length === 1 ? chats[0].title : "conversations";
	save(name, "json", JSON.stringify({ format: FORMAT, version: 1, conversations: chats }, null, 1));
}

/** Save a conversation as a file to read; thoughts and calls of tools are in JSON only. */
export const saveMarkdown = (chat) => save(chat.title, "md", toMarkdown(chat));

/** Put a link on the clipboard that holds the conversation itself, behind the #, which no server sees. */
export async function copyLink(chat) {
	const turns = chat.turns.map(({ tokens, facts, ...turn }) => turn);
	const link = `${location.href.split("#")[0]}#shared/${await packed(JSON.stringify({ ...chat, turns }))}`;
	if (link.length > MAX_LINK) return say("This conversation is too long for a link. Export it as a file.");
	say((await copied(link)) ? "The link is copied. It holds the conversation itself; nothing was uploaded." : "The browser does not allow copying.");
}

/** The conversations of a file of either kind. Throws an Error that says what is wrong with it. */
export async function fileText(file) {
	if (file.size > MAX_FILE) throw new Error("it is larger than 200 MB.");
	const text = await file.text();
	if (!/^\s*[[{]/.test(text)) return [checked(fromMarkdown(text, file.name))];
	let value;
	try {
		value = JSON.parse(text);
	} catch (error) {
		throw new Error(`it is not JSON: ${error.message}`);
	}
	const found = Array.isArray(value) ? [{ turns: value }] : (value.conversations ?? [value.messages ? { turns: value.messages } : value]);
	if (!Array.isArray(found) || !found.length) throw new Error("it holds no conversations.");
	return found.map(checked);
}

function save(title, kind, text) {
	const name = title.replace(/[^\p{L}\p{N} _-]+/gu, "").trim().slice(0, 60) || "conversation";
	const address = URL.createObjectURL(new Blob([text]));
	element("a", { href: address, download: `${name}.${kind}` }).click();
	setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
