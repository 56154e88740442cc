"""/v1/responses by the real `openai` client over a core without a model; ByteTokenizer has the template."""

import asyncio
import json
import re

import openai
import pydantic
import pytest
import pytest_asyncio
from hypothesis import given

from octavo.config.server import ServerConfig
from octavo.frontend.parsers.events import CallStart, Reasoning, Text
from octavo.serving import foreign_fields
from octavo.serving.openai.answers import Usage, encode
from octavo.serving.openai.turn import TurnEnd, TurnStart
from octavo.serving.responses import record
from octavo.serving.responses.answers import Response
from octavo.serving.responses.background import Background
from octavo.serving.responses.response_answer import ResponseAnswer
from tests.serving import MAX_MODEL_LEN, served, transport_to
from tests.unit.serving.test_anthropic import EVENTS, events_of
from tests.unit.serving.test_completion_route import answer_to

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = "user: hi\nassistant:"
ASKED = {"model": "fake", "max_output_tokens": 6, "temperature": 0, "extra_body": {"seed": 0}}
MOVE = {
    "type": "function",
    "name": "move",
    "description": "Go.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"to": {"enum": ["left", "right"]}},
        "required": ["to"],
        "additionalProperties": False,
    },
}


def client_of(server):
    return openai.AsyncOpenAI(
        base_url="http://octavo/v1",
        api_key="none",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(
            transport=transport_to(server.app, openai.DefaultAsyncHttpxClient)
        ),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server():
    """Its template says nothing of tools, and nobody does in its place: so prompts are short."""
    async with served(front={"tool_prompt": "never"}) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(server):
    async with client_of(server) as client:
        yield client


async def refused(server, status=400, **body):
    answer = await server.client.post("/v1/responses", json={"input": "hi", **body})
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


async def test_a_response(client):
    response = await client.responses.create(input="hi", instructions=None, metadata={"a": "b"}, **ASKED)
    assert response.object == "response" and response.id.startswith("resp_")
    assert response.output_text == answer_to(PROMPT, 6)[0]
    [message] = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "incomplete")
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (len(PROMPT), 6, len(PROMPT) + 6)
    assert (response.temperature, response.max_output_tokens, response.metadata) == (0, 6, {"a": "b"})
    assert await client.responses.retrieve(response.id) == response


async def test_a_stream(client):
    whole = await client.responses.create(input="hi", **ASKED)
    async with client.responses.stream(input="hi", **ASKED) as stream:
        events = [event async for event in stream]
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert events[0].response.output == []
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    final = events[-1].response
    assert final.output_text == whole.output_text and final.usage == whole.usage
    assert await client.responses.retrieve(final.id) == final


async def test_numbers_on_the_wire(server):
    body = {"input": "hi", "max_output_tokens": 6, "stream": True}
    answer = await server.client.post("/v1/responses", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n") for block in answer.text.split("\n\n")[:-1]]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


async def test_fields_of_sampling(client):
    """As in chat: what ends the answer, what it is made of, and the form that it has."""
    text = (await client.responses.create(input="hi", **ASKED)).output_text
    extra = {"stop": text[3:5], "include_stop_str_in_output": True, "priority": 1, "min_p": 0.0}
    body = {**ASKED, "extra_body": {**ASKED["extra_body"], **extra}}
    stopped = await client.responses.create(input="hi", **body)
    assert (stopped.output_text, stopped.status) == (text[:5], "completed")
    form = {"structured_outputs": {"choice": ["yes", "no"]}, "repetition_penalty": 1.1}
    chosen = await client.responses.create(input="hi", **{**ASKED, "extra_body": form})
    assert chosen.output_text in ("yes", "no")


async def test_an_input_that_is_too_long_may_be_cut(client):
    response = await client.responses.create(input="x" * 900, truncation="auto", **ASKED)
    assert response.usage.input_tokens == MAX_MODEL_LEN - 6 and response.truncation == "auto"


async def test_tools_of_others_are_left_out(client, caplog):
    foreign_fields._noted.clear()
    plain = await prompt_length(client, input="hi", tools=[MOVE])
    tools = [MOVE, {"type": "web_search"}, {"type": "custom", "name": "shell"}]
    with caplog.at_level("WARNING"):
        assert await prompt_length(client, input="hi", tools=tools) == plain
        assert await prompt_length(client, input="hi", tools=tools) == plain
    assert sorted(re.findall("'(custom|web_search)'", caplog.text)) == ["custom", "web_search"]


async def prompt_length(client, **fields):
    return (await client.responses.create(**{**ASKED, **fields})).usage.input_tokens


async def test_items(client):
    items = [
        {"role": "developer", "content": "be kind"},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "call_1", "name": "move", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "ok"},
        {"role": "user", "content": "hi"},
    ]
    prompt = "system: be brief\n\nbe kind\nuser: ab\nassistant: c\ntool: ok\nuser: hi\nassistant:"
    response = await client.responses.create(input=items, instructions="be brief", **ASKED)
    assert response.usage.input_tokens == len(prompt)
    assert response.output_text == answer_to(prompt, 6)[0]


