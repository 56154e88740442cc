"""/v1/messages by the real `anthropic` client over a core without a model; ByteTokenizer has the template."""

import json
from itertools import chain

import anthropic
import pydantic
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from octavo.config.server import ServerConfig
from octavo.frontend.parsers.events import CallArguments, CallStart, Reasoning, Text
from octavo.serving.anthropic.message_answer import MessageAnswer
from octavo.serving.openai.answers import Usage, encode
from octavo.serving.openai.turn import TurnEnd, TurnStart
from tests.serving import served, transport_to
from tests.unit.serving.test_completion_route import answer_to

pytestmark = pytest.mark.asyncio(loop_scope="module")
USER = {"role": "user", "content": "hi"}
PROMPT = "user: hi\nassistant:"
RAW = {"model": "fake", "max_tokens": 6, "temperature": 0, "seed": 0}
ASKED = {"model": "fake", "max_tokens": 6, "extra_body": {"temperature": 0, "seed": 0}}
"""The same for the client, of whose arguments some versions have no temperature."""
TEXT = {"type": "text", "text": "ok"}
SCHEMA = {
    "type": "object",
    "properties": {"to": {"enum": ["left", "right"]}},
    "required": ["to"],
    "additionalProperties": False,
}
TOOLS = [
    {"name": "move", "description": "Go.", "input_schema": SCHEMA},
    {"name": "stop", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}},
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server():
    """Its template says nothing of tools, and nobody does in its place: so prompts are short."""
    async with served(front={"tool_prompt": "never"}) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(server):
    transport = transport_to(server.app, anthropic.DefaultAsyncHttpxClient)
    async with anthropic.AsyncAnthropic(
        base_url="http://octavo",
        api_key="none",
        max_retries=0,
        http_client=anthropic.DefaultAsyncHttpxClient(transport=transport),
    ) as client:
        yield client


async def post(server, body, status=400, path=""):
    answer = await server.client.post("/v1/messages" + path, json={"messages": [USER], **body})
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_a_message(client):
    message = await client.messages.create(messages=[USER], **ASKED)
    assert message.type == "message" and message.role == "assistant" and message.id.startswith("msg_")
    [block] = message.content
    assert block.type == "text" and block.text == answer_to(PROMPT, 6)[0]
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (len(PROMPT), 6)
    assert message.model == "fake"


async def test_the_stream_is_the_message(client):
    whole = await client.messages.create(messages=[USER], **ASKED)
    async with client.messages.stream(messages=[USER], **ASKED) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_message()
    assert final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and "content_block_stop" in kinds


async def test_events_on_the_wire(server):
    body = {"messages": [USER], **RAW, "stream": True}
    answer = await server.client.post("/v1/messages", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n") for block in answer.text.split("\n\n")[:-1]]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [event["type"] for event in events]
    kinds = list(dict.fromkeys(event["type"] for event in events))
    assert kinds == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["content"] == [] and events[0]["message"]["usage"]["input_tokens"] == 19
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}


async def count(client, **fields):
    """The prompt is as long as it says, and the model's answer is its."""
    return (await client.messages.count_tokens(model="fake", **fields)).input_tokens


async def test_conversations(client):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "c"}]},
        USER,
    ]
    system = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
    prompt = "system: be brief\nuser: a\nb\nassistant: c\nuser: hi\nassistant:"
    message = await client.messages.create(messages=messages, system=system, **ASKED)
    assert message.content[0].text == answer_to(prompt, 6)[0]
    assert message.usage.input_tokens == len(prompt)
    assert await count(client, messages=messages, system="be brief") == len(prompt)


async def test_an_answer_that_has_been_begun(client):
    messages = [USER, {"role": "assistant", "content": "It is"}]
    message = await client.messages.create(messages=messages, **ASKED)
    assert message.content[0].text == answer_to("user: hi\nassistant: It is", 6)[0]


async def test_results_of_tools(client):
    turns = [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "So:"},
                {"type": "tool_use", "id": "toolu_1", "name": "move", "input": {"to": "left"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "ok"}],
                },
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    prompt = "user: hi\nassistant: So:\ntool: ok\nuser: and?\nassistant:"
    assert await count(client, messages=turns, tools=TOOLS) == len(prompt)
    message = await client.messages.create(messages=turns, tools=TOOLS, **ASKED)
    assert message.usage.input_tokens == len(prompt)


