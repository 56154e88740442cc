// The list of conversations: search, rename, delete with undo, export and import.

import { byId, element } from "./dom.js";
import { iconButton } from "./icons.js";
import { showMenu } from "./menu.js";
import { say } from "./toast.js";
import { get, heads, isLasting, onForeignChange, put, remove, search } from "./store.js";
import { copyLink, fileText, saveJson, saveMarkdown } from "./transfer.js";

const DAY_MS = 86_400_000;
const AGES = [["Today", 0], ["Yesterday", 1], ["The last 7 days", 7], ["The last 30 days", 30], ["Older", Infinity]];
const SEARCH_MS = 150;

/** Tells "gone" when the open conversation was deleted, "foreign" when another tab has changed it. */
export class Library extends EventTarget {
	#openId = "";
	#timer = 0;

	constructor() {
		super();
		this.list = byId("conversations");
		this.search = byId("search");
		this.search.addEventListener("input", () => {
			clearTimeout(this.#timer);
			this.#timer = setTimeout(() => this.show(), SEARCH_MS);
		});
		this.search.addEventListener("keydown", (event) => this.#onSearchKey(event));
		byId("import").addEventListener("click", () => byId("import-file").click());
		byId("import-file").addEventListener("change", ({ target }) => this.#import(target));
		byId("export-all").addEventListener("click", async () => saveJson(await Promise.all((await heads()).map(({ id }) => get(id)))));
		onForeignChange((id) => {
			this.show();
			if (id === this.#openId) this.dispatchEvent(new Event("foreign"));
		});
		isLasting.then((isLasting) => (byId("fleeting").hidden = isLasting));
	}

	set openId(id) {
		this.#openId = id;
		this.#mark();
	}

	/** Keep a conversation's newest state. */
	async keep(tree) {
		try {
			await put(tree.data);
		} catch (error) {
			say(`The conversation cannot be kept: ${error.message}`);
		}
		await this.show();
	}

	/** Draw the list. */
	async show() {
		const wanted = this.search.value.trim();
		const [all, found] = await Promise.all([heads(), wanted ? search(wanted) : null]);
		const shown = found ? all.filter(({ id }) => found.has(id)) : all;
		const groups = Map.groupBy(shown, ageOf);
		const focused = this.list.contains(document.activeElement) && document.activeElement.dataset.id;
		if (this.list.querySelector("input")) return; // a name is being written
		this.list.replaceChildren(...[...groups].flatMap(([age, members]) =>
			[element("li", { class: "age" }, element("h3", {}, age)), ...members.map((head) => this.#entry(head))]));
		this.list.querySelector(`[data-id="${CSS.escape(focused || "-")}"]`)?.focus();
		byId("no-conversations").textContent = shown.length ? "" : wanted ? "Nothing is found." : "Your conversations are kept here, in this browser alone.";
		this.#mark();
	}

	async add(chats) {
		await put(...chats);
		await this.show();
	}

	async delete(id) {
		const chat = await get(id);
		await remove(id);
		await this.show();
		if (id === this.#openId) this.dispatchEvent(new Event("gone"));
		say(`“${chat.title || "A conversation"}” was deleted.`, () => this.add([chat]));
	}

	#entry({ id, title }) {
		const link = element("a", { href: `#chat/${id}`, "data-id": id, title }, title || "Without a title");
		const more = iconButton("menu", `What to do with ${title}`, () => showMenu(more, [
			["Rename", () => this.#rename(id, link)],
			["Export as JSON", async () => saveJson([await get(id)])],
			["Export as Markdown", async () => saveMarkdown(await get(id))],
			["Copy a link that holds it", async () => copyLink(await get(id))],
			["Delete", () => this.delete(id), true],
		]));
		more.setAttribute("aria-haspopup", "menu");
		return element("li", {}, link, more);
	}

	#rename(id, link) {
		const field = element("input", { "aria-label": "Title", maxlength: 200 });
		field.value = link.textContent;
		let isOpen = true;
		const close = async (isWanted) => {
			if (!isOpen) return; // taking it away blurs it
			isOpen = false;
			field.replaceWith(link);
			const title = field.value.trim();
			if (isWanted && title) {
				await put({ ...(await get(id)), title });
				if (id === this.#openId) this.dispatchEvent(new CustomEvent("renamed", { detail: title }));
			}
			await this.show();
			this.list.querySelector(`[data-id="${CSS.escape(id)}"]`)?.focus();
		};
		field.addEventListener("keydown", (event) => {
			if (event.key === "Enter" || event.key === "Escape") event.stopPropagation(), close(event.key === "Enter");
		});
		field.addEventListener("blur", () => close(true));
		link.replaceWith(field);
		field.select();
	}

	async #import(input) {
		for (const file of input.files) {
			try {
				const chats = await fileText(file);
				await this.add(chats);
				say(`${chats.length === 1 ? `“${chats[0].title}” was` : `${chats.length} conversations were`} imported.`);
				if (chats.length === 1) location.hash = `#chat/${chats[0].id}`;
			} catch (error) {
				say(`${file.name} cannot be imported: ${error.message}`);
			}
		}
		input.value = "";
	}

	#onSearchKey(event) {
		if (event.key === "ArrowDown" || event.key === "Enter") {
			event.preventDefault();
			const first = this.list.querySelector("a");
			if (event.key === "Enter") first?.click();
			else first?.focus();
		} else if (event.key === "Escape" && this.search.value) {
			event.stopPropagation();
			this.search.value = "";
			this.show();
		}
	}

	#mark() {
		for (const link of this.list.querySelectorAll("a")) {
			if (link.dataset.id === this.#openId) link.setAttribute("aria-current", "true");
			else link.removeAttribute("aria-current");
		}
	}
}

function ageOf({ changed }) {
	const days = Math.ceil((new Date().setHours(0, 0, 0, 0) - changed) / DAY_MS);
	return AGES.find(([, most]) => days <= most)[0];
}
