"""A streamed answer: each piece as it comes, then the usage in the last chunk."""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
stream = client.chat.completions.create(
    model="smollm2",
    messages=[{"role": "user", "content": "Name three animals that can fly."}],
    max_tokens=32,
    stream=True,
    stream_options={"include_usage": True},
)
pieces = 0
for chunk in stream:
    if chunk.choices and (text := chunk.choices[0].delta.content):
        print(text, end="", flush=True)
        pieces += 1
    if chunk.usage:
        print(f"\n{chunk.usage.completion_tokens} tokens in {pieces} pieces")
