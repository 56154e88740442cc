"""Ollama's own client: lists, a chat whole and streamed, a tool, a schema, plain text. Argument: the URL."""

import json
import sys

import ollama

MODEL = "smollm2"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
OPTIONS = {"temperature": 0, "num_predict": 16, "num_ctx": 2048, "seed": 1}
client = ollama.Client(host=sys.argv[1])
assert MODEL in [tag.model for tag in client.list().models]
assert [tag.model for tag in client.ps().models] == [MODEL]
assert "completion" in client.show(MODEL).capabilities

whole = client.chat(MODEL + ":latest", QUESTION, options=OPTIONS, keep_alive="5m")
assert whole.done and "Paris" in whole.message.content, whole
assert whole.done_reason == "stop" and whole.eval_count and whole.prompt_eval_count, whole
*pieces, last = client.chat(MODEL, QUESTION, options=OPTIONS, stream=True)
assert "".join(piece.message.content for piece in pieces) == whole.message.content
assert last.done and last.eval_count == whole.eval_count and len(pieces) > 3

formed = client.chat(MODEL, QUESTION, format=SCHEMA, options=OPTIONS)
assert json.loads(formed.message.content) == {"city": "Paris"}
assert client.generate(MODEL, "A city as JSON.", format="json", options=OPTIONS).response.startswith("{")
asked = [{"role": "user", "content": "The weather in Rome?"}]
told = client.chat(MODEL, asked, tools=[TOOL], options=OPTIONS)
assert told.message.content or told.message.tool_calls

text = client.generate(MODEL, QUESTION[0]["content"], options=OPTIONS)
assert text.response == whole.message.content, text
raw = client.generate(MODEL, "1 2 3 4", raw=True, options=OPTIONS, stream=True)
assert "5" in "".join(piece.response for piece in raw)
assert client.generate(MODEL).done_reason == "load"
for ask in (
    lambda: client.chat("nowhere", QUESTION),
    lambda: client.generate(MODEL, "What is this?", images=[b"\x89PNG"]),
    lambda: client.embed(MODEL, "a text"),
):
    try:
        ask()
    except ollama.ResponseError as error:
        assert error.error and not error.error.startswith("{"), error.error
    else:
        raise AssertionError("an error was expected")
