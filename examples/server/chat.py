"""A conversation with OpenAI's client: a system message, two turns, usage."""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
messages = [
    {"role": "system", "content": "Answer in one short sentence."},
    {"role": "user", "content": "What is the capital of France?"},
]
for question in ("And of Italy?", None):
    answer = client.chat.completions.create(model="smollm2", messages=messages, max_tokens=32, temperature=0)
    print("assistant:", answer.choices[0].message.content)
    messages += [{"role": "assistant", "content": answer.choices[0].message.content}]
    messages += [{"role": "user", "content": question}]
print(f"{answer.usage.prompt_tokens} tokens in, {answer.usage.completion_tokens} out")
