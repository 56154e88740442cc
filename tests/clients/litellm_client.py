"""litellm: a forced tool, a schema, a stream. Argument: the server's address."""

import json
import os
import sys
from functools import partial
from typing import Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from pydantic import BaseModel


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    sunny: bool


CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
for model, base in (("hosted_vllm/smollm2", "/v1"), ("openai/smollm2", "/v1"), ("anthropic/smollm2", "")):
    ask = partial(
        litellm.completion,
        model=model,
        api_base=sys.argv[1] + base,
        api_key="none",
        temperature=0,
        max_tokens=64,
    )
    question = [{"role": "user", "content": "The weather in Rome?"}]
    named = {"type": "function", "function": {"name": "get_weather"}}
    [call] = ask(messages=question, tools=[TOOL], tool_choice=named).choices[0].message.tool_calls
    assert call.function.name == "get_weather", call
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome"), call
    if base:
        Weather.model_validate_json(
            ask(messages=question, response_format=Weather).choices[0].message.content
        )
    chunks = [chunk.choices[0].delta.content or "" for chunk in ask(messages=question, stream=True)]
    assert len(chunks) > 2, chunks
    assert "".join(chunks) == ask(messages=question).choices[0].message.content, chunks