async def test_stop_sequences(client):
    text, _ = answer_to(PROMPT, 40)
    word = text[10:13]
    assert word not in text[:10]
    message = await client.messages.create(
        messages=[USER], **{**ASKED, "max_tokens": 40}, stop_sequences=["never", word]
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", word)
    assert message.content[0].text == text[: text.index(word)]


async def test_a_request_may_do_without_drafts(server):
    for allowed in (False, {"num_tokens": 2}):
        answer = await post(server, RAW | {"speculative": allowed}, 200)
        assert answer["content"] == (await post(server, RAW, 200))["content"]


async def test_thoughts_of_a_model_that_thinks(client, server):
    asked = {**ASKED, "messages": [USER], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    message = await client.messages.create(**asked)  # this one does not
    assert [block.type for block in message.content] == ["text"]
    async with served(front={"reasoning_parser": "deepseek_r1"}) as thinking:
        body = {**RAW, "messages": [USER]}
        shown = await post(thinking, {**body, "thinking": {"type": "enabled"}}, 200)
        hidden = await post(thinking, body, 200)
    assert [block["type"] for block in shown["content"]] == ["thinking"]
    assert shown["content"][0]["thinking"] == answer_to(PROMPT, 6)[0]
    assert hidden["content"] == [] and hidden["usage"]["output_tokens"] == 6


@pytest.mark.parametrize(
    ("choice", "names"),
    [({"type": "any"}, {"move", "stop"}), ({"type": "tool", "name": "move"}, {"move"})],
)
async def test_a_tool_that_must_be_called(client, choice, names):
    asked = {**ASKED, "max_tokens": 200, "messages": [USER], "tools": TOOLS}
    choice = {**choice, "disable_parallel_tool_use": True}
    message = await client.messages.create(**asked, tool_choice=choice)
    assert message.stop_reason == "tool_use"
    [call] = message.content
    assert call.type == "tool_use" and call.id.startswith("toolu_") and call.name in names
    assert call.input.get("to") in ("left", "right") if call.name == "move" else call.input == {}
    async with client.messages.stream(**asked, tool_choice=choice) as stream:
        final = await stream.get_final_message()
    assert [(b.name, b.input) for b in final.content] == [(call.name, call.input)]
    assert final.stop_reason == "tool_use"


async def test_a_form_of_the_answer(client):
    class Move(pydantic.BaseModel):
        to: bool

    message = await client.messages.parse(messages=[USER], **{**ASKED, "max_tokens": 100}, output_format=Move)
    assert isinstance(message.parsed_output, Move)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"temperature": "warm"}, "temperature"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"container": "x"}, "container"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "needs tools"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "needs a source"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document's text"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "needs text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
            "tool_use_id",
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]}, "name"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "robot"),
        ({"system": [{"type": "image"}]}, "turns of the user"),
        ({"speculative": {"num_tokens": 129}}, "with N from 0 to 128"),
    ],
)
async def test_requests_that_are_refused(server, fields, text):
    body = {"model": "fake", "max_tokens": 5, **fields}
    for stream in (False, True):
        answer = await post(server, {**body, "stream": stream})
        assert answer["type"] == "error" and answer["error"]["type"] == "invalid_request_error"
        assert text in answer["error"]["message"]


async def test_other_errors(client, server):
    with pytest.raises(anthropic.NotFoundError) as caught:
        await client.messages.create(messages=[USER], **{**ASKED, "model": "other"})
    assert caught.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError):
        await client.messages.create(messages=[{"role": "user", "content": "x" * 300}], **ASKED)
    answer = await server.client.post("/v1/messages", content=b"{}", headers={"Content-Type": "text/plain"})
    assert answer.status_code == 415 and answer.json()["type"] == "error"


async def test_an_error_in_a_stream():
    async with served(fault="8:exit", step_s=0.1) as server:
        body = {"messages": [USER], **RAW, "max_tokens": 100, "stream": True}
        answer = await server.client.post("/v1/messages", json=body)
    name, data = answer.text.split("\n\n")[-2].split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "overloaded_error"
    assert "message_stop" not in answer.text


EVENTS = st.lists(
    st.one_of(
        st.builds(Text, st.text(min_size=1, max_size=5)),
        st.builds(Reasoning, st.text(min_size=1, max_size=5)),
        st.sampled_from([("move", '{"to": "left"}'), ("stop", "{}"), ("cut", '{"to": "le')]),
    ),
    max_size=8,
)


def events_of(parts, split):
    """Events of a turn; texts in pieces of `split` characters."""
    index = 0
    for part in parts:
        if isinstance(part, tuple):
            name, arguments = part
            yield CallStart(index, name)
            yield from (CallArguments(index, piece) for piece in pieces(arguments, split))
            index += 1
        else:
            yield from (type(part)(piece) for piece in pieces(part.text, split))


def pieces(text, size):
    return [text[i : i + size] for i in range(0, len(text), size)]


@given(EVENTS, st.integers(1, 6))
async def test_any_stream_makes_the_message(parts, split):
    """Put together as Anthropic's own client does it, the events are the message."""
    answer = MessageAnswer("msg_1", "model")
    turn = [TurnStart(Usage(3, 0, 3)), *events_of(parts, split), TurnEnd("stop", None, Usage(3, 9, 12))]
    wire = [json.loads(encode(told)) for told in chain.from_iterable(map(answer.take, turn))]
    blocks, open_index = [], None
    for event in wire:
        match event["type"]:
            case "content_block_start":
                assert open_index is None and event["index"] == len(blocks)
                blocks.append({**event["content_block"], "json": ""})
                open_index = event["index"]
            case "content_block_delta":
                assert event["index"] == open_index
                delta = event["delta"]
                for key, value in delta.items():
                    if key != "type":
                        blocks[open_index]["json" if key == "partial_json" else key] += value
            case "content_block_stop":
                assert event["index"] == open_index
                open_index = None
    assert open_index is None
    whole = json.loads(encode(answer.message))["content"]
    for block, expected in zip(blocks, whole, strict=True):
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text) if text.endswith("}") else {}
        assert block == expected
    said = "".join(part.text for part in parts if isinstance(part, Text))
    assert "".join(block["text"] for block in whole if block["type"] == "text") == said


async def test_counts_of_the_cache():
    """As Anthropic's own: read, left there, and the others; together they are the prompt."""
    async with served(ServerConfig(enable_prompt_tokens_details=True)) as server:
        found = [(await post(server, RAW, 200))["usage"] for _ in range(2)]
        names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        assert [tuple(usage[name] for name in names) for usage in found] == [(3, 16, 0), (3, 0, 16)]
        answer = await server.client.post("/v1/messages", json={"messages": [USER], **RAW, "stream": True})
        start = json.loads(answer.text.split("data: ", 1)[1].split("\n", 1)[0])
        assert start["message"]["usage"] == {**found[1], "output_tokens": 0}