async def test_going_on(client):
    first = await client.responses.create(input="hi", instructions="be brief", **ASKED)
    second = await client.responses.create(input="and?", previous_response_id=first.id, **ASKED)
    prompt = f"user: hi\nassistant: {first.output_text}\nuser: and?\nassistant:"
    assert second.previous_response_id == first.id
    assert second.output_text == answer_to(prompt, 6)[0]
    await client.responses.delete(first.id)
    third = await client.responses.create(input="so?", previous_response_id=second.id, **ASKED)
    prompt = f"{prompt} {second.output_text}\nuser: so?\nassistant:"
    assert third.output_text == answer_to(prompt, 6)[0]
    with pytest.raises(openai.NotFoundError) as caught:
        await client.responses.create(input="so?", previous_response_id=first.id, **ASKED)
    assert caught.value.param == "previous_response_id"


async def test_what_is_kept(client):
    response = await client.responses.create(
        input=[{"role": "user", "content": str(n)} for n in range(3)], **ASKED
    )
    items = await client.responses.input_items.list(response.id, limit=2)
    assert [item.content for item in items.data] == ["2", "1"] and items.has_more
    rest = await client.responses.input_items.list(response.id, after=items.last_id)
    assert [item.content for item in rest.data] == ["0"]
    await client.responses.delete(response.id)
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            await ask(response.id)
    response = await client.responses.create(input="hi", store=False, **ASKED)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)


def num_searches(server, **labels):
    """Answers that were searched for calls."""
    name = "vllm:tool_call_parser_invocations"
    series = [metric for metric in server.engine.metrics.snapshot() if metric.name == name]
    return sum(metric.value for metric in series if labels.items() <= metric.labels.items())


