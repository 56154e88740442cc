"""Calls whose arguments stand in tags of their own, one by one, as untyped text: Qwen 3 Coder and others.

Qwen 3 Coder: `<tool_call><function=f><parameter=city>Paris</parameter></function></tool_call>`. What
type a text is of, the tool's schema says; where it says nothing, what reads as JSON is JSON.
"""

import html
import json
from collections.abc import Mapping
from typing import Any, ClassVar

from octavo.frontend.parsers.call_object import call_object
from octavo.frontend.parsers.scanner import Malformed, Move, Parser, refuse_constant

Schemas = Mapping[str, Mapping[str, Any] | None]
_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""What templates show to models."""
_TYPES: dict[type, set[str]] = {
    str: {"string"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}


class TaggedParser(Parser):
    """Text, and blocks of calls. This one: Qwen 3 Coder, where a call may also stand outside of a block."""

    shows_special_tokens = True
    opening, closing = "<tool_call>", "</tool_call>"
    """Of a block; "": there is none."""
    call, name_end, call_end = "<function=", ">", "</function>"
    parameter, key_end, parameter_end = "<parameter=", ">", "</parameter>"
    begins: ClassVar[tuple[str, ...]] = ("<tool_call><function=", "<tool_call>\n<function=")
    padding = "\n"
    """Once on either side of a text, and no part of it."""
    needs_block = False
    takes_json = False
    """A call may also be a JSON object."""

    def __init__(self, schemas: Schemas | None = None) -> None:
        """schemas: of the arguments, by name of the tool."""
        super().__init__()
        self.schemas = schemas or {}
        self._in_block = False

    def __init_subclass__(cls) -> None:
        if "begins" not in vars(cls):
            cls.begins = (cls.opening or cls.call,)

    def read(self) -> Move[None]:
        """The format; what is malformed becomes text, and the calls beside it remain."""
        while begin := (yield from self.copy_until(self.text, *self._next_marks())):
            if begin == self.opening:
                yield from self.attempt(self._block(), begin)
            elif begin == self.call:
                yield from self.attempt(self._call(), begin)
            else:
                self._in_block = False

    def _next_marks(self) -> list[str]:
        is_open = self._in_block or not self.needs_block
        return self._named(self.opening, self.call * is_open, self.closing * self._in_block)

    def _named(self, *marks: str) -> list[str]:
        return [mark for mark in dict.fromkeys(marks) if mark]

    def _block(self) -> Move[None]:
        """Its calls; there may be none."""
        if self.takes_json and (yield from self.skip_space()) == "{":
            yield from call_object(self)
        before, marker = yield from self.take_until(self.call, self.closing)
        if marker != self.call and (before.strip() or not marker) and not self.num_calls:
            raise Malformed
        self._in_block = marker == self.call
        while marker == self.call:
            yield from self._call()
            _, marker = yield from self.take_until(self.call, self.closing)
        self._in_block = False

    def _call(self) -> Move[None]:
        name, marker = yield from self._name()
        if not marker:
            raise Malformed
        self.start_call(name)
        head = "{"
        ends = self._named(self.parameter, self.call_end, self.call, self.closing)
        while marker == self.parameter:
            key, is_text = yield from self._key()
            text, marker = yield from self.take_until(self.parameter_end, *ends)
            if not marker:
                break  # cut short
            text = text.removeprefix(self.padding).removesuffix(self.padding)
            types = {"string"} if is_text else types_of(property_of(self.schemas.get(name), key))
            self.arguments(f"{head}{json.dumps(key, ensure_ascii=False)}: {typed(text, types, is_text)}")
            head = ", "
            if marker == self.parameter_end:  # which models forget
                _, marker = yield from self.take_until(*ends)
        self.arguments("{}" if head == "{" else "}")
        if marker != self.call_end:
            self.untake(marker)

    def _name(self) -> Move[tuple[str, str]]:
        """The tool, and what comes next: a parameter or the call's end. Raises Malformed."""
        ends = self._named(self.parameter, self.call_end, self.call, self.closing)
        name, end = yield from self.take_until(self.name_end, *ends)
        if end != self.name_end:
            self.untake(end)
            raise Malformed
        _, marker = yield from self.take_until(*ends)
        return self._plain(name), marker

    def _key(self) -> Move[tuple[str, bool]]:
        """The name of a parameter, and whether it is known to be text."""
        key, _ = yield from self.take_until(self.key_end)
        return self._plain(key), False

    def _plain(self, name: str) -> str:
        return name.strip()


