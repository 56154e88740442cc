"""How each family writes calls of tools, as data: `CALL_FORMS`, by the name of the parser that reads them.

Used by `strict_calls`, which makes grammars of them. In the texts {name} is the tool, {key} a parameter,
{is_text} whether its value is text, {type} the value's JSON type, {n} a number, {s} white space or none and
{x} what this checkpoint adds to the names of its marks.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class CallForm:
    """What stands before the arguments of a call, what behind them, and how they are written."""

    call: str
    end: str
    block: tuple[str, str] = ("", "")
    """Around all calls."""
    separator: str = ""
    """Between the calls of a block."""
    arguments: Literal["json", "tags", "elements", "python", "gemma"] = "json"
    """elements: tags that hold others, where a value is an object or a list."""
    parameter: tuple[str, str] = ("", "")
    """Before a value, and behind it: of tags. Around a text: of Gemma's."""
    is_first: bool = False
    """Calls are the whole answer: they are known by its first character."""
    others: tuple[str, ...] = ()
    """Marks that stand where no call begins. They reach back into the reasoning."""
    needs: str = ""
    """A special token, or how it begins; the form is that of tokenizers which have it."""

    def of(self, special_tokens: Iterable[str]) -> "CallForm | None":
        """The form with a tokenizer's marks; None if it is not that tokenizer's."""
        token = next((text for text in special_tokens if text.startswith(self.needs)), None)
        if self.needs and token is None:
            return None
        suffix = token.removeprefix(self.needs).removesuffix(">") if self.needs and token else ""
        texts = (self.call, self.end, *self.block, *self.parameter)
        call, end, *pairs = (text.replace("{x}", suffix) for text in texts)
        return replace(self, call=call, end=end, block=(pairs[0], pairs[1]), parameter=(pairs[2], pairs[3]))


_CALL = '{"name": "{name}", "arguments": '
_LLAMA = '{"name": "{name}", "parameters": '
_V3 = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_INVOKE = ('<invoke name="{name}">\n', "</invoke>\n", '<parameter name="{key}">', "</parameter>\n")
_MESSAGES = tuple(f"<|channel|>{name}<|message|>" for name in ("analysis", "final", "commentary"))
_K3_PARTS = ("think", "response", "message")
_M3 = "]<]minimax[>["
_PLAMO = ("<|plamo:begin_tool_requests:plamo|>", "<|plamo:end_tool_requests:plamo|>")


def _tags(call: str, end: str, before: str, behind: str, **others: Any) -> CallForm:
    return CallForm(call, end, arguments="tags", parameter=(before, behind), **others)


def _dsml(block: str, space: str = "") -> CallForm:
    """DeepSeek 3.2 and after."""
    mark = f"｜DSML｜{space}"
    before, behind = f'<{mark}parameter name="{{key}}" string="{{is_text}}">', f"</{mark}parameter>\n"
    around = (f"<{mark}{block}>\n", f"</{mark}{block}>")
    return _tags(f'<{mark}invoke name="{{name}}">\n', f"</{mark}invoke>\n", before, behind, block=around)


def _hunyuan(after_name: str, line: str) -> tuple[CallForm, ...]:
    """Hunyuan 3 and after: checkpoints whose marks have a suffix, and those without."""
    before, behind = f"<arg_key{{x}}>{{key}}</arg_key{{x}}>{line}<arg_value{{x}}>", f"</arg_value{{x}}>{line}"
    around = (f"<tool_calls{{x}}>{line}", "</tool_calls{x}>")
    form = _tags(
        f"<tool_call{{x}}>{{name}}{after_name}", f"</tool_call{{x}}>{line}", before, behind, block=around
    )
    return replace(form, needs="<tool_calls"), form


