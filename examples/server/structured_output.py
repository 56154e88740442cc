"""Answers held to a pydantic model, a choice, a regular expression."""

from openai import OpenAI
from pydantic import BaseModel, Field

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")


class City(BaseModel):
    name: str = Field(max_length=16)
    country: str = Field(max_length=16)


def ask(question: str, **options: object) -> str | None:
    messages = [{"role": "user", "content": question}]
    answer = client.chat.completions.create(
        model="smollm2", messages=messages, temperature=0, max_tokens=48, extra_body=options
    )
    return answer.choices[0].message.content


question = [{"role": "user", "content": "What is the capital of France? Answer in JSON."}]
parsed = client.chat.completions.parse(
    model="smollm2", messages=question, response_format=City, temperature=0, max_tokens=64
)
print("schema:", parsed.choices[0].message.parsed)
print("choice:", ask("Is the sea blue?", structured_outputs={"choice": ["yes", "no"]}))
print("regex:", ask("When did the war end?", structured_outputs={"regex": r"19\d\d"}))
