"""Tools and reasoning in chat answers: a text streamed in any pieces gives the same message as a whole."""

import json
import logging
from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace

import jsonschema
import msgspec
import pytest

from octavo.config.server import ServerConfig
from octavo.engine.structured.guidance import GuidanceBackend
from octavo.frontend.outputs.request_output import CompletionOutput, RequestOutput
from octavo.messages.sampling import SamplingParams
from octavo.serving import foreign_fields
from octavo.serving.openai.call_forms import CALL_FORMS
from octavo.serving.openai.chat_answer import ChatAnswer
from octavo.serving.openai.protocol import ChatRequest
from octavo.serving.openai.sampling import sampling_params
from octavo.serving.openai.tools import ToolUse
from octavo.serving.openai.turn import Turn
from tests.structured import BYTES
from tests.unit.engine.test_structured_guidance import admits
from tests.unit.frontend.parsers.test_parsers import CASES, THOUGHTS

POINT = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/point"}},
    "required": ["at"],
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "move", "description": "Go.", "parameters": POINT}},
    {"type": "function", "function": {"name": "stop"}},
]


def body_of(**fields) -> ChatRequest:
    fields = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, **fields}
    return msgspec.convert(fields, ChatRequest)


def renderer_of(tool_parser: str, reasoning_parser: str = "", level: str = "auto") -> SimpleNamespace:
    return SimpleNamespace(
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        tool_strict_level=level,
        special_tokens={},
    )


def answer_to(
    body: ChatRequest, *, tool_parser: str = "", reasoning_parser: str = "", tokenizer: object = None
) -> ChatAnswer:
    renderer = renderer_of(tool_parser, reasoning_parser)
    caller = SimpleNamespace(config=ServerConfig(), engine=SimpleNamespace(tokenizer=tokenizer))
    use = ToolUse.of(body)
    params = use.constrained(sampling_params(body, {}), renderer)
    reader = partial(use.parser, renderer=renderer, params=params)
    return ChatAnswer(Turn(caller, body, reader), [body.messages], "id", "model")


def output_of(text: str, reason: str | None, prompt: str = "") -> RequestOutput:
    completion = CompletionOutput(0, text, [1], finish_reason=reason)
    return RequestOutput("id", prompt, [1], None, [completion], reason is not None)


def whole(answer: ChatAnswer, text: str, reason: str = "stop", prompt: str = "") -> dict:
    [choice] = msgspec.to_builtins(answer.whole([output_of(text, reason, prompt)]))["choices"]
    return choice


def streamed(answer: ChatAnswer, pieces: Iterable[str], reason: str = "stop", prompt: str = "") -> dict:
    """The choice that a client puts together from chunks."""
    message: dict = {"content": None, "tool_calls": []}
    outputs = [output_of(piece, None, prompt) for piece in pieces] + [output_of("", reason, prompt)]
    for output in outputs:
        for chunk in msgspec.to_builtins(list(answer.chunks(0, output))):
            [choice] = chunk["choices"]
            delta = choice["delta"]
            for name in ("role", "content", "reasoning", "reasoning_content"):
                if name in delta:
                    message[name] = (message.get(name) or "") + delta[name]
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"]) and call["type"] == "function"
                    message["tool_calls"].append({"id": call["id"], "function": {**call["function"]}})
                else:
                    message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"][
                        "arguments"
                    ]
    return {"message": message, "finish_reason": choice["finish_reason"]}


def plain(choice: dict) -> dict:
    """What matters of a choice, without the calls' random names."""
    message = choice["message"]
    calls = message.get("tool_calls") or []
    assert len({call["id"] for call in calls}) == len(calls)
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning"),
        "calls": [(call["function"]["name"], call["function"]["arguments"]) for call in calls],
        "reason": choice["finish_reason"],
    }


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_a_stream_says_what_the_whole_says(name, text, content, calls, reason):
    body = body_of()
    expected = plain(whole(answer_to(body, tool_parser=name), text, reason))
    assert expected["content"] == content
    assert [(name, json.loads(arguments)) for name, arguments in expected["calls"]] == calls
    assert expected["reason"] == ("tool_calls" if calls and reason == "stop" else reason)
    for size in (1, 3, 7, len(text)):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert plain(streamed(answer_to(body, tool_parser=name), pieces, reason)) == expected


