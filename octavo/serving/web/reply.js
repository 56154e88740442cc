// An answer on its way: folds the chunks of a stream into a turn, and keeps the times.

export const FAILED = "error";
/** Why an answer ended, where the model did not end it by itself. */
export const ENDS = {
	length: "reached its length",
	abort: "stopped",
	cut: "was cut off",
	timeout: "ran out of time",
	tool_calls: "calls tools",
	repetition: "repeated itself",
	[FAILED]: "failed",
};

/** Fills `turn`, whose text may have a beginning already. */
export class Reply {
	#askedMs = performance.now();
	#firstMs = null;
	#lastMs = 0;
	#firstTokens = 0;

	constructor(turn) {
		this.turn = turn;
		this.before = turn.facts?.tokens ?? 0;
		turn.finish = "cut"; // unless somebody lives to say otherwise
	}

	/** A chunk of the stream. */
	take({ choices, usage }) {
		const choice = choices?.[0];
		const now = performance.now();
		const { turn } = this;
		const text = choice?.text ?? choice?.delta?.content ?? "";
		if (choice && this.#grow(text, choice.delta ?? {})) this.#lastMs = now;
		if (choice?.logprobs) (turn.tokens ??= []).push(...entriesOf(choice.logprobs));
		if (choice?.finish_reason) this.reason = choice.finish_reason;
		const tokens = usage?.completion_tokens ?? 0;
		if (this.#firstMs === null && (this.#lastMs || tokens)) {
			this.#firstMs = this.#lastMs = now;
			this.#firstTokens = tokens || 1;
		}
		if (tokens || this.#firstMs !== null) this.#note(tokens, usage);
	}

	/** Nothing more comes; finish: why, when the stream did not say. */
	end(finish = this.reason) {
		this.turn.finish = finish === "stop" ? "" : finish ?? "";
	}

	/** Add what is new; whether there was anything. */
	#grow(text, { reasoning, reasoning_content, tool_calls }) {
		const { turn } = this;
		const thought = reasoning ?? reasoning_content ?? ""; // two names of one thing
		turn.text += text;
		if (thought) turn.reasoning = (turn.reasoning ?? "") + thought;
		for (const { index, function: called } of tool_calls ?? []) {
			const call = ((turn.calls ??= [])[index] ??= { name: "", given: "" });
			call.name += called?.name ?? "";
			call.given += called?.arguments ?? "";
		}
		return Boolean(text || thought || tool_calls?.length);
	}

	#note(tokens, usage) {
		const seconds = (this.#lastMs - this.#firstMs) / 1000;
		const isTimed = tokens > this.#firstTokens && seconds > 0;
		this.turn.facts = {
			speed: isTimed ? (tokens - this.#firstTokens) / seconds : null,
			firstMs: this.#firstMs === null ? null : this.#firstMs - this.#askedMs,
			tokens: this.before + tokens,
			used: (usage?.prompt_tokens ?? 0) + tokens,
		};
	}
}

/** [token, logprob, [[alternative, logprob], …]] of each token, from the forms of both routes. */
function entriesOf({ content, tokens, token_logprobs, top_logprobs }) {
	if (content) return content.map(({ token, logprob, top_logprobs }) => [token, logprob, top_logprobs.map((top) => [top.token, top.logprob])]);
	return (tokens ?? []).map((token, n) => [token, token_logprobs[n], Object.entries(top_logprobs?.[n] ?? {})]);
}
