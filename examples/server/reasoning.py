"""Reasoning apart from the answer, with a budget of tokens. Needs a model that reasons, such as Qwen 3."""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
stream = client.chat.completions.create(
    model="smollm2",
    messages=[{"role": "user", "content": "Is 7 a prime number?"}],
    max_tokens=64,
    temperature=0,
    stream=True,
    extra_body={"thinking_token_budget": 24, "chat_template_kwargs": {"enable_thinking": True}},
)
told = {"reasoning": "", "content": ""}
for chunk in stream:
    for name in told:
        told[name] += getattr(chunk.choices[0].delta, name, None) or ""
print("reasoning:", told["reasoning"].strip())
print("answer:", told["content"].strip())
