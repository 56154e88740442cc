"""Golden transcripts of every format, equal at every split of the stream; malformed text stays text."""

import json
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.frontend.parsers.answer import AnswerParser
from octavo.frontend.parsers.constrained import NamedCallParser, RequiredCallsParser
from octavo.frontend.parsers.events import CallArguments, CallStart, Event, Reasoning, Text, coalesced
from octavo.frontend.parsers.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    suggested_reasoning_parser,
    suggested_tool_parser,
)

PARIS = {"city": "Paris", "note": 'a "quoted" }] \\ <b>', "deep": {"list": [1, 2.5, True, None, "x"]}}
ARGS = json.dumps(PARIS)
CALL = json.dumps({"name": "get_weather", "arguments": PARIS})
LLAMA = json.dumps({"name": "get_weather", "parameters": PARIS})
DS = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>\n"
    "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
V3 = "function<｜tool▁sep｜>{}\n```json\n{}\n```"
V31 = "{}<｜tool▁sep｜>{}"
GEMMA = (
    'call:get_weather{{city:{q}Paris{q},note:{q}a "quoted" }}] \\ <b>{q},'
    "deep:{{list:[1,2.5,true,null,{q}x{q}]}}}}"
)
NOTE = PARIS["note"]


def tagged(call, parameter, key_end, end, call_end, name_end=">", pad="\n"):
    """A call in tags; values as templates write them."""
    deep = json.dumps(PARIS["deep"])
    values = "".join(
        f"{parameter}{key}{key_end}{pad}{value}{pad}{end}\n"
        for key, value in (("city", "Paris"), ("note", NOTE), ("deep", deep))
    )
    return f"{call}get_weather{name_end}\n{values}{call_end}"


CODER = tagged("<function=", "<parameter=", ">", "</parameter>", "</function>")
SEED = tagged("<function=", "<parameter=", ">", "</parameter>", "</function>", pad="")
INVOKE = tagged('<invoke name="', '<parameter name="', '">', "</parameter>", "</invoke>", '">', "")
STEP = tagged(
    '<steptml:invoke name="', '<steptml:parameter name="', '">', "</steptml:parameter>",
    "</steptml:invoke>", '">', "",
)  # fmt: skip
GLM = tagged("<tool_call>", "<arg_key>", "</arg_key><arg_value>", "</arg_value>", "</tool_call>", "", "")
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    "{}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)
WANT = ("get_weather", PARIS)
NOW = ("now", {})

