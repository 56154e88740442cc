// The conversation: what was said, and the answer that is coming.

import { Answer, ENDS, FAILED } from "./answer.js";
import { chat } from "./api.js";
import { byId, element } from "./dom.js";

const NEAR_PX = 80;

/** One conversation. `settings()` gives the model, the system prompt and the sampling of the next answer. */
export class Conversation {
  #said = [];
  #running = null;

  constructor(settings, onRefused) {
    this.settings = settings;
    this.onRefused = onRefused;
    this.list = byId("messages");
    this.scroller = byId("scroller");
    this.scroller.addEventListener("scroll", () => this.#offerLatest(), { passive: true });
    byId("latest").addEventListener("click", () => this.#follow(true));
  }

  get isRunning() {
    return this.#running !== null;
  }

  /** Say `text`, and show the answer. */
  async ask(text) {
    if (this.#said.at(-1)?.role === "user") this.#said.pop(); // it got no answer; roles alternate
    this.#said.push({ role: "user", content: text });
    this.list.append(element("li", { class: "user" }, element("div", { class: "text" }, text)));
    await this.#answer();
  }

  /** End the answer that is coming; what has come stays. */
  stop() {
    this.#running?.abort();
  }

  /** Forget everything. */
  reset() {
    this.stop();
    this.#said = [];
    this.list.replaceChildren();
    this.#changed();
  }

  async #answer() {
    const answer = new Answer();
    const said = this.#said;
    const running = (this.#running = new AbortController());
    this.list.append(answer.node);
    this.#changed();
    this.#follow(true);
    try {
      const { system, ...body } = this.settings();
      const messages = system ? [{ role: "system", content: system }, ...said] : said;
      for await (const chunk of chat({ ...body, messages }, running.signal)) {
        answer.take(chunk);
        this.#follow();
      }
      answer.end();
    } catch (error) {
      answer.end(running.signal.aborted ? "abort" : FAILED);
      if (!running.signal.aborted) this.#fail(answer, error);
    }
    if (answer.text) said.push({ role: "assistant", content: answer.text });
    if (this.#running === running) this.#running = null;
    this.#announce(`The answer ${answer.finish ? ENDS[answer.finish] ?? answer.finish : "is complete"}.`);
    this.#changed();
    this.#follow();
  }

  #fail(answer, error) {
    const text = error instanceof TypeError ? "The server cannot be reached." : error.message;
    const again = element("button", { type: "button", class: "quiet" }, "Try again");
    again.addEventListener("click", () => this.#again(answer));
    answer.node.append(element("div", { class: "fault", role: "alert" }, element("p", {}, text), again));
    this.onRefused(error);
  }

  #again(answer) {
    if (this.isRunning) return;
    if (answer.text) this.#said.pop();
    answer.node.remove();
    this.#answer();
  }

  /** Keep the newest text in view, unless the reader has gone elsewhere. */
  #follow(always = false) {
    if (always || !this.isAway) {
      this.isAway = false;
      requestAnimationFrame(() => (this.scroller.scrollTop = this.scroller.scrollHeight));
    }
  }

  #offerLatest() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    const isHigher = scrollTop < (this.lastTop ?? 0);
    const isNear = scrollHeight - scrollTop - clientHeight < NEAR_PX;
    this.lastTop = scrollTop;
    if (isNear) this.isAway = false;
    else if (isHigher) this.isAway = true;
    byId("latest").hidden = !this.isAway;
  }

  #announce(text) {
    byId("announcer").textContent = text;
  }

  #changed() {
    const last = this.list.lastElementChild;
    for (const item of this.list.children) item.classList.toggle("last", item === last);
    byId("welcome").hidden = this.list.childElementCount > 0;
    document.dispatchEvent(new Event("conversation"));
  }
}
