// The conversation: what was said, and the answer that is coming.

import { Answer, ENDS, FAILED } from "./answer.js";
import { chat } from "./api.js";
import { byId, element, wordButton } from "./dom.js";
import { Turn } from "./turn.js";

const NEAR_PX = 80;
/** What the server says when the conversation has become too long for the model. */
const FULL = /context length/i;

/** One conversation. `settings()` gives the model, the system prompt and the sampling of the next answer. */
export class Conversation {
  #turns = [];
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
    const turn = new Turn(text, { edit: () => this.#edit(turn), remove: () => this.#remove(turn) });
    this.#turns.push(turn);
    this.list.append(turn.node);
    await this.#answer(turn);
  }

  /** End the answer that is coming; what has come stays. */
  stop() {
    this.#running?.abort();
  }

  /** Forget everything. */
  reset() {
    this.stop();
    this.#drop(0);
  }

  /** Ask a turn's question, or ask it again. */
  async #answer(turn) {
    const answer = new Answer();
    const running = (this.#running = new AbortController());
    turn.show(answer);
    this.#changed();
    this.#follow(turn === this.#turns.at(-1));
    try {
      const { system, ...body } = this.settings();
      const messages = [...this.#before(turn).flatMap((earlier) => earlier.messages), turn.asked];
      if (system) messages.unshift({ role: "system", content: system });
      for await (const chunk of chat({ ...body, messages }, running.signal)) {
        answer.take(chunk);
        this.#follow();
      }
      answer.end();
    } catch (error) {
      answer.end(running.signal.aborted ? "abort" : FAILED);
      if (!running.signal.aborted) this.#fail(turn, error);
    }
    if (this.#running === running) this.#running = null;
    byId("announcer").textContent = `The answer ${answer.finish ? ENDS[answer.finish] ?? answer.finish : "is complete"}.`;
    this.#changed();
    this.#follow();
  }

  #before(turn) {
    return this.#turns.slice(0, this.#turns.indexOf(turn));
  }

  /** Say what went wrong with a turn's answer, and offer what may help. */
  #fail(turn, error) {
    const text = error instanceof TypeError ? "The server cannot be reached." : error.message;
    const fault = element("div", { class: "fault", role: "alert" }, element("p", {}, text));
    const offer = (words, act) => fault.append(wordButton(words, () => this.isRunning || act()));
    offer("Try again", () => this.#answer(turn));
    if (FULL.test(text)) {
      offer("Edit", () => this.#edit(turn));
      const oldest = this.#before(turn).find((earlier) => earlier.messages.length);
      if (oldest) {
        offer("Try without the oldest turn", () => {
          this.#remove(oldest);
          this.#answer(turn);
        });
      }
    }
    turn.answer.node.append(fault);
    this.onRefused(error);
  }

  #remove(turn) {
    if (this.isRunning) return;
    this.#turns = this.#turns.filter((other) => other !== turn);
    turn.remove();
    this.#changed();
  }

  /** Let the reader change a question; what was said after it goes when it is asked again. */
  #edit(turn) {
    if (this.isRunning) return;
    const next = this.#turns.indexOf(turn) + 1;
    turn.edit(next < this.#turns.length, () => {
      if (this.isRunning) return;
      this.#drop(next);
      this.#answer(turn);
    });
  }

  /** Forget the turns from this one on. */
  #drop(first) {
    for (const turn of this.#turns.splice(first)) turn.remove();
    this.#changed();
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

  #changed() {
    this.list.classList.toggle("busy", this.isRunning);
    byId("welcome").hidden = this.list.childElementCount > 0;
    document.dispatchEvent(new Event("conversation"));
  }
}