@pytest.mark.parametrize(("name", "is_open", "text", "thought", "content"), THOUGHTS)
def test_reasoning_is_told_apart(name, is_open, text, thought, content):
    prompt = "user: hi\n<think>\n" if is_open else "user: hi\n"
    body = body_of(tools=None)
    for include in (True, False):
        body = body_of(tools=None, include_reasoning=include)
        make = partial(answer_to, body, reasoning_parser=name)
        choice = whole(make(), text, prompt=prompt)
        assert choice["message"]["content"] == content
        assert choice["message"]["reasoning"] == ((include and thought) or None)
        assert plain(streamed(make(), text, prompt=prompt)) == plain(choice)


def test_without_parsers_text_is_text():
    answer = answer_to(body_of(tool_choice="none"), tool_parser="hermes")
    assert whole(answer, '<tool_call>{"name": "stop"}')["message"]["content"] == '<tool_call>{"name": "stop"}'


def test_forced_calls_are_held_to_their_schemas():
    use = ToolUse.of(body_of(tool_choice="required", parallel_tool_calls=False))
    renderer = renderer_of("")
    schema = use.constrained(SamplingParams(), renderer).structured_outputs.json
    good = [{"name": "move", "parameters": {"at": {"x": 1}}}]
    jsonschema.validate(good, schema)
    jsonschema.validate([{"name": "stop", "parameters": {}}], schema)
    for bad in (
        [],
        good * 2,
        [{"name": "move", "parameters": {"at": {}}}],
        [{"name": "fly", "parameters": {}}],
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)
    choice = plain(whole(answer_to(body_of(tool_choice="required")), json.dumps(good)))
    assert choice["calls"] == [("move", '{"at": {"x": 1}}')] and choice["reason"] == "tool_calls"


def test_forced_calls_have_no_arguments_but_the_named_ones():
    """Whatever the tool's schema says of others by saying nothing; a tool without a schema has none."""
    renderer = renderer_of("")
    for name in ("move", "stop"):
        body = body_of(tool_choice={"type": "function", "function": {"name": name}})
        form = ToolUse.of(body).constrained(SamplingParams(), renderer).structured_outputs
        assert form.disable_additional_properties and "properties" in form.json
    body = body_of(tool_choice="required")
    form = ToolUse.of(body).constrained(SamplingParams(), renderer).structured_outputs
    assert form.disable_additional_properties
    assert form.json["items"]["anyOf"][1]["properties"]["parameters"]["properties"] == {}


class Letters:
    """A tokenizer of characters; the mark of code 1 is special, and shown nowhere."""

    special_ids = frozenset({1})

    def token_text(self, token_id):
        return chr(token_id)

    def token_bytes(self, token_id):
        return chr(token_id).encode()


@pytest.mark.parametrize("size", [1, 5, 100])
def test_tokens_of_reasoning(size):
    """All up to the last one of the thought; about so many where a piece has the end and what follows."""
    body, text = body_of(tools=None, n=2), "\x01<think>\nHm, é.\n</think>\n\nHm, é."
    answer = answer_to(body, reasoning_parser="qwen3", tokenizer=Letters())
    for number in range(2):
        for start in range(0, len(text), size):
            piece = text[start : start + size]
            reason = "stop" if start + size >= len(text) else None
            ids = [ord(letter) for letter in piece]
            told = CompletionOutput(number, piece.removeprefix("\x01"), ids, finish_reason=reason)
            list(answer.chunks(0, RequestOutput("id", "", [1], None, [told], reason is not None)))
    expected = 2 * len("\x01<think>\nHm, é.\n")
    counted = answer.end_chunk({}).usage.completion_tokens_details.reasoning_tokens
    assert abs(counted - expected) <= (2 * size if size == 5 else 0)


STRICT = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}, TOOLS[1]]


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({}, [0, 1, 2, 3, 6], [4, 5, 7]),
        ({"parallel_tool_calls": False}, [0, 2], [3, 4, 5, 7]),
        ({"tools": TOOLS}, None, None),
        ({"tool_choice": "none"}, None, None),
    ],
)
def test_calls_of_strict_tools_have_their_schema_where_the_model_may_call(fields, good, bad):
    calls = [
        "Just text, <tool and {.",
        "Text.\n" + hermes("stop", '{"any": 1}'),
        hermes("move", POINT_AT),
        hermes("move", POINT_AT) + "\n" + hermes("stop", "{}"),
        hermes("move", '{"at": {"x": "1"}}'),
        hermes("move", '{"at": {"x": 1}, "more": 2}'),
        hermes("stop", "{}") + "and more",
        hermes("other", "{}"),
    ]
    body = body_of(**{"tools": STRICT} | fields)
    renderer = renderer_of("hermes")
    form = ToolUse.of(body).constrained(SamplingParams(), renderer).structured_outputs
    assert (form is None) == (good is None)
    if form is not None:
        backend = GuidanceBackend(BYTES)
        matcher = backend.compile(backend.translate(form))
        admitted = [index for index, text in enumerate(calls) if admits(backend, matcher, text)]
        assert set(good) <= set(admitted) and not set(bad) & set(admitted), admitted
        choice = plain(streamed(answer_to(body, tool_parser="hermes"), [calls[2]]))
        assert choice["calls"] == [("move", POINT_AT)]
    own = {"structured_outputs": {"regex": "a"}}
    assert ToolUse.of(body).constrained(SamplingParams(**own), renderer).structured_outputs.regex == "a"


