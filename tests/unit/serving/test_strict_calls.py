"""Calls of strict tools in every format: the family's own spelling is admitted and read, others are not."""

import json

import msgspec
import pytest

from octavo.engine.structured.guidance import GuidanceBackend
from octavo.frontend.parsers.events import CallArguments, CallStart
from octavo.frontend.parsers.registry import TOOL_PARSERS, suggested_tool_parser
from octavo.frontend.parsers.tagged import TaggedParser
from octavo.messages.structured import StructuredOutputsParams
from octavo.serving.openai.call_forms import CALL_FORMS
from octavo.serving.openai.protocol import Function
from octavo.serving.openai.strict_calls import strict_tag
from tests.structured import BYTES
from tests.unit.engine.test_structured_guidance import admits

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"$ref": "#/$defs/unit"},
        "days": {"type": "integer"},
        "deep": {"type": "object", "properties": {"list": {"type": "array", "items": {"type": "integer"}}}},
    },
    "required": ["city", "days"],
    "$defs": {"unit": {"type": "string", "enum": ["C", "F"]}},
}
WANT = {"city": "Paris", "unit": "C", "days": 3, "deep": {"list": [1, 2]}}
TOOLS = [Function(name="weather", parameters=SCHEMA, strict=True), Function(name="now")]
ARGS = json.dumps(WANT)
CALL = f'{{"name": "weather", "arguments": {ARGS}}}'
LLAMA = f'{{"name": "weather", "parameters": {ARGS}}}'
PYTHON = 'weather(city="Paris", days=3, unit="C", deep={"list": [1, 2]})'


def tagged(before: str, parameter: str, behind: str, end: str, pad: str = "", lines: str = "\n") -> str:
    """A call with a tag for each argument; @ stands for its name."""
    values = {"city": "Paris", "unit": "C", "days": "3", "deep": '{"list": [1, 2]}'}
    written = [f"{parameter.replace('@', key)}{pad}{text}{pad}{behind}" for key, text in values.items()]
    return f"{before}{lines}{lines.join(written)}{lines}{end}"


def dsml(block: str, space: str = "") -> str:
    mark = f"｜DSML｜{space}"
    call = tagged(
        f'<{mark}invoke name="weather">',
        f'<{mark}parameter name="@" string="true">',
        f"</{mark}parameter>",
        f"</{mark}invoke>",
    )
    for key in ("days", "deep"):
        call = call.replace(f'"{key}" string="true"', f'"{key}" string="false"')
    return f"<{mark}{block}>\n{call}\n</{mark}{block}>"


def gemma(quote: str) -> str:
    return f"call:weather{{city:{quote}Paris{quote},days:3,unit:{quote}C{quote},deep:{{list:[1,2]}}}}"


CODER = tagged("<function=weather>", "<parameter=@>", "</parameter>", "</function>", "\n")
SEED = tagged("<function=weather>", "<parameter=@>", "</parameter>", "</function>")
INVOKE = tagged('<invoke name="weather">', '<parameter name="@">', "</parameter>", "</invoke>")
STEP = tagged(
    '<steptml:invoke name="weather">',
    '<steptml:parameter name="@">',
    "</steptml:parameter>",
    "</steptml:invoke>",
)
GLM = tagged("<tool_call>weather", "<arg_key>@</arg_key>\n<arg_value>", "</arg_value>", "</tool_call>")
GLM47 = tagged(
    "<tool_call>weather", "<arg_key>@</arg_key><arg_value>", "</arg_value>", "</tool_call>", lines=""
)
SOLAR = tagged(
    "<|tool_call:start|>weather",
    "<|tool_arg:start|>@<|tool_arg:value|>",
    "<|tool_arg:end|>",
    "<|tool_call:end|>",
)
HORIZON = tagged(
    "<ifm|tool_call>weather", "<ifm|arg_key>@</ifm|arg_key>\n<ifm|arg_value>", "</ifm|arg_value>",
    "</ifm|tool_call>",
)  # fmt: skip
KIMI3 = (
    tagged(
        '<|open|>call tool="weather" index="1"<|sep|>',
        '<|open|>argument key="@" type="string"<|sep|>',
        "<|close|>argument<|sep|>",
        "<|close|>call<|sep|>",
        lines="",
    )
    .replace('"days" type="string"', '"days" type="integer"')
    .replace('"deep" type="string"', '"deep" type="object"')
)
M3 = (
    '<tool_call>\n<invoke name="weather"><city>Paris</city>\n<unit>C</unit><days>3</days>'
    "<deep><list><item>1</item><item>2</item></list></deep>\n</invoke>\n</tool_call>"
).replace("<", "]<]minimax[>[<")
ATEM = tagged(
    '<atem:invoke name="weather">', '<atem:parameter name="@">', "</atem:parameter>", "</atem:invoke>"
)  # fmt: skip


