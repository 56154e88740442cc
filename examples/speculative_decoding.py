"""Guess tokens from the text so far: the same answers, and fewer steps where they repeat themselves."""

from octavo import LLM, SamplingParams

PROMPT = "one two three four five, one two three four five, one two three four five, one two"


def answer(**options):
    with LLM(**options) as llm:
        [output] = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=48), use_tqdm=False)
        counted = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return output.outputs[0].token_ids, counted


def main():
    plain, _ = answer()
    guessed, counted = answer(speculative_config={"method": "ngram", "num_speculative_tokens": 8})
    drafted = counted["vllm:spec_decode_num_draft_tokens"]
    accepted = counted["vllm:spec_decode_num_accepted_tokens"]
    print(f"the same tokens: {plain == guessed}; {accepted} of {drafted} guesses were right")


if __name__ == "__main__":
    main()
