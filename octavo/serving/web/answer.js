// An answer on its way: its reasoning, its text, the tools it calls, its times, and the nodes that show them.

import { copyButton, element } from "./dom.js";
import { show } from "./markdown.js";

export const FAILED = "error";
export const ENDS = {
  length: "reached its length",
  abort: "stopped",
  timeout: "ran out of time",
  tool_calls: "calls tools",
  [FAILED]: "failed",
};

/** One answer. `node` is its place in the conversation. */
export class Answer {
  text = "";
  finish = "";
  #reasoning = "";
  #calls = [];
  #tokens = 0;
  #firstTokens = 0;
  #askedMs = performance.now();
  #firstMs = null;
  #lastMs = 0;
  #timer = 0;
  #costMs = 0;

  constructor() {
    this.thoughtTitle = element("summary", {}, "Thinking …");
    this.thoughtText = element("div", { class: "thought" });
    this.thought = element("details", { class: "reasoning", hidden: true }, this.thoughtTitle, this.thoughtText);
    this.body = element("div", { class: "text", "aria-busy": "true" });
    this.called = element("div", { class: "calls" });
    this.notes = element("p", { class: "notes" });
    this.node = element("li", { class: "assistant waiting" }, this.thought, this.body, this.called, this.notes);
  }

  /** A chunk of the stream. */
  take({ choices, usage }) {
    const choice = choices?.[0];
    const now = performance.now();
    if (choice?.delta && this.#grow(choice.delta)) {
      this.node.classList.remove("waiting");
      this.#lastMs = now;
    }
    if (choice?.finish_reason && choice.finish_reason !== "stop") this.finish = choice.finish_reason;
    this.#tokens = usage?.completion_tokens ?? this.#tokens;
    if (this.#firstMs === null && (this.#lastMs || this.#tokens)) {
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
    this.thoughtTitle.textContent = "Reasoning";
    if (this.text) this.notes.append(copyButton(() => this.text));
  }

  /** Add what is new; whether there was anything. */
  #grow({ content, reasoning, reasoning_content, tool_calls = [] }) {
    const thought = reasoning ?? reasoning_content ?? ""; // two names of one thing
    this.text += content ?? "";
    this.#reasoning += thought;
    for (const { index, function: called } of tool_calls ?? []) {
      const call = (this.#calls[index] ??= { name: "", given: "" });
      call.name += called?.name ?? "";
      call.given += called?.arguments ?? "";
    }
    return Boolean(content || thought || tool_calls?.length);
  }

  /** At the pace of the screen, or slower when painting takes long. */
  #paintSoon() {
    this.#timer ||= setTimeout(() => this.#paint(), Math.max(16, 3 * this.#costMs));
  }

  #paint() {
    const before = performance.now();
    this.#timer = 0;
    this.thought.hidden = !this.#reasoning;
    if (this.text || this.#calls.length) this.thoughtTitle.textContent = "Reasoning";
    if (this.#reasoning) show(this.thoughtText, this.#reasoning);
    show(this.body, this.text);
    this.called.replaceChildren(...this.#calls.filter(Boolean).map(drawn));
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

/** A call of a tool. */
function drawn({ name, given }) {
  const title = element("figcaption", {}, element("span", {}, "calls ", element("strong", {}, name)));
  return element("figure", { class: "code call" }, title, element("pre", { tabindex: "0" }, pretty(given)));
}

/** Arguments as one reads them; as they are while they are not complete. */
function pretty(given) {
  try {
    return JSON.stringify(JSON.parse(given), null, 2);
  } catch {
    return given;
  }
}

const figure = (value) => value.toFixed(value < 10 ? 1 : 0);
const duration = (ms) => (ms < 1000 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(1)} s`);