class SeedToolParser(TaggedParser):
    """Seed-OSS."""

    opening, closing = "<seed:tool_call>", "</seed:tool_call>"
    padding = ""
    needs_block = True


class MiniMaxParser(TaggedParser):
    """MiniMax M2."""

    opening, closing = "<minimax:tool_call>", "</minimax:tool_call>"
    call, call_end = "<invoke name=", "</invoke>"
    parameter = "<parameter name="
    padding = ""
    needs_block = True

    def _plain(self, name: str) -> str:
        return name.strip().strip("\"'")


class DotsParser(MiniMaxParser):
    """Dots 3."""

    opening, closing = "<dots_function_call>", "</dots_function_call>"
    padding = "\n"
    takes_json = True


class MiniCPMParser(MiniMaxParser):
    """MiniCPM 5: calls without a block, and texts perhaps as XML's CDATA."""

    opening, closing = "", ""
    call, call_end = "<function name=", "</function>"
    parameter, parameter_end = "<param name=", "</param>"
    needs_block = False


class Step3Parser(TaggedParser):
    """Step 3."""

    opening, closing = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
    call, name_end, call_end = '<steptml:invoke name="', '">', "</steptml:invoke>"
    parameter, key_end, parameter_end = '<steptml:parameter name="', '">', "</steptml:parameter>"
    padding = ""
    needs_block = True


class DeepSeek32Parser(TaggedParser):
    """DeepSeek V3.2: parameters say whether they are text."""

    opening, closing = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"
    call, name_end, call_end = '<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>"
    parameter, parameter_end = '<｜DSML｜parameter name="', "</｜DSML｜parameter>"
    padding = ""
    needs_block = True

    def _key(self) -> Move[tuple[str, bool]]:
        key, _ = yield from self.take_until(self.key_end)
        name, _, rest = key.partition('"')
        return html.unescape(name), 'string="true"' in rest or 'type="string"' in rest


class DeepSeek4Parser(DeepSeek32Parser):
    """DeepSeek V4."""

    opening, closing = "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"


class DeepSeek41Parser(DeepSeek32Parser):
    """DeepSeek V4.1: spaces in the tags."""

    opening, closing = "<｜DSML｜ calls>", "</｜DSML｜ calls>"
    call, call_end = '<｜DSML｜ invoke name="', "</｜DSML｜ invoke>"
    parameter, parameter_end = '<｜DSML｜ parameter name="', "</｜DSML｜ parameter>"


class KimiK3Parser(DeepSeek32Parser):
    """Kimi K3: elements between tokens, with their attributes."""

    opening, closing = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"
    call, name_end, call_end = '<|open|>call tool="', "<|sep|>", "<|close|>call<|sep|>"
    parameter, key_end = '<|open|>argument key="', "<|sep|>"
    parameter_end = "<|close|>argument<|sep|>"

    def _plain(self, name: str) -> str:
        return html.unescape(name.partition('"')[0])


class GlmParser(TaggedParser):
    """GLM 4.5 and after: `<tool_call>f<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>`."""

    opening, closing = "", ""
    call, call_end = "<tool_call>", "</tool_call>"
    parameter, key_end, value, parameter_end = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
    padding = ""

    def _call(self) -> Move[None]:
        if not (yield from self.skip_space()) or not (yield from self.take_if(self.call_end)):
            yield from super()._call()

    def _name(self) -> Move[tuple[str, str]]:
        name, marker = yield from self.take_until(*self._named(self.parameter, self.call_end, self.call))
        if not name.strip() or any(mark in name for mark in "<{[") or marker == self.call:
            self.untake(marker)
            raise Malformed  # another family's call
        return name.strip(), marker

    def _key(self) -> Move[tuple[str, bool]]:
        key, _ = yield from self.take_until(self.key_end)
        if self.value:
            yield from self.take_until(self.value)
        return key.strip(), False


