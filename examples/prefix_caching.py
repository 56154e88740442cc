"""Many prompts with a common beginning: its keys and values are computed once."""

import time

from octavo import LLM, SamplingParams

PREFIX = "You are an expert school principal, skilled in managing staff and faculty. " * 12
QUESTIONS = [
    "Write a question for a teacher.",
    "Draft a letter to the parents.",
    "Plan the first day of school.",
]

with LLM() as llm:
    params = SamplingParams(temperature=0, max_tokens=16)
    for attempt in ("cold", "warm"):
        begun_s = time.monotonic()
        outputs = llm.generate([PREFIX + question for question in QUESTIONS], params, use_tqdm=False)
        cached = sum(output.num_cached_tokens for output in outputs)
        total = sum(len(output.prompt_token_ids) for output in outputs)
        print(f"{attempt}: {cached} of {total} prompt tokens cached, {time.monotonic() - begun_s:.2f} s")
    assert cached > total // 2
