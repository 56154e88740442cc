"""langchain-openai: a forced tool, a schema by both methods, a stream. Argument: the server's address."""

import sys
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    sunny: bool


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Tell the weather of a city."""
    return f"Sun in {city}"


llm = ChatOpenAI(
    base_url=f"{sys.argv[1]}/v1", api_key="none", model="smollm2", temperature=0, max_completion_tokens=64
)
[call] = llm.bind_tools([get_weather], tool_choice="get_weather").invoke("The weather in Rome?").tool_calls
assert get_weather.invoke(call["args"]).startswith("Sun in "), call
for method in ("json_schema", "function_calling"):
    found = llm.with_structured_output(Weather, method=method).invoke("The weather in Rome?")
    assert isinstance(found, Weather), (method, found)
pieces = [chunk.content for chunk in llm.stream("Name two colours.")]
assert len(pieces) > 2 and "".join(pieces) == llm.invoke("Name two colours.").content, pieces
