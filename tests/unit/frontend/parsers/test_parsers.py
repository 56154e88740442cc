"""Golden transcripts of every format, equal at every split of the stream; malformed text stays text."""

import json
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.frontend.parsers.answer import AnswerParser
from octavo.frontend.parsers.call_object import NamedCallParser, RequiredCallsParser
from octavo.frontend.parsers.events import CallArguments, CallStart, Event, Reasoning, Text, coalesced
from octavo.frontend.parsers.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    suggested_reasoning_parser,
    suggested_tool_parser,
)
from tests.transcripts import (
    ARGS,
    BROKEN,
    CALL,
    CASES,
    CODER,
    DS,
    G4,
    G4_CALL,
    GLM,
    GOOD,
    INVOKE,
    K2_CALL,
    KIMI,
    NOW,
    PARIS,
    SECTION,
    THOUGHTS,
    V3,
    WANT,
)


def run(parser, pieces) -> list[Event]:
    events = [event for piece in pieces for event in parser.feed(piece)]
    return coalesced(events + parser.finish())


def calls_of(events: list[Event]) -> list[tuple[str, object]]:
    names = {event.index: event.name for event in events if isinstance(event, CallStart)}
    texts = dict.fromkeys(names, "")
    for event in events:
        if isinstance(event, CallArguments):
            texts[event.index] += event.text
    return [(names[index], json.loads(texts[index])) for index in sorted(names)]


def joined(events: list[Event], kind: type) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_golden_transcripts(name, text, content, calls):
    events = run(TOOL_PARSERS.load(name)(), [text])
    assert joined(events, Text) == content
    assert calls_of(events) == calls


@pytest.mark.parametrize(("name", "text"), BROKEN)
def test_what_is_malformed_stays_text(name, text):
    assert run(TOOL_PARSERS.load(name)(), [text]) == [Text(text)]


@pytest.mark.parametrize(("name", "is_open", "text", "thought", "content"), THOUGHTS)
def test_reasoning(name, is_open, text, thought, content):
    kind = REASONING_PARSERS.load(name)
    for pieces in ([text], list(text)):
        events = run(kind("<think>\n") if is_open else kind(), pieces)
        assert (joined(events, Reasoning), joined(events, Text)) == (thought, content)


@pytest.mark.parametrize(("name", "text"), [case[:2] for case in CASES] + BROKEN)
def test_every_split_in_two_and_single_characters(name, text):
    kind = TOOL_PARSERS.load(name)
    whole = run(kind(), [text])
    assert run(kind(), list(text)) == whole
    for at in range(len(text) + 1):
        assert run(kind(), [text[:at], text[at:]]) == whole


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(TOOL_PARSERS.names()),
    parts=st.lists(
        st.sampled_from(
            [t for _, t, *_ in CASES] + [t for _, t in BROKEN] + ["{", "[", '"', "\\", "<tool_call>", " "]
        ),
        max_size=4,
    ),
    cut=st.integers(0, 400),
    seed=st.randoms(use_true_random=False),
)
def test_any_text_at_any_split(name, parts, cut, seed):
    text = "".join(parts)[: cut or None]
    kind = TOOL_PARSERS.load(name)
    ends = sorted({seed.randint(0, len(text)) for _ in range(8)} | {0, len(text)})
    pieces = [text[a:b] for a, b in pairwise(ends)]
    events = run(kind(), pieces)
    assert events == run(kind(), [text])
    assert all(isinstance(arguments, dict) for _, arguments in calls_of(events))


