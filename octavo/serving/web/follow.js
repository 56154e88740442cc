// Keeps the newest text in view, unless the reader has gone elsewhere.

import { byId } from "./dom.js";

const NEAR_PX = 80;

export class Follower {
	#isAway = false;
	#lastTop = 0;

	constructor() {
		this.scroller = byId("scroller");
		this.scroller.addEventListener("scroll", () => this.#offer(), { passive: true });
		byId("latest").addEventListener("click", () => this.follow(true));
	}

	/** Go to the end; always: also from elsewhere. */
	follow(always = false) {
		if (!always && this.#isAway) return;
		this.#isAway = false;
		requestAnimationFrame(() => (this.scroller.scrollTop = this.scroller.scrollHeight));
	}

	#offer() {
		const { scrollHeight, scrollTop, clientHeight } = this.scroller;
		const isNear = scrollHeight - scrollTop - clientHeight < NEAR_PX;
		if (isNear) this.#isAway = false;
		else if (scrollTop < this.#lastTop) this.#isAway = true;
		this.#lastTop = scrollTop;
		byId("latest").hidden = !this.#isAway;
	}
}
