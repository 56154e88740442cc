// The conversation: what was said, the answer that is coming, and what there is to know about it.

import { chat } from "./api.js";
import { byId, copyButton, element } from "./dom.js";
import { show } from "./markdown.js";

const NEAR_PX = 80;
const ENDS = { length: "reached its length", abort: "stopped", timeout: "ran out of time", error: "failed" };
const FAILED = "error";

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

/** An answer on its way: its text, its times, its nodes. */
class Answer {
  text = "";
  finish = "";
  #tokens = 0;
  #firstTokens = 0;
  #askedMs = performance.now();
  #firstMs = null;
  #lastMs = 0;
  #timer = 0;
  #costMs = 0;

  constructor() {
    this.body = element("div", { class: "text", "aria-busy": "true" });
    this.notes = element("p", { class: "notes" });
    this.node = element("li", { class: "assistant waiting" }, this.body, this.notes);
  }

  /** A chunk of the stream. */
  take({ choices, usage }) {
    const choice = choices?.[0];
    const now = performance.now();
    if (choice?.delta?.content) {
      this.text += choice.delta.content;
      this.node.classList.remove("waiting");
      this.#lastMs = now;
    }
    if (choice?.finish_reason && choice.finish_reason !== "stop") this.finish = choice.finish_reason;
    this.#tokens = usage?.completion_tokens ?? this.#tokens;
    if (this.#firstMs === null && (this.text || this.#tokens)) {
      this.#firstMs = this.#lastMs = now;
      this.#firstTokens = this.#tokens || 1;
    }
    this.#paintSoon();
  }

  /** Nothing more comes; finish: why, when the model did not end by itself. */
  end(finish = this.finish) {
    this.finish = finish;
    this.node.classList.remove("waiting");
    this.body.removeAttribute("aria-busy");
    clearTimeout(this.#timer);
    this.#paint();
    if (this.text) this.notes.append(copyButton(() => this.text));
  }

  /** At the pace of the screen, or slower when painting takes long. */
  #paintSoon() {
    this.#timer ||= setTimeout(() => this.#paint(), Math.max(16, 3 * this.#costMs));
  }

  #paint() {
    const before = performance.now();
    this.#timer = 0;
    show(this.body, this.text);
    this.notes.replaceChildren(...this.#facts().map((fact) => element("span", {}, fact)));
    this.#costMs = performance.now() - before;
  }

  #facts() {
    const facts = [];
    const seconds = (this.#lastMs - this.#firstMs) / 1000;
    if (this.#tokens > this.#firstTokens && seconds > 0) {
      facts.push(`${figure((this.#tokens - this.#firstTokens) / seconds)} tokens/s`);
    }
    if (this.#firstMs !== null) facts.push(`first token ${duration(this.#firstMs - this.#askedMs)}`);
    if (this.#tokens) facts.push(this.#tokens === 1 ? "1 token" : `${this.#tokens} tokens`);
    if (this.finish && this.finish !== FAILED) facts.push(ENDS[this.finish] ?? this.finish);
    return facts;
  }
}

const figure = (value) => value.toFixed(value < 10 ? 1 : 0);
const duration = (ms) => (ms < 1000 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(1)} s`);