@pytest.mark.parametrize(
    ("reasoning", "tools", "call"),
    [
        ("qwen3", "hermes", GOOD),
        ("qwen3", "qwen3_coder", f"<tool_call>\n{CODER}\n</tool_call>"),
        ("glm45", "glm45", GLM),
        ("kimi_k2", "kimi_k2", SECTION.format(K2_CALL.format("get_weather", ARGS))),
        (
            "deepseek_r1",
            "deepseek_v3",
            DS.format(V3.format("get_weather", ARGS), "").partition("\n<｜tool▁call")[0],
        ),
        ("minimax_m2", "minimax_m2", f"<minimax:tool_call>{INVOKE}</minimax:tool_call>"),
        ("gemma4", "gemma4", G4_CALL.format("get_weather", G4)),
    ],
)
def test_a_call_ends_the_reasoning(reasoning, tools, call):
    kinds = dict.fromkeys([REASONING_PARSERS.load(reasoning), TOOL_PARSERS.load(tools)])
    opening, closing = (
        ("<|channel>thought\n", "<channel|>") if reasoning == "gemma4" else ("<think>", "</think>")
    )
    text = f"{opening}I must look.{call}{closing}"
    for pieces in ([text], list(text)):
        events = run(AnswerParser([kind() for kind in kinds]), pieces)
        assert joined(events, Reasoning) == "I must look."
        assert (joined(events, Text), calls_of(events)) == ("", [WANT])


def test_tags_that_the_prompt_has_opened():
    for name, tag in (("k2_horizon", "ifm|think_fast"), ("hy_v3", "think:6c"), ("solar_open2", None)):
        opening, closing = (f"<{tag}>", f"</{tag}>") if tag else ("<|think:start|>", "<|think:end|>")
        events = run(REASONING_PARSERS.load(name)(f"…{opening}\n"), list(f"Hm.{closing}Yes."))
        assert (joined(events, Reasoning), joined(events, Text)) == ("Hm.", "Yes.")


def test_values_of_nested_elements_follow_the_schema():
    schema = {
        "properties": {"ids": {"type": "array", "items": {"type": "string"}}, "none": {"type": "object"}}
    }
    text = '<tool_call><invoke name="f"><ids><item>1</item></ids><none></none><x>1</x><x>2</x></invoke>'
    events = run(TOOL_PARSERS.load("minimax_m3")({"f": schema}), list(text.replace("<", "]<]minimax[>[<")))
    assert calls_of(events) == [("f", {"ids": ["1"], "none": {}, "x": [1, 2]})]


def test_arguments_stream():
    parser = TOOL_PARSERS.load("hermes")()
    events = parser.feed('<tool_call>{"name": "f", "arguments": {"text": "Once upon')
    assert events == [CallStart(0, "f"), CallArguments(0, '{"text": "Once upon')]


VLLM_TOOL_PARSERS = """
apertus cohere_command3 cohere_command4 deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4
deepseek_v41 dots ernie45 functiongemma gemma4 gigachat3 glm45 glm47 granite granite4 granite-20b-fc
hermes hunyuan_a13b hy_v3 hy_v4 inkling internlm jamba k2_horizon kimi_k2 kimi_k3 lfm2 ling3
llama3_json llama4_json llama4_pythonic longcat mimo minicpm5 minimax_m2 minimax_m3 mistral
muse_glimmer olmo3 openai phi4_mini_json plamo3 poolside_v1 pythonic qwen3_coder qwen3_json
qwen3_xml seed_oss solar_open2 step3 step3p5 xlam
"""
VLLM_REASONING_PARSERS = """
cohere_command3 cohere_command4 deepseek_r1 deepseek_v3 deepseek_v4 deepseek_v41 ernie45 gemma4
glm45 glm47 granite granite_thinking_parser holo2 hunyuan_a13b hy_v3 hy_v4 inkling k2_horizon
kimi_k2 kimi_k3 ling3 mimo minicpmv minimax_m2 minimax_m2_append_think minimax_m3 mistral
muse_glimmer nemotron_v3 olmo3 openai_gptoss plamo3 poolside_v1 qwen3 seed_oss solar_open2 step3
step3p5
"""


def test_the_names_that_others_use_are_known():
    for name in VLLM_TOOL_PARSERS.split():
        TOOL_PARSERS.load(name)
    for name in VLLM_REASONING_PARSERS.split():
        REASONING_PARSERS.load(name)


