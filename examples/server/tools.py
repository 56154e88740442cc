"""A tool call: the model fills in the arguments, this program runs the tool, the model answers."""

import json
from typing import Any

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
CITIES = {"type": "string", "enum": ["Paris", "Rome", "Oslo"]}
PARAMETERS = {"type": "object", "properties": {"city": CITIES}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
messages: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]


def get_weather(city: str) -> str:
    return f"Sunny and 21 degrees in {city}."


answer = client.chat.completions.create(
    model="smollm2", messages=messages, tools=[TOOL], tool_choice="required", max_tokens=48, temperature=0
)
turn = answer.choices[0].message
messages.append(turn.model_dump(exclude_none=True))
for call in turn.tool_calls:
    print("call:", call.function.name, call.function.arguments)
    result = get_weather(**json.loads(call.function.arguments))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
final = client.chat.completions.create(model="smollm2", messages=messages, max_tokens=32, temperature=0)
print("assistant:", final.choices[0].message.content)