def hunyuan(suffix: str, sep: str, line: str) -> str:
    call = tagged(
        f"<tool_call>weather{sep}", f"<arg_key>@</arg_key>{line}<arg_value>", "</arg_value>", "</tool_call>",
        lines=line,
    )  # fmt: skip
    return f"<tool_calls>{line}{call}{line}</tool_calls>".replace(">", f"{suffix}>")


DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
TEXTS = [
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>"),
    ("apertus", f'<|tools_prefix|>[{{"weather": {ARGS}}}]<|tools_suffix|>'),
    (
        "cohere_command3",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": '
        f"{ARGS}}}\n]<|END_ACTION|>",
    ),
    ("gigachat3", f"<|function_call|>{CALL}"),
    ("granite", f"<|tool_call|>[{CALL}]"),
    ("granite-20b-fc", f"<function_call> {CALL}"),
    ("hunyuan_a13b", f"<tool_calls>[{CALL}]</tool_calls>"),
    ("internlm", f"<|action_start|><|plugin|>\n{LLAMA}<|action_end|>"),
    ("jamba", f"<tool_calls>[\n    {CALL}\n]</tool_calls>"),
    ("longcat", f"<longcat_tool_call>\n{CALL}\n</longcat_tool_call>"),
    ("minimax", f"<tool_calls>\n{CALL}\n</tool_calls>"),
    ("phi4_mini_json", f"functools[{CALL}]"),
    ("llama3_json", LLAMA),
    ("xlam", f"[{CALL}]"),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{ARGS}"),
    ("deepseek_v3", DEEPSEEK.format(f"function<｜tool▁sep｜>weather\n```json\n{ARGS}\n```")),
    ("deepseek_v31", DEEPSEEK.format(f"weather<｜tool▁sep｜>{ARGS}")),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        f"{ARGS}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    (
        "plamo3",
        "<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|>"
        "<|plamo:begin_tool_name:plamo|>weather<|plamo:end_tool_name:plamo|>"
        f"<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{ARGS}"
        "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"
        "<|plamo:end_tool_requests:plamo|>",
    ),
    (
        "inkling",
        "<|message_model|><|content_thinking|>Hm.<|end_message|><|message_model|>"
        f'<|content_invoke_tool_json|>{{"name": "weather", "args": {ARGS}}}<|end_message|>',
    ),
    (
        "openai",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGS}",
    ),
    ("qwen3_coder", f"<tool_call>\n{CODER}\n</tool_call>"),
    ("seed_oss", f"<seed:tool_call>\n{SEED}\n</seed:tool_call>"),
    ("minimax_m2", f"<minimax:tool_call>\n{INVOKE}\n</minimax:tool_call>"),
    ("dots", f"<dots_function_call>\n{INVOKE}\n</dots_function_call>"),
    ("minicpm5", tagged('<function name="weather">', '<param name="@">', "</param>", "</function>", "", "")),
    (
        "step3",
        f"<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>{STEP}<｜tool_call_end｜>\n"
        "<｜tool_calls_end｜>",
    ),
    ("deepseek_v32", dsml("function_calls")),
    ("deepseek_v4", dsml("tool_calls")),
    ("deepseek_v41", dsml("calls", " ")),
    ("glm45", GLM),
    ("glm47", GLM47),
    ("solar_open2", SOLAR),
    ("k2_horizon", f"<ifm|tool_calls>\n{HORIZON}\n</ifm|tool_calls>"),
    ("hy_v3", hunyuan(":6c", "<tool_sep>", "\n")),
    ("hy_v4", hunyuan(":6c", "", "")),
    (
        "kimi_k3",
        "Hm.<|close|>think<|sep|><|open|>response<|sep|>Ok.<|close|>response<|sep|>"
        f"<|open|>tools<|sep|>{KIMI3}<|close|>tools<|sep|><|close|>message<|sep|>",
    ),
    ("minimax_m3", M3),
    ("muse", f"<|message|>Hm.<|eom|><|start|>assistant to=weather<|message|>{ATEM}<|eom|>"),
    (
        "muse_glimmer",
        " to=self<|message|>Hm <atem:invoke name=.<|eom|><|start|>assistant to=weather<|message|>"
        f"<atem:function_calls>\n{ATEM}\n</atem:function_calls><|eom|>",
    ),
    ("pythonic", f"[{PYTHON}]"),
    ("lfm2", f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|>"),
    ("olmo3", f"<function_calls>\n{PYTHON}\n</function_calls>"),
    ("functiongemma", "<start_function_call>" + gemma("<escape>") + "<end_function_call>"),
    ("gemma4", "<|tool_call>" + gemma('<|"|>') + "<tool_call|>"),
]  # fmt: skip
SPECIAL = (
    "<|function_call|>", "[ARGS]", "[TOOL_CALLS]", "<|tool_calls_section_begin|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>", '<|"|>',
    "<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>", "<|tool_call>",
    "<|open|>", "<|sep|>", "<|close|>", "]<]minimax[>[", "<|eom|>", "<|message_sep|>", "<|role_sep|>",
    *(f"<{end}{tag}:6c>" for end in ("", "/") for tag in ("tool_calls", "tool_call", "arg_key", "arg_value")),
    "<tool_call|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|start|>", "<|python_tag|>",
)  # fmt: skip


