"""How likely each token was: of the output, with alternatives, and of a prompt, for its perplexity."""

import math

from octavo import LLM, SamplingParams

with LLM() as llm:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3)
    completion = llm.generate("The capital of France is", params, use_tqdm=False)[0].outputs[0]
    for token_id, alternatives in zip(completion.token_ids, completion.logprobs, strict=True):
        chosen = alternatives[token_id]
        others = {entry.decoded_token: round(math.exp(entry.logprob), 3) for entry in alternatives.values()}
        print(f"{chosen.decoded_token!r} with probability {math.exp(chosen.logprob):.3f} of {others}")

    scores = SamplingParams(max_tokens=1, prompt_logprobs=0)
    for text in ("The cat sat on the mat.", "Mat the on sat cat the."):
        output = llm.generate(text, scores, use_tqdm=False)[0]
        values = [
            position[token_id].logprob
            for token_id, position in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
            if position is not None
        ]
        print(f"perplexity {math.exp(-sum(values) / len(values)):8.1f}: {text}")
