"""openai-agents: a forced tool that is run, a typed answer, a stream; by chat and by responses.

Argument: the server's address.
"""

import asyncio
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    sunny: bool


called = []


@function_tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Tell the weather of a city."""
    called.append(city)
    return "Sun."


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
    for model in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        given = {
            "name": "Weather",
            "instructions": "Answer briefly.",
            "model": model(model="smollm2", openai_client=client),
        }
        settings = ModelSettings(temperature=0, max_tokens=48)
        forced = ModelSettings(temperature=0, max_tokens=48, tool_choice="get_weather")
        caller = Agent(**given, tools=[get_weather], model_settings=forced)
        ended = await Runner.run(caller, "The weather in Rome?")
        assert called.pop() in ("Paris", "Rome") and isinstance(ended.final_output, str)
        typed = Agent(**given, output_type=Weather, model_settings=settings)
        assert isinstance((await Runner.run(typed, "The weather in Rome?")).final_output, Weather)
        plain = Agent(**given, model_settings=settings)
        stream = Runner.run_streamed(plain, "Name two colours.")
        kinds = [event.type async for event in stream.stream_events()]
        assert kinds.count("raw_response_event") > 3
        assert stream.final_output == (await Runner.run(plain, "Name two colours.")).final_output


asyncio.run(main())
