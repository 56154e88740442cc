"""What models say when they call tools or reason, by the name of the parser, and what is to be read of it."""

import json

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
    ("hermes", f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>", "Let me see.\n", [WANT]),
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
        "Sure. ",
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
    ("qwen3_coder", f"Ok.\n<tool_call>\n{CODER}\n</tool_call>", "Ok.\n", [WANT]),
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
    ("glm45", f"Ok.\n{GLM}\n<tool_call>now\n</tool_call>", "Ok.\n", [WANT, NOW]),
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
GOOD = f"<tool_call>{CALL}</tool_call>"
SECTION = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
K2_CALL = "<|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
G4_CALL = "<|tool_call>call:{}{}<tool_call|>"
G4 = GEMMA.removeprefix("call:get_weather").format(q='<|"|>')
DSML = tagged(
    '<｜DSML｜invoke name="', '<｜DSML｜parameter name="', '" string="false">', "</｜DSML｜parameter>",
    "</｜DSML｜invoke>", '">', "",
)  # fmt: skip
K3 = tagged(
    '<|open|>call tool="', '<|open|>argument key="', '" type="any"<|sep|>', "<|close|>argument<|sep|>",
    "<|close|>call<|sep|>", '" index="1"<|sep|>', "",
)  # fmt: skip
SOLAR = tagged(
    "<|tool_call:start|>", "<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>",
    "<|tool_call:end|>", "", "",
)  # fmt: skip
IFM = tagged(
    "<ifm|tool_call>", "<ifm|arg_key>", "</ifm|arg_key><ifm|arg_value>", "</ifm|arg_value>",
    "</ifm|tool_call>", "", "",
)  # fmt: skip
HY = tagged(
    "<tool_call:6c>", "<arg_key:6c>", "</arg_key:6c>\n<arg_value:6c>", "</arg_value:6c>",
    "</tool_call:6c>", "<tool_sep:6c>", "",
)  # fmt: skip
ATEM = tagged(
    '<atem:invoke name="', '<atem:parameter name="', '">', "</atem:parameter>", "</atem:invoke>", '">', ""
)
M3 = (
    '<tool_call><invoke name="get_weather"><city>Paris</city><note>a "quoted" }] \\ &b</note>'
    "<deep><list><item>1</item><item>2.5</item><item>true</item></list></deep></invoke></tool_call>"
).replace("<", "]<]minimax[>[<")
PLAMO = "".join(
    f"<|plamo:{part}:plamo|>" if part.startswith(("begin", "end")) else part
    for part in (
        *("begin_tool_requests", "begin_tool_request", "begin_tool_name", "get_weather", "end_tool_name"),
        *("begin_tool_arguments", "@", "end_tool_arguments", "end_tool_request", "end_tool_requests"),
    )
).replace("@", f"<|plamo:constrain|>json<|plamo:msg|>{ARGS}")
CASES += [
    # Families whose format is one of their own
    (
        "apertus",
        f'Ok.<|tools_prefix|>[{{"get_weather": {ARGS}}}, {{"now": {{}}}}]<|tools_suffix|>',
        "Ok.",
        [WANT, NOW],
    ),
    ("deepseek_v32", f"<｜DSML｜function_calls>\n{DSML}\n</｜DSML｜function_calls>", "", [WANT]),
    ("deepseek_v4", f"Ok.\n\n<｜DSML｜tool_calls>{DSML}{DSML}</｜DSML｜tool_calls>", "Ok.\n\n", 2 * [WANT]),
    (
        "deepseek_v41",
        '<｜DSML｜ calls><｜DSML｜ invoke name="f"><｜DSML｜ parameter name="x" string="true">1'
        "</｜DSML｜ parameter></｜DSML｜ invoke></｜DSML｜ calls>",
        "",
        [("f", {"x": "1"})],
    ),
    ("dots", f"<dots_function_call>\n{INVOKE}\n</dots_function_call>", "", [WANT]),
    ("dots", f"<dots_function_call>{CALL}</dots_function_call>", "", [WANT]),
    ("gigachat3", f"Ok.<|message_sep|>function call<|role_sep|>\n{CALL}", "Ok.", [WANT]),
    ("gigachat3", f"<|function_call|>{CALL}", "", [WANT]),
    ("hy_v3", f"Ok.<tool_calls:6c>\n{HY}\n{HY}</tool_calls:6c>", "Ok.", [WANT, WANT]),
    ("hy_v4", "<tool_calls><tool_call>now</tool_call></tool_calls>", "", [NOW]),
    (
        "inkling",
        "<|message_model|><|content_thinking|>Hm.<|end_message|>"
        "<|message_model|><|content_text|>Ok.<|end_message|>"
        f'<|message_model|><|content_invoke_tool_json|>{{"name": "get_weather", "args": {ARGS}}}'
        "<|end_message|>",
        "Ok.",
        [WANT],
    ),
    ("k2_horizon", f"<ifm|tool_calls>{IFM}</ifm|tool_calls>", "", [WANT]),
    ("k2_horizon", f"<ifm|tool_calls><ifm|tool_call>{CALL}</ifm|tool_call></ifm|tool_calls>", "", [WANT]),
    ("kimi_k3", f"Ok.<|open|>tools<|sep|>{K3}<|close|>tools<|sep|>", "Ok.", [WANT]),
    ("minicpm5", '<function name="f"><param name="x">1</param></function>', "", [("f", {"x": 1})]),
    ("minimax", f"<tool_calls>\n{CALL}\n{CALL}\n</tool_calls>", "", [WANT, WANT]),
    (
        "minimax_m3",
        M3,
        "",
        [("get_weather", {"city": "Paris", "note": 'a "quoted" }] \\ &b', "deep": {"list": [1, 2.5, True]}})],
    ),
    (
        "muse_glimmer",
        " to=self<|message|>Hm <atem:invoke name=.<|eom|><|start|>assistant to=get_weather<|message|>\n"
        f"<atem:function_calls>\n{ATEM}\n</atem:function_calls><|eom|>"
        "<|start|>assistant to=user<|message|>Ok.<|eot|>",
        "Ok.",
        [WANT],
    ),
    ("muse_glimmer", " Plain.", " Plain.", []),
    (
        "muse",
        "<|message|>Hm <atem:invoke name=.<|eom|><|start|>assistant to=commentary<|message|>Look: <|eom|>"
        "<|start|>assistant to=developer<|message|>Note.<|eom|><|start|>assistant to=get_weather<|message|>"
        f"{ATEM}<|eom|><|start|>assistant to=user<|message|>Ok.<|eot|>",
        "Look: Ok.",
        [WANT],
    ),
    ("step5", f"<tool_call>\n{CODER}\n</tool_call>", "", [WANT]),
    ("olmo3", "<function_calls>\nf(x=null)\nnow()\n</function_calls>", "", [("f", {"x": None}), NOW]),
    ("plamo3", f"Ok.{PLAMO}", "Ok.", [WANT]),
    ("solar_open2", f"{SOLAR}\n{SOLAR}", "", [WANT, WANT]),
    ("step3p5", f"<tool_call>\n{CODER}\n</tool_call>", "", [WANT]),
    ("xlam", f"[{CALL}, {CALL}]", "", [WANT, WANT]),
    ("xlam", f"Sure:\n```json\n[{CALL}]\n```", "Sure:\n", [WANT]),
    # Calls beside a malformed one
    ("hermes", f"<tool_call>oh no</tool_call>{GOOD}", "<tool_call>oh no</tool_call>", [WANT]),
    ("hermes", f'<tool_call>{{"name": "now", "arguments": {{"x": oh}}}}</tool_call>{GOOD}', "", [NOW, WANT]),
    ("hermes", f'<tool_call>{{"name": "now", "arguments": {{}}}}\n{GOOD}', "", [NOW, WANT]),
    (
        "kimi_k2",
        SECTION.format(K2_CALL.format("now", '{"x": "y') + K2_CALL.format("f", "{}")),
        "",
        [("now", {"x": "y"}), ("f", {})],
    ),
    (
        "kimi_k2",
        SECTION.format("<|tool_call_begin|>oh no<|tool_call_end|>" + K2_CALL.format("now", "{}")),
        "<|tool_calls_section_begin|><|tool_call_begin|>oh no",
        [NOW],
    ),
    (
        "gemma4",
        "<|tool_call>call:oh<tool_call|>" + G4_CALL.format("get_weather", G4),
        "<|tool_call>call:oh<tool_call|>",
        [WANT],
    ),
    ("gemma4", G4_CALL.format("f", '{x:<|"|>y') + G4_CALL.format("now", "{}"), "", [("f", {}), NOW]),
    (
        "qwen3_coder",
        f"<tool_call>\n<function=oh\n</function>\n</tool_call>\n<tool_call>\n{CODER}\n</tool_call>",
        "<tool_call>\n<function=oh\n</function>\n\n",
        [WANT],
    ),
    ("qwen3_coder", "<tool_call><function=now><function=f></function></tool_call>", "", [NOW, ("f", {})]),
    # Arguments are JSON, whatever the model writes
    ("gemma4", '<|tool_call>call:f{a:<|"|>b<|"|>,c:[1,{d:<|"|>cut', "", [("f", {"a": "b", "c": [1, {}]})]),
    ("gemma4", "<|tool_call>:f{a:1}<tool_call|>", "", [("f", {"a": 1})]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": [1, {"b": "cut',
        "",
        [("f", {"a": [1, {"b": "cut"}]})],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, "b": tru', "", [("f", {"a": 1})]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "two\nlines \\d \\u00e9",}}</tool_call>',
        "",
        [("f", {"a": "two\nlines \\d é"})],
    ),
    ("llama3_json", f"Here it is: {LLAMA}\nDone.", "Here it is: \nDone.", [WANT]),
    (
        "llama3_json",
        f'A set {{x}}, an object {{"name": "x"}}, a call {LLAMA}',
        'A set {x}, an object {"name": "x"}, a call ',
        [WANT],
    ),
    (
        "pythonic",
        "[f(a='two\nlines', b='it's \"x\"', c=007, d={1, 2}, e='\\x41\0')]",
        "",
        [("f", {"a": "two\nlines", "b": 'it\'s "x"', "c": "007", "d": [1, 2], "e": "A\0"})],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[write(path='a.py', text='print(\"it's\")\n')]<|tool_call_end|>",
        "",
        [("write", {"path": "a.py", "text": 'print("it\'s")\n'})],
    ),
    # Blocks that hold nothing vanish
    *(
        (name, f"Ok.{opening}{closing}", "Ok.", [])
        for name, opening, closing in (
            ("hermes", "<tool_call>", "</tool_call>"),
            ("glm45", "<tool_call>\n", "</tool_call>"),
            ("qwen3_coder", "<tool_call>", "\n</tool_call>"),
            ("gemma4", "<|tool_call>", "<tool_call|>"),
            ("lfm2", "<|tool_call_start|>", "<|tool_call_end|>"),
            ("lfm2", "<|tool_call_start|>[]", "<|tool_call_end|>"),
            ("kimi_k2", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            ("minimax_m2", "<minimax:tool_call>", "</minimax:tool_call>"),
            ("jamba", "<tool_calls>[]", "</tool_calls>"),
            ("deepseek_v4", "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
        )
    ),
]
BROKEN = [
    ("qwen3_coder", "<tool_call>oh no</tool_call>"),
    ("qwen3_coder", "a <function=f"),
    ("glm45", '<tool_call>{"name": "f"}</tool_call>'),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>f"),
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
    ("llama3_json", '{"name": "f", "parameters": oh}'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("xlam", "A list: [], [1], [{}]"),
    ("hy_v3", "<tool_calls and <tool_calls>oh no"),
    ("pythonic", "[f(x='a', 'b')]"),
]
THOUGHTS = [
    ("think", False, "<think>\nHm, <b>.\n</think>\n\nYes.", "\nHm, <b>.\n", "\n\nYes."),
    ("think", True, "Hm.\n</think>\n\nYes.", "Hm.\n", "\n\nYes."),
    ("think", False, "  Yes. </think>", "", "  Yes. </think>"),
    ("think", True, "never ends", "never ends", ""),
    ("deepseek_r1", False, "Hm.</think>Yes.", "Hm.", "Yes."),
    ("granite", False, "Here is my thought process: Hm. Here is my response: Yes.", " Hm. ", " Yes."),
    ("gemma4", False, "<|channel>\nHm.\n<channel|>Yes.", "Hm.\n", "Yes."),
    ("think", False, "</think>Yes.", "", "Yes."),
    ("minimax_m2_append_think", False, "Hm.</think>Yes.", "", "<think>Hm.</think>Yes."),
    ("ernie45", False, "<think>Hm.</think><response>Yes.</response>", "Hm.", "Yes."),
    ("hunyuan_a13b", False, "<think>Hm.</think><answer>Yes.</answer>", "Hm.", "Yes."),
    (
        "cohere_command3",
        False,
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
        "Hm.",
        "Yes.",
    ),
    ("hy_v4", False, "<think:6c>Hm.</think:6c>Yes.", "Hm.", "Yes."),
    (
        "kimi_k3",
        False,
        "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>Yes.",
        "Hm.",
        "Yes.",
    ),
    (
        "inkling",
        False,
        "<|content_thinking|>Hm.<|end_message|><|content_text|>Yes.<|end_message|>",
        "Hm.",
        "Yes.",
    ),
    (
        "muse_glimmer",
        False,
        " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Yes.",
        "Hm.",
        "Yes.",
    ),
    ("muse", False, "<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Yes.", "Hm.", "Yes."),
    ("plamo3", False, "<|plamo:begin_think:plamo|>Hm.<|plamo:end_think:plamo|>Yes.", "Hm.", "Yes."),
    ("gemma4", False, "<|channel>thought\nHm.\n<channel|>Yes.", "Hm.\n", "Yes."),
    (
        "openai_gptoss",
        False,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        "Hm.",
        "Yes.",
    ),
]