class Tokens(str):
    """A text whose special tokens are single ids behind the bytes."""

    def encode(self, *_: object) -> list[int]:  # type: ignore[override]
        ids, rest = [], str(self)
        while rest:
            found = next((text for text in SPECIAL if rest.startswith(text)), "")
            ids += [258 + SPECIAL.index(found)] if found else rest[0].encode()
            rest = rest.removeprefix(found) if found else rest[1:]
        return ids


VOCABULARY = msgspec.structs.replace(
    BYTES,
    tokens=[*BYTES.tokens, *(text.encode() for text in SPECIAL)],
    special_ids=[*BYTES.special_ids, *range(258, 258 + len(SPECIAL))],
)
BACKEND = GuidanceBackend(VOCABULARY)


def matcher_of(parser: str, tools=TOOLS, *, level="auto", is_parallel=True, special=None):
    if special is None:
        special = {text: 258 + place for place, text in enumerate(SPECIAL)}
    tag = strict_tag(tools, parser, special, level=level, is_parallel=is_parallel)
    form = StructuredOutputsParams(structural_tag=tag, disable_additional_properties=True)
    return BACKEND.compile(BACKEND.translate(form))


def calls_of(parser: str, text: str) -> list[tuple[str, dict]]:
    kind = TOOL_PARSERS.load(parser)
    reader = (
        kind({tool.name: tool.parameters for tool in TOOLS}) if issubclass(kind, TaggedParser) else kind()
    )
    calls: list[list[str]] = []
    for event in [*reader.feed(text), *reader.finish()]:
        if isinstance(event, CallStart):
            calls.append([event.name, ""])
        elif isinstance(event, CallArguments):
            calls[-1][1] += event.text
    return [(name, json.loads(arguments)) for name, arguments in calls]


def test_every_form_has_a_text():
    assert {parser for parser, _ in TEXTS} <= CALL_FORMS.keys()
    assert {CALL_FORMS[parser] for parser, _ in TEXTS} == {*CALL_FORMS.values()}


@pytest.mark.parametrize(("parser", "text"), TEXTS)
def test_a_call_is_held_to_its_schema(parser, text):
    matcher = matcher_of(parser)
    is_harmony = "<|channel|>" in text or "<|message_model|>" in text
    assert admits(BACKEND, matcher, Tokens(text)) and calls_of(parser, text) == [("weather", WANT)]
    assert admits(BACKEND, matcher, Tokens("No call, just { text.")) or is_harmony
    wrong = {"name": ("weather", "other"), "type": ("3", '"x"'), "enum": ("C", "K"), "deep": ("2", '"y"')}
    for what, (good, bad) in wrong.items():
        assert text.count(good), what
        changed = text.replace(good, bad) if what != "enum" else bad.join(text.rsplit(good, 1))
        assert changed != text and not admits(BACKEND, matcher, Tokens(changed)), what
    if parser not in ("pythonic", "xlam", "openai", "inkling"):
        assert admits(BACKEND, matcher, Tokens("Let me see.\n" + text))


def test_a_form_of_a_tokenizer_without_the_special_token():
    """Mistral's earlier models write a list, GigaChat's a message; Hunyuan's marks may have no suffix."""
    tag = strict_tag(TOOLS, "mistral", {}, level="auto", is_parallel=True)
    assert tag["special_tokens"] == {} and tag["format"]["triggers"] == ["[TOOL_CALLS]"]
    texts = {
        "mistral": f"[TOOL_CALLS] [{CALL}]",
        "gigachat3": f"Ok.<|message_sep|>\n\nfunction call<|role_sep|>\n{CALL}",
        "hy_v3": hunyuan("", "<tool_sep>", "\n"),
        "hy_v4": hunyuan("", "", ""),
    }
    special = {name: 258 + SPECIAL.index(name) for name in ("<|message_sep|>", "<|role_sep|>")}
    written = [*texts.items(), ("gigachat3", Tokens(texts["gigachat3"]))]
    for parser, text in written:
        matcher = matcher_of(parser, special=special if isinstance(text, Tokens) else {})
        assert admits(BACKEND, matcher, text) and calls_of(parser, text) == [("weather", WANT)], parser
        assert not admits(BACKEND, matcher, type(text)(text.replace("3", "null"))), parser