class SolarParser(GlmParser):
    """Solar Open 2."""

    call, call_end = "<|tool_call:start|>", "<|tool_call:end|>"
    parameter, key_end, value = "<|tool_arg:start|>", "<|tool_arg:value|>", ""
    parameter_end = "<|tool_arg:end|>"


class HorizonParser(GlmParser):
    """K2 Horizon: blocks of such calls, or of JSON."""

    opening, closing = "<ifm|tool_calls>", "</ifm|tool_calls>"
    call, call_end = "<ifm|tool_call>", "</ifm|tool_call>"
    parameter, key_end = "<ifm|arg_key>", "</ifm|arg_key>"
    value, parameter_end = "<ifm|arg_value>", "</ifm|arg_value>"
    needs_block = True

    def _call(self) -> Move[None]:
        if (yield from self.skip_space()) == "{":
            yield from call_object(self)
            yield from self.take_until(self.call_end)
        else:
            yield from super()._call()


class HyParser(GlmParser):
    """Hunyuan 3 and 4: blocks of such calls; a checkpoint's tags may have a suffix, `<tool_call:612>`."""

    begins = ("<tool_calls",)
    _names = ("tool_calls", "tool_call", "arg_key", "arg_value")

    def read(self) -> Move[None]:
        """The text up to the first block, which tells the suffix; then the format."""
        while opening := (yield from self.copy_until(self.text, *self.begins)):
            suffix, end = yield from self.take_until(">", "<")
            if end == ">" and (not suffix or suffix.startswith(":")):
                break
            self.untake(end)
            self.text(opening + suffix)
        else:
            return
        block, call, key, value = (f"{name}{suffix}>" for name in self._names)
        self.opening, self.closing, self.call, self.call_end = (
            f"<{block}",
            f"</{block}",
            f"<{call}",
            f"</{call}",
        )
        self.parameter, self.key_end = f"<{key}", f"</{key}"
        self.value, self.parameter_end = f"<{value}", f"</{value}"
        self.needs_block = True
        yield from self.attempt(self._block(), self.opening)
        yield from super().read()

    def _name(self) -> Move[tuple[str, str]]:
        name, marker = yield from self.take_until(self.parameter, self.call_end, "<tool_sep")
        if marker == "<tool_sep":
            _, marker = yield from self.take_until(self.parameter, self.call_end)
        if not name.strip() or "<" in name:
            raise Malformed
        return name.strip(), marker


def property_of(schema: Mapping[str, Any] | None, key: str) -> Any:
    """The schema of one property; None where nothing is said."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties.get(key) if isinstance(properties, Mapping) else None


def types_of(schema: Any) -> set[str]:
    """Names of the types that a schema allows; none: it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    stated = schema.get("type", [])
    types = {stated} if isinstance(stated, str) else {name for name in stated if isinstance(name, str)}
    for value in schema.get("enum", ()) if not types else ():
        types |= _TYPES[type(value)]
    for choices in (schema.get("anyOf", ()), schema.get("oneOf", ())):
        types = types.union(*map(types_of, choices))
    return types


def typed(text: str, types: set[str], is_text: bool = False) -> str:
    """The text as JSON; is_text: it is known to be none."""
    if is_text:
        return json.dumps(text, ensure_ascii=False)
    word = _PYTHON.get(text.strip(), text)
    try:
        value = json.loads(word, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    is_text = "string" in types and not _TYPES[type(value)] & types - {"string"}
    return json.dumps(text, ensure_ascii=False) if is_text else word.strip()