async def test_a_function_that_must_be_called(server, client):
    before = num_searches(server)
    asked = {**ASKED, "max_output_tokens": 200, "input": "hi", "tools": [MOVE], "parallel_tool_calls": False}
    for choice in ("required", {"type": "function", "name": "move"}):
        response = await client.responses.create(**asked, tool_choice=choice)
        [call] = response.output
        assert (call.type, call.name, call.status) == ("function_call", "move", "completed")
        assert json.loads(call.arguments)["to"] in ("left", "right")
        assert response.status == "completed" and response.tools[0].name == "move"
        async with client.responses.stream(**asked, tool_choice=choice) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert json.loads(final.output[0].arguments) == json.loads(call.arguments)
        assert kinds[-3:] == [
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
        result = {"type": "function_call_output", "call_id": final.output[0].call_id, "output": "done"}
        length = await prompt_length(client, input=[result], previous_response_id=final.id)
        assert length == len("user: hi\nassistant: \ntool: done\nassistant:")
    assert num_searches(server) - before == 4
    assert num_searches(server, request_type="responses", mode="streaming", outcome="tool_call") >= 4


class Move(pydantic.BaseModel):
    to: bool


async def test_a_form_of_the_answer(client):
    asked = {**ASKED, "max_output_tokens": 100}
    response = await client.responses.parse(input="hi", text_format=Move, **asked)
    assert isinstance(response.output_parsed, Move) and response.text.format.type == "json_schema"
    async with client.responses.stream(input="hi", text_format=Move, **asked) as stream:
        final = await stream.get_final_response()
    assert final.output_parsed == response.output_parsed
    response = await client.responses.create(
        input="hi", text={"format": {"type": "json_object"}}, **{**asked, "max_output_tokens": 3}
    )
    assert response.output_text.lstrip()[:1] in ("", "{")


async def test_thoughts():
    async with served(front={"reasoning_parser": "deepseek_r1"}) as server, client_of(server) as client:
        response = await client.responses.create(input="hi", **ASKED)
        async with client.responses.stream(input="hi", **ASKED) as stream:
            events = [event async for event in stream]
    [item] = response.output
    assert item.type == "reasoning" and item.content[0].text == answer_to(PROMPT, 6)[0]
    assert response.usage.output_tokens_details.reasoning_tokens == 6
    told = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(told) == item.content[0].text
    assert events[-1].response.output[0].content == item.content


async def finished(client, response):
    async with asyncio.timeout(20):
        while response.status in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
            response = await client.responses.retrieve(response.id)
    return response


async def test_in_the_background(client):
    response = await client.responses.create(input="hi", background=True, **ASKED)
    assert response.status == "queued" and response.output == [] and response.background
    done = await finished(client, response)
    assert done.id == response.id and done.output_text == answer_to(PROMPT, 6)[0]
    assert (await client.responses.cancel(done.id)).status == "incomplete"  # too late
    other = await client.responses.create(input="hi", **ASKED)
    with pytest.raises(openai.BadRequestError):
        await client.responses.cancel(other.id)


async def test_cancelled_in_the_background(tmp_path):
    config = ServerConfig(store=str(tmp_path / "store"))
    asked = {**ASKED, "max_output_tokens": 200, "background": True}
    async with served(config, step_s=0.05) as server, client_of(server) as client:
        cancelled, deleted, left = [await client.responses.create(input="hi", **asked) for _ in range(3)]
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(input="hi", previous_response_id=left.id, **ASKED)
        while (await client.responses.retrieve(left.id)).status != "in_progress":
            await asyncio.sleep(0.01)
        assert (await client.responses.cancel(cancelled.id)).status == "cancelled"
        await client.responses.delete(deleted.id)
        assert (await client.responses.retrieve(cancelled.id)).status == "cancelled"
        async with asyncio.timeout(5):
            while server.engine.core.health().num_running > 1:
                await asyncio.sleep(0.01)
    async with served(config) as server, client_of(server) as client:
        await server.app.state.store.run(record.fail_left)
        failed = await client.responses.retrieve(left.id)
        assert failed.status == "failed" and "ended" in failed.error.message
        assert (await client.responses.retrieve(cancelled.id)).status == "cancelled"


async def test_cancelled_by_another_front():
    asked = {**ASKED, "max_output_tokens": 200, "background": True}
    async with served(step_s=0.05) as server, client_of(server) as client:
        for end in (client.responses.cancel, client.responses.delete):
            begun = await client.responses.create(input="hi", **asked)
            while (await client.responses.retrieve(begun.id)).status != "in_progress":
                await asyncio.sleep(0.01)
            server.app.state.background = Background()  # it is not this process that works on it
            await end(begun.id)
            async with asyncio.timeout(5):
                while server.engine.core.health().num_running:
                    await asyncio.sleep(0.01)
            if end == client.responses.cancel:
                assert (await client.responses.retrieve(begun.id)).status == "cancelled"


async def test_a_stream_that_goes_on_without_its_reader():
    async with served(step_s=0.01) as server, client_of(server) as client:
        stream = await client.responses.create(input="hi", background=True, stream=True, **ASKED)
        async with stream:
            begun = [await anext(aiter(stream)) for _ in range(3)]  # and then the connection is lost
        response_id = begun[0].response.id
        rest, again = [
            [event async for event in await client.responses.retrieve(response_id, stream=True, **options)]
            for options in ({"starting_after": begun[-1].sequence_number}, {})
        ]
        assert [event.sequence_number for event in [*begun, *rest]] == list(range(len(again)))
        assert [*begun, *rest] == again
        assert again[-1].type == "response.incomplete"
        assert again[-1].response == await client.responses.retrieve(response_id)
        assert again[-1].response.output_text == answer_to(PROMPT, 6)[0]
        plain = await client.responses.create(input="hi", **ASKED)
        for query in (f"{plain.id}?stream=true", f"{response_id}?stream=true&starting_after=x"):
            assert (await server.client.get(f"/v1/responses/{query}")).status_code == 400


async def all_events(client, asked):
    return [event async for event in await client.responses.create(input="hi", **asked)]


async def test_cancelled_and_deleted_while_it_is_streamed():
    asked = {**ASKED, "max_output_tokens": 200, "background": True, "stream": True}
    async with served(step_s=0.02) as server, client_of(server) as client, asyncio.timeout(10):
        for is_deleted in (False, True):
            reading = asyncio.create_task(all_events(client, asked))
            while not server.engine.core.health().num_running:
                await asyncio.sleep(0.01)
            [response_id] = server.app.state.background._tasks
            await (client.responses.delete if is_deleted else client.responses.cancel)(response_id)
            if is_deleted:
                with pytest.raises(openai.APIError, match="deleted"):
                    await reading
            else:
                last = (await reading)[-1]
                assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
            while server.engine.core.health().num_running:
                await asyncio.sleep(0.01)


async def test_logprobs(client):
    asked = {**ASKED, "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    whole = await client.responses.create(input="hi", **asked)
    [message] = whole.output
    entries = message.content[0].logprobs
    assert len(entries) == 6 and "".join(entry.token for entry in entries) == whole.output_text
    assert all(len(entry.top_logprobs) == 1 and entry.logprob <= 0 for entry in entries)
    assert whole.top_logprobs == 1
    stream = await client.responses.create(input="hi", stream=True, **asked)
    told = [event async for event in stream]
    deltas = [
        entry for event in told if event.type == "response.output_text.delta" for entry in event.logprobs
    ]
    [done] = [event for event in told if event.type == "response.output_text.done"]
    assert [e.token for e in deltas] == [e.token for e in done.logprobs] == [e.token for e in entries]
    assert told[-1].response.output[0].content[0].logprobs == entries
    assert (await client.responses.retrieve(whole.id)).output[0].content[0].logprobs == entries
    plain = await client.responses.create(input="hi", **ASKED)
    assert not plain.output[0].content[0].logprobs


async def test_an_error_in_a_stream():
    async with served(fault="8:exit", step_s=0.1) as server, client_of(server) as client:
        asked = {**ASKED, "max_output_tokens": 100}
        async with client.responses.stream(input="hi", **asked) as stream:
            events = [event async for event in stream]
        assert events[-1].type == "response.failed"
        assert events[-1].response.error.code == "server_error"
        assert events[-1].response.output[0].status == "incomplete"
        kept = await client.responses.retrieve(events[-1].response.id)
        assert kept.status == "failed" and kept.output_text == events[-1].response.output_text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "messages"),
        ({"input": [{"type": "function_call", "name": "a"}]}, "input"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"n": 2}, "n"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [MOVE, MOVE]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "response_format"),
        ({"text": {"format": {"type": "grammar"}}}, "text"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "a"}}, "prompt"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"background": True, "store": False}, "store"),
        ({"background": True, "tool_choice": "required"}, "tool_choice"),
        ({"temperature": 3}, "temperature"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"input": "x" * 300}, "prompt"),
    ],
)
async def test_requests_that_are_refused(server, fields, param):
    assert (await refused(server, **fields))["param"] == param
    if not fields.get("background"):
        assert (await refused(server, **fields, stream=True))["param"] == param


