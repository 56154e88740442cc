"""Plain completions: several prompts, several samples, log probabilities, and vLLM's own fields."""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
answer = client.completions.create(
    model="smollm2",
    prompt=["The capital of France is", "The sea is"],
    max_tokens=8,
    n=2,
    temperature=0.8,
    seed=1,
    logprobs=1,
    extra_body={"top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1},
)
for choice in answer.choices:
    print(f"{choice.index}: {choice.text!r}, first token's logprob {choice.logprobs.token_logprobs[0]:.2f}")