CASES = [
    ("hermes", f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>", "Let me see.", [WANT]),
    ("hermes", f'<tool_call>{CALL}</tool_call>\n<tool_call>{{"name": "now"}}</tool_call>', "", [WANT, NOW]),
    ("hermes", f'<tool_call>{{"arguments": {ARGS}, "name": "get_weather"}}</tool_call> ok', " ok", [WANT]),
    ("hermes", f'<tool_call>{{"name":"get_weather","arguments":{json.dumps(ARGS)}}}</tool_call>', "", [WANT]),
    ("hermes", '<tool_call>{"id": 7, "name": "now", "arguments": {} }</tool_call>', "", [NOW]),
    ("llama3_json", LLAMA, "", [WANT]),
    (
        "llama3_json",
        f'<|python_tag|>{LLAMA}; {{"name": "now", "parameters": {{}}}}<|eom_id|>',
        "",
        [WANT, NOW],
    ),
    ("llama3_json", "No tools needed.", "No tools needed.", []),
    ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]", "", [WANT, WANT]),
    ("mistral", f"Hm.[TOOL_CALLS]get_weather{ARGS}[TOOL_CALLS]now[ARGS]{{}}", "Hm.", [WANT, NOW]),
    ("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{ARGS}", "", [WANT]),
    (
        "deepseek_v3",
        "Sure. " + DS.format(V3.format("get_weather", ARGS), V3.format("now", "{}")),
        "Sure.",
        [WANT, NOW],
    ),
    ("deepseek_v31", DS.format(V31.format("get_weather", ARGS), V31.format("now", "{}")), "", [WANT, NOW]),
    (
        "pythonic",
        f"[get_weather(city='Paris', note={PARIS['note']!r}, deep={PARIS['deep']!r}), now()]",
        "",
        [WANT, NOW],
    ),
    (
        "pythonic",
        "<|python_start|>[a.b(x=true, y=[-1, (2, 3)])]<|python_end|>",
        "",
        [("a.b", {"x": True, "y": [-1, [2, 3]]})],
    ),
    ("pythonic", "[1] is a footnote", "[1] is a footnote", []),
    (
        "functiongemma",
        "<start_function_call>" + GEMMA.format(q="<escape>") + "<end_function_call>",
        "",
        [WANT],
    ),
    (
        "gemma4",
        "Ok.<|tool_call>" + GEMMA.format(q='<|"|>') + "<tool_call|><|tool_call>call:now{}<tool_call|>",
        "Ok.",
        [WANT, NOW],
    ),
    ("openai", "<|channel|>final<|message|>Hello.<|return|>", "Hello.", []),
    (
        "openai",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{ARGS}<|call|>",
        "I look.",
        [WANT],
    ),
]
CASES += [
    ("qwen3_coder", f"Ok.\n<tool_call>\n{CODER}\n</tool_call>", "Ok.", [WANT]),
    ("qwen3_coder", f"{CODER}\n<tool_call><function=now></function></tool_call>", "", [WANT, NOW]),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=a>True<parameter=b>[1]</function></tool_call>",
        "",
        [("f", {"a": True, "b": [1]})],
    ),
    ("seed_oss", f"<seed:tool_call>\n{SEED}\n</seed:tool_call>", "", [WANT]),
    ("minimax_m2", f"Ok.<minimax:tool_call>\n{INVOKE}{INVOKE}</minimax:tool_call>", "Ok.", [WANT, WANT]),
    (
        "step3",
        f"<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>{STEP}<｜tool_call_end｜>"
        "<｜tool_calls_end｜>",
        "",
        [WANT],
    ),
    ("glm45", f"Ok.\n{GLM}\n<tool_call>now\n</tool_call>", "Ok.", [WANT, NOW]),
    ("glm47", "<tool_call>now</tool_call>", "", [NOW]),
    ("kimi_k2", "Ok." + KIMI.format(ARGS), "Ok.", [WANT, NOW]),
    ("granite", f"<|tool_call|>[{CALL}]", "", [WANT]),
    ("granite", f"<tool_call> [{CALL}, {CALL}]", "", [WANT, WANT]),
    ("granite-20b-fc", f"<function_call> {CALL}<function_call> {CALL}", "", [WANT, WANT]),
    ("internlm", f"Ok.<|action_start|><|plugin|>\n{LLAMA}<|action_end|>\n", "Ok.", [WANT]),
    ("jamba", f"<tool_calls>[\n{CALL},\n{CALL}\n]</tool_calls>", "", [WANT, WANT]),
    ("longcat", f"<longcat_tool_call>\n{CALL}\n</longcat_tool_call>", "", [WANT]),
    ("phi4_mini_json", f"functools[{CALL}]", "", [WANT]),
    (
        "cohere_command3",
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "now", "parameters": {}}]<|END_ACTION|>',
        "",
        [NOW],
    ),
    ("lfm2", '<|tool_call_start|>[now(), f(x="]")]<|tool_call_end|>Ok.', "Ok.", [NOW, ("f", {"x": "]"})]),
]
BROKEN = [
    ("qwen3_coder", "<tool_call>oh no</tool_call>"),
    ("qwen3_coder", "a <function=f"),
    ("glm45", '<tool_call>{"name": "f"}</tool_call>'),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>f"),
    ("minimax_m2", "<minimax:tool_call></minimax:tool_call>"),
    ("hermes", '<tool_call>\n{"name": 3}\n</tool_call> and more'),
    ("hermes", '<tool_call>{"na'),
    ("hermes", "<tool_call>oh no</tool_call>"),
    ("hermes", "a <tool_cal"),
    ("llama3_json", '{"answer": 42}'),
    ("llama3_json", "{not json"),
    ("mistral", "[TOOL_CALLS]nothing follows"),
    ("pythonic", "[f(x=__import__('os'))]"),
    ("pythonic", "[f(1)]"),
    ("functiongemma", "<start_function_call>f{}<end_function_call>"),
]
THOUGHTS = [
    ("think", False, "<think>\nHm, <b>.\n</think>\n\nYes.", "Hm, <b>.", "Yes."),
    ("think", True, "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("think", False, "  Yes. </think>", "", "  Yes. </think>"),
    ("think", True, "never ends", "never ends", ""),
    ("deepseek_r1", False, "Hm.</think>Yes.", "Hm.", "Yes."),
    ("granite", False, "Here is my thought process: Hm. Here is my response: Yes.", "Hm.", "Yes."),
    ("gemma4", False, "<|channel>thought\nHm.\n<channel|>Yes.", "Hm.", "Yes."),
    (
        "openai_gptoss",
        False,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        "Hm.",
        "Yes.",
    ),
]


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
    assert run(kind(), pieces) == run(kind(), [text])


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
        assert joined(events, Text) == "Wait."
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
    assert suggested_reasoning_parser("x</think>") == ""
    assert suggested_reasoning_parser("x<think>\n") == "think"
