// The list of conversations at the side: a column where there is room, else a drawer over the page.

import { byId } from "./dom.js";

const STORE = "octavo-sidebar";
const isNarrow = matchMedia("(max-width: 56rem)");

export class Sidebar {
	constructor() {
		this.node = byId("sidebar");
		this.button = byId("toggle-sidebar");
		this.button.addEventListener("click", () => this.toggle());
		byId("close-sidebar").addEventListener("click", () => this.toggle());
		byId("curtain").addEventListener("click", () => this.closeOverlay());
		this.node.addEventListener("keydown", (event) => event.key === "Escape" && this.closeOverlay());
		isNarrow.addEventListener("change", () => this.#begin());
		this.#begin();
	}

	show() {
		this.#set(true);
	}

	toggle() {
		this.#set(this.node.hidden);
		if (!isNarrow.matches) localStorage.setItem(STORE, this.node.hidden ? "hidden" : "shown");
		if (this.node.hidden) this.button.focus();
	}

	/** Close it where it lies over the page. */
	closeOverlay() {
		if (isNarrow.matches && !this.node.hidden) this.toggle();
	}

	#begin() {
		this.#set(!isNarrow.matches && localStorage.getItem(STORE) !== "hidden");
	}

	#set(isShown) {
		const isOver = isShown && isNarrow.matches;
		this.node.hidden = !isShown;
		byId("curtain").hidden = !isOver;
		byId("page").inert = isOver;
		this.button.setAttribute("aria-expanded", isShown);
		if (isOver) byId("close-sidebar").focus();
	}
}