async def test_other_errors(server):
    assert (await refused(server, 404, model="other"))["param"] == "model"
    assert (await server.client.get("/v1/responses/resp_none?stream=true")).status_code == 404
    assert (await server.client.post("/v1/responses/resp_none/cancel")).status_code == 404


@given(EVENTS)
async def test_any_stream_makes_the_response(parts):
    """Put together from its events, the response is the one that is read in the end."""
    answer = ResponseAnswer(Response(id="resp_1", created_at=0, metadata={}, model="m", output=[]))
    turn = [TurnStart(Usage(3, 0, 3)), *events_of(parts, 2), TurnEnd("stop", None, Usage(3, 9, 12))]
    told = [json.loads(encode(event)) for part in turn for event in answer.take(part)]
    told.append(json.loads(encode(answer.told_end())))
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    items, texts = [], {}
    for event in told:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(items)
                items.append(event["item"])
            case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
                texts.setdefault(event["item_id"], []).append(event["delta"])
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == "".join(texts[event["item_id"]])
            case "output_item.done":
                assert items[event["output_index"]]["id"] == event["item"]["id"]
                items[event["output_index"]] = event["item"]
    assert told[-1]["type"] == "response.completed"
    assert told[-1]["response"]["output"] == items
    assert all(item["status"] == "completed" for item in items)
    shown = {"message": Text, "reasoning": Reasoning, "function_call": CallStart}
    expected = [type(part) if not isinstance(part, tuple) else CallStart for part in parts]
    merged = [kind for n, kind in enumerate(expected) if kind is CallStart or expected[n - 1 : n] != [kind]]
    assert [shown[item["type"]] for item in items] == merged


async def test_raw_messages_are_refused_only_when_they_are_wanted(client):
    for is_wanted in (False, True):
        more = {"extra_body": {**ASKED.get("extra_body", {}), "enable_response_messages": is_wanted}}
        if not is_wanted:
            await client.responses.create(input="hi", **(ASKED | more))
            continue
        with pytest.raises(openai.BadRequestError, match="raw messages are not told"):
            await client.responses.create(input="hi", **(ASKED | more))
