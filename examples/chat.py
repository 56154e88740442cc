"""A conversation of two turns; the second finds the first in the prefix cache."""

from octavo import LLM, SamplingParams

with LLM() as llm:
    params = SamplingParams(temperature=0, max_tokens=40)
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    first = llm.chat(messages, params, use_tqdm=False)[0]
    print("assistant:", first.outputs[0].text)

    messages += [
        {"role": "assistant", "content": first.outputs[0].text},
        {"role": "user", "content": "And of Italy?"},
    ]
    second = llm.chat(messages, params, use_tqdm=False)[0]
    print("assistant:", second.outputs[0].text)
    print(f"{second.num_cached_tokens} of {len(second.prompt_token_ids)} prompt tokens were cached")