def test_the_operators_level_holds_calls_of_any_tool():
    for level, is_held in (("auto", False), ("function", True), ("parameter", True)):
        params = ToolUse.of(body_of()).constrained(SamplingParams(), renderer_of("hermes", level=level))
        assert (params.structured_outputs is not None) == is_held
        if is_held:
            matcher = GuidanceBackend(BYTES).compile(GuidanceBackend.translate(params.structured_outputs))
            wrong = admits(GuidanceBackend(BYTES), matcher, hermes("move", '{"at": 1}'))
            assert wrong == (level == "function")


def test_calls_among_thoughts_are_held_from_the_beginning():
    params = ToolUse.of(body_of(tools=STRICT)).constrained(
        SamplingParams(), renderer_of("openai", "openai_gptoss")
    )
    assert params.structured_outputs.after_reasoning is False and not params.skip_special_tokens
    params = ToolUse.of(body_of(tools=STRICT)).constrained(SamplingParams(), renderer_of("hermes", "qwen3"))
    assert params.structured_outputs.after_reasoning is True


def test_a_format_whose_calls_cannot_be_held_is_told_once(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    monkeypatch.setattr(foreign_fields, "_noted", set())
    monkeypatch.delitem(CALL_FORMS, "kimi_k3")
    renderer = renderer_of("kimi_k3")
    for _ in range(2):
        use = ToolUse.of(body_of(tools=STRICT))
        assert use.constrained(SamplingParams(), renderer).structured_outputs is None
    assert caplog.text.count("'strict'") == 1


def hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_a_named_tool():
    choice = {"type": "function", "function": {"name": "move"}}
    use = ToolUse.of(body_of(tool_choice=choice))
    assert [tool["function"]["name"] for tool in use.described()] == ["move"]
    answer = answer_to(body_of(tool_choice=choice))
    assert plain(streamed(answer, ['{"at": ', '{"x": 1}}']))["calls"] == [("move", '{"at": {"x": 1}}')]


THOUGHT, POINT_AT = "<think>\nHm, {.\n</think>", '{"at": {"x": 1}}'


@pytest.mark.parametrize(
    ("fields", "text", "calls"),
    [
        ({"tools": None, "response_format": {"type": "json_object"}}, POINT_AT, []),
        (
            {"tool_choice": "required"},
            f'[{{"name": "move", "parameters": {POINT_AT}}}]',
            [("move", POINT_AT)],
        ),
        ({"tool_choice": {"type": "function", "function": {"name": "move"}}}, POINT_AT, [("move", POINT_AT)]),
    ],
)
def test_reasoning_before_a_form(fields, text, calls):
    body = body_of(**fields)
    for thought in (THOUGHT, ""):
        make = partial(answer_to, body, reasoning_parser="qwen3", tool_parser="hermes")
        choice = plain(whole(make(), thought + text))
        assert choice["reasoning"] == ("\nHm, {.\n" if thought else None)
        assert (choice["content"], choice["calls"]) == ("" if calls else text, calls)
        assert plain(streamed(make(), thought + text)) == choice
    cut = plain(whole(make(), THOUGHT[:12], "length"))
    assert (cut["reasoning"], cut["calls"], cut["reason"]) == ("\nHm, ", [], "length")


def test_a_form_waits_for_the_end_of_reasoning_where_there_is_any():
    form, use = {"json_object": True}, ToolUse.of(body_of(tools=None))
    for parser, asked, waits in (("qwen3", None, True), ("qwen3", False, False), ("", True, False)):
        renderer = renderer_of("", parser)
        params = SamplingParams(structured_outputs={**form, "after_reasoning": asked})
        assert use.constrained(params, renderer).structured_outputs.after_reasoning is waits