_FORMS: dict[str, CallForm | tuple[CallForm, ...]] = {
    # JSON
    "hermes ernie45 granite4 qwen qwen3_json": CallForm(f"<tool_call>\n{_CALL}", "}\n</tool_call>"),
    "apertus": CallForm('{"{name}": ', "}", ("<|tools_prefix|>[", "]<|tools_suffix|>"), ", "),
    "cohere_command3 cohere_command4": CallForm(
        '{"tool_call_id": "{n}", "tool_name": "{name}", "parameters": ',
        "}",
        ("<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>"),
        ",\n    ",
    ),
    "gigachat3": (
        CallForm(f"<|function_call|>{_CALL}", "}", needs="<|function_call|>"),
        CallForm(f"function call<|role_sep|>\n{_CALL}", "}", others=("<|message_sep|>",)),
    ),
    "granite": CallForm(_CALL, "}", ("<|tool_call|>[", "]"), ", "),
    "granite-20b-fc": CallForm(f"<function_call> {_CALL}", "}"),
    "hunyuan_a13b": CallForm(_CALL, "}", ("<tool_calls>[", "]</tool_calls>"), ", "),
    "internlm": CallForm(f"<|action_start|><|plugin|>\n{_LLAMA}", "}<|action_end|>"),
    "jamba": CallForm(_CALL, "}", ("<tool_calls>[\n    ", "\n]</tool_calls>"), ",\n    "),
    "longcat": CallForm(f"<longcat_tool_call>\n{_CALL}", "}\n</longcat_tool_call>"),
    "minimax": CallForm(_CALL, "}", ("<tool_calls>\n", "\n</tool_calls>"), "\n"),
    "phi4_mini_json": CallForm(_CALL, "}", ("functools[", "]"), ", "),
    "llama3_json llama4_json": CallForm(_LLAMA, "}"),
    "xlam": CallForm(_CALL, "}", ("[", "]"), ", ", is_first=True),
    "mistral": (
        CallForm("[TOOL_CALLS]{name}[ARGS]", "", needs="[ARGS]"),
        CallForm(_CALL, "}", ("[TOOL_CALLS]{s}[", "]"), ", "),
    ),
    "deepseek_v3": CallForm(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n", "\n```<｜tool▁call▁end｜>", _V3, "\n"
    ),
    "deepseek_v31": CallForm("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>", "<｜tool▁call▁end｜>", _V3),
    "kimi_k2": CallForm(
        "<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "plamo3": CallForm(
        "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{name}<|plamo:end_tool_name:plamo|>"
        "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>",
        "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>",
        _PLAMO,
    ),
    "inkling": CallForm(
        '<|content_invoke_tool_json|>{"name": "{name}", "args": ',
        "}<|end_message|>",
        others=("<|message_model|>", "<|content_thinking|>", "<|content_text|>", "<|end_message|>"),
    ),
    "openai": CallForm(
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
        "",
        others=(*_MESSAGES, "<|end|>", "<|start|>assistant"),
    ),
    # A tag for each argument
    "qwen3_coder qwen3_xml mimo step3p5 step5": _tags(
        "<tool_call>\n<function={name}>\n",
        "</function>\n</tool_call>",
        *("<parameter={key}>\n", "\n</parameter>\n"),
    ),
    "seed_oss": _tags(
        *("<function={name}>\n", "</function>\n", "<parameter={key}>", "</parameter>\n"),
        block=("<seed:tool_call>\n", "</seed:tool_call>"),
    ),
    "minimax_m2": _tags(*_INVOKE, block=("<minimax:tool_call>\n", "</minimax:tool_call>")),
    "dots": _tags(*_INVOKE, block=("<dots_function_call>\n", "</dots_function_call>")),
    "minicpm5": _tags('<function name="{name}">', "</function>", '<param name="{key}">', "</param>"),
    "step3": _tags(
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">\n',
        "</steptml:invoke><｜tool_call_end｜>\n",
        *('<steptml:parameter name="{key}">', "</steptml:parameter>\n"),
        block=("<｜tool_calls_begin｜>\n", "<｜tool_calls_end｜>"),
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "deepseek_v41": _dsml("calls", " "),
    "glm45 glm47 ling3 poolside_v1": _tags(
        *("<tool_call>{name}{s}", "</tool_call>"),
        *("<arg_key>{key}</arg_key>{s}<arg_value>", "</arg_value>{s}"),
    ),
    "hy_v3": _hunyuan("<tool_sep{x}>\n", "\n"),
    "hy_v4": _hunyuan("", ""),
    "solar_open2": _tags(
        *("<|tool_call:start|>{name}{s}", "<|tool_call:end|>"),
        *("<|tool_arg:start|>{key}<|tool_arg:value|>", "<|tool_arg:end|>{s}"),
    ),
    "k2_horizon": _tags(
        *("<ifm|tool_call>{name}{s}", "</ifm|tool_call>\n"),
        *("<ifm|arg_key>{key}</ifm|arg_key>{s}<ifm|arg_value>", "</ifm|arg_value>{s}"),
        block=("<ifm|tool_calls>{s}", "</ifm|tool_calls>"),
    ),
    "muse muse_glimmer musespark1x": _tags(
        *('<atem:invoke name="{name}">\n', "</atem:invoke>"),
        *('<atem:parameter name="{key}">', "</atem:parameter>\n"),
        others=("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
    ),
    "kimi_k3": _tags(
        *('<|open|>call tool="{name}" index="{n}"<|sep|>', "<|close|>call<|sep|>"),
        *('<|open|>argument key="{key}" type="{type}"<|sep|>', "<|close|>argument<|sep|>"),
        block=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        others=tuple(f"<|{side}|>{name}<|sep|>" for side in ("open", "close") for name in _K3_PARTS),
    ),
    "minimax_m3": CallForm(
        f'{_M3}<invoke name="{{name}}">{{s}}',
        f"{_M3}</invoke>\n",
        (f"{_M3}<tool_call>{{s}}", f"{_M3}</tool_call>"),
        arguments="elements",
        parameter=(f"{_M3}<{{key}}>", f"{_M3}</{{key}}>{{s}}"),
    ),
    # Python, and Gemma's own notation
    "pythonic llama4_pythonic": CallForm("{name}(", ")", ("[", "]"), ", ", arguments="python", is_first=True),
    "lfm2": CallForm(
        "{name}(", ")", ("<|tool_call_start|>[", "]<|tool_call_end|>"), ", ", arguments="python"
    ),
    "olmo3": CallForm(
        "{name}(", ")", ("<function_calls>\n", "\n</function_calls>"), "\n", arguments="python"
    ),
    "functiongemma": CallForm(
        "<start_function_call>call:{name}{",
        "}<end_function_call>",
        arguments="gemma",
        parameter=("<escape>", "<escape>"),
    ),
    "gemma4": CallForm(
        "<|tool_call>call:{name}{", "}<tool_call|>", arguments="gemma", parameter=('<|"|>', '<|"|>')
    ),
}
CALL_FORMS = {
    name: forms if isinstance(forms, tuple) else (forms,)
    for names, forms in _FORMS.items()
    for name in names.split()
}