def test_forced_calls():
    text = json.dumps([{"name": "get_weather", "parameters": PARIS}, {"name": "now", "parameters": {}}])
    for pieces in ([text], list(text)):
        assert calls_of(run(RequiredCallsParser(), pieces)) == [WANT, NOW]
        assert calls_of(run(NamedCallParser("get_weather"), [ARGS])) == [WANT]


def test_reasoning_before_calls():
    text = f"<think>I need <tool_call> now.</think>\n\nWait.<tool_call>{CALL}</tool_call>"
    for pieces in ([text], list(text)):
        parser = AnswerParser([REASONING_PARSERS.load("qwen3")(), TOOL_PARSERS.load("hermes")()])
        events = run(parser, pieces)
        assert joined(events, Reasoning) == "I need <tool_call> now."
        assert joined(events, Text) == "\n\nWait."
        assert calls_of(events) == [WANT]
        assert parser.num_calls == 1


@pytest.mark.parametrize(
    "name", sorted({TOOL_PARSERS.load(n).read: n for n in TOOL_PARSERS.names()}.values())
)
@pytest.mark.parametrize(
    "unit",
    [
        "<",
        "[",
        "{",
        '"',
        "\\",
        "<tool_call>",
        "[TOOL_CALLS]",
        '<tool_call>{"name":"a",',
        "[f(x=[",
        "<|channel|>",
        " ",
    ],
)
def test_time_is_linear(name, unit):
    def seconds(count: int) -> float:
        text, parser = unit * count, TOOL_PARSERS.load(name)()
        begun = time.thread_time()
        for at in range(0, len(text), 8):
            parser.feed(text[at : at + 8])
        parser.finish()
        return time.thread_time() - begun

    small = min(seconds(400) for _ in range(2))
    large = min(seconds(1600) for _ in range(2))
    assert large < 4 * 3 * small + 0.1  # quadratic would be sixteen times and more


TYPED = [
    ({"type": "string"}, "12", "12"),
    ({"type": "string"}, "None", "None"),
    ({"type": "integer"}, "12", 12),
    ({"type": "number"}, "12", 12),
    ({"type": ["string", "null"]}, "null", None),
    ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "[1]", [1]),
    ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "1", "1"),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"type": "boolean"}, "True", True),
    ({"type": "object"}, '{"a": NaN}', '{"a": NaN}'),
    ({"type": "object"}, "[" * 100_000, "[" * 100_000),
    ({}, " 1 ", 1),
    (None, "two\n", "two"),
]


@pytest.mark.parametrize(("schema", "text", "value"), TYPED)
def test_the_schema_says_what_type_a_text_is_of(schema, text, value):
    kind = TOOL_PARSERS.load("qwen3_coder")
    parser = kind({"f": {"properties": {"x": schema}}})
    events = run(parser, [f"<tool_call><function=f><parameter=x>{text}</parameter></function></tool_call>"])
    assert calls_of(events) == [("f", {"x": value})]


def test_the_models_own_ids_are_kept():
    events = run(TOOL_PARSERS.load("kimi_k2")(), [KIMI.format(ARGS)])
    assert [event.id for event in events if isinstance(event, CallStart)] == [
        "functions.get_weather:0",
        "functions.now:1",
    ]


def test_templates_suggest_their_parsers():
    assert suggested_tool_parser("{{ tools }}<tool_call><function=x>") == "qwen3_coder"
    assert suggested_tool_parser("{{ tools }}<tool_call><arg_key>") == "glm45"
    assert suggested_tool_parser("{{ tools }}<|tool_calls_section_begin|>") == "kimi_k2"
    assert suggested_tool_parser("{% if tools %}<tool_call>{{ tools }}") == "hermes"
    assert suggested_tool_parser("{{ tools }}[TOOL_CALLS]") == "mistral"
    assert suggested_tool_parser("<tool_call>") == ""
    assert suggested_tool_parser("{{ tools }}{{ '<|open|>' + tag }}") == "kimi_k3"
    assert suggested_reasoning_parser("{{ '<|open|>' + tag }}") == "kimi_k3"
    assert suggested_reasoning_parser("x</think>") == ""
    assert suggested_reasoning_parser("x<think>\n") == "think"
