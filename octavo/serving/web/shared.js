// A link that holds a conversation: what it holds is shown, and kept only when the reader says so.

import { checked } from "./checked.js";
import { byId } from "./dom.js";
import { unpacked } from "./packing.js";
import { say } from "./toast.js";

export async function takeShared(letters, library) {
	history.replaceState(null, "", "#chat");
	let chat;
	try {
		chat = checked(JSON.parse(await unpacked(letters)));
	} catch {
		return say("This link holds no conversation, or only a part of one.");
	}
	const dialog = byId("shared");
	byId("shared-text").textContent = `“${chat.title}”, ${chat.turns.length} turns. It is in the link itself; no server has seen it.`;
	dialog.returnValue = "";
	dialog.showModal();
	dialog.addEventListener("close", async () => {
		if (dialog.returnValue !== "keep") return;
		await library.add([chat]);
		location.hash = `#chat/${chat.id}`;
	}, { once: true });
}