@pytest.mark.parametrize(("parser", "text"), TEXTS)
def test_levels(parser, text):
    """Without a strict tool: nothing, known names, or all schemas."""
    free = [Function(name="weather", parameters=SCHEMA), Function(name="now")]
    assert strict_tag(free, parser, {}, level="auto", is_parallel=True) is None
    has_schema_anyway = CALL_FORMS[parser][0].arguments == "python"
    for level, admits_wrong_type in (("function", not has_schema_anyway), ("parameter", False)):
        matcher = matcher_of(parser, free, level=level)
        assert admits(BACKEND, matcher, Tokens(text))
        assert not admits(BACKEND, matcher, Tokens(text.replace("weather", "other")))
        assert admits(BACKEND, matcher, Tokens(text.replace("3", '"x"'))) == admits_wrong_type


@pytest.mark.parametrize("parser", ["hermes", "kimi_k2", "qwen3_coder", "mistral", "pythonic", "lfm2"])
def test_one_call_or_several(parser):
    text = dict(TEXTS)[parser]
    block, separator = CALL_FORMS[parser][0].block, CALL_FORMS[parser][0].separator
    inner = text[len(block[0]) : len(text) - len(block[1])]
    twice = f"{block[0]}{inner}{separator}{inner}{block[1]}"
    for is_parallel in (True, False):
        matcher = matcher_of(parser, is_parallel=is_parallel)
        assert admits(BACKEND, matcher, Tokens(text))
        assert admits(BACKEND, matcher, Tokens(twice)) == is_parallel


def test_arguments_that_may_be_left_out():
    """Each format lets optional ones away, none of the needed ones."""
    optional = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
    tools = [Function(name="f", parameters=optional, strict=True)]
    for inside in ("", "a=1", 'b="x"', 'a=1, b="x"'):
        assert admits(BACKEND, matcher_of("pythonic", tools), f"[f({inside})]"), inside
    assert not admits(BACKEND, matcher_of("pythonic", tools), '[f(a="x")]')
    tools = [Function(name="f", parameters=optional | {"required": ["b"]}, strict=True)]
    call = "<tool_call>f{}</tool_call>"
    b = "<arg_key>b</arg_key><arg_value>x</arg_value>"
    a = "<arg_key>a</arg_key><arg_value>1</arg_value>"
    matcher = matcher_of("glm45", tools)
    assert [admits(BACKEND, matcher, call.format(each)) for each in (a + b, b, a, "")] == [
        True,
        True,
        False,
        False,
    ]


def test_gemma_writes_what_a_schema_leaves_open_freely():
    open_one = {"type": "object", "properties": {"x": {}}}
    matcher = matcher_of("functiongemma", [Function(name="f", parameters=open_one, strict=True)])
    call = "<start_function_call>call:{}{{x:[1,{{y:2}}]}}<end_function_call>"
    assert admits(BACKEND, matcher, call.format("f")) and not admits(BACKEND, matcher, call.format("g"))


def test_types_that_contain_themselves_are_written_freely():
    """A tree, and definitions that double 30 times: both as fast as any."""
    defs = {
        f"d{i}": {"type": "object", "properties": {key: {"$ref": f"#/$defs/d{i + 1}"} for key in "ab"}}
        for i in range(30)
    }
    tree = {"type": "object", "properties": {"inner": {"$ref": "#/$defs/tree"}}}
    for name, all_defs in (("tree", {"tree": tree}), ("d0", defs)):
        schema = {"type": "object", "properties": {"x": {"$ref": f"#/$defs/{name}"}}, "$defs": all_defs}
        tools = [Function(name="f", parameters=schema, strict=True)]
        for parser in ("functiongemma", "minimax_m3"):
            tag = strict_tag(tools, parser, {}, level="auto", is_parallel=True)
            assert "any_text" in str(tag) and len(str(tag)) < 2_000


def test_the_two_formats_of_deepseek_are_told_apart():
    begin, v3 = "{% if tools %}<｜tool▁calls▁begin｜>", "function<｜tool▁sep｜>f\\n```json"
    assert suggested_tool_parser(begin + v3) == "deepseek_v3"
    assert suggested_tool_parser(begin) == "deepseek_v31"
