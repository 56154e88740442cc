"""instructor: a schema as a tool, a strict tool, a form of answer; a stream. Argument: the server's URL."""

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")  # JSON_SCHEMA is not strict: an open schema stays open

    city: Literal["Paris", "Rome"]
    sunny: bool


QUESTION = [{"role": "user", "content": "The weather in Rome?"}]
ASKED = {"model": "smollm2", "messages": QUESTION, "temperature": 0, "max_tokens": 64}
for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none"), mode=mode)
    found = client.chat.completions.create(response_model=Weather, max_retries=0, **ASKED)
    assert isinstance(found, Weather), (mode, found)
    *_, last = client.chat.completions.create_partial(response_model=Weather, **ASKED)
    assert last.city in ("Paris", "Rome") and isinstance(last.sunny, bool), (mode, last)
