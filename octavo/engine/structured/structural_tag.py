"""A structural tag as a grammar in Lark: free text with constrained parts, in both forms that vLLM knows.

Called by `lark`. {structures, triggers} is the earlier form; {format} nests formats of the types below, named
and meant as in xgrammar. Free text ends where what follows begins: that is a literal text, or the end of all.
{special_tokens: {text: id}}: parts of literal texts that are tokens of their own; no free text holds them.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import llguidance

from octavo.base.errors import RequestError

Form = Mapping[str, Any]
Ends = Sequence[str] | None
"""Literal texts one of which follows, and is written too; [""]: the end of all; None: something else."""
_ASCII_ONLY = "d"


def tag_to_lark(tag: dict[str, Any], write_schema: Callable[[Any], str]) -> str:
    """Rules, `start` the first. Raises RequestError; write_schema: a JSON schema as text."""
    writer = _Writer(write_schema, _special_tokens(tag))
    start = writer.write(tag["format"] if "format" in tag else _of_structures(tag), [""])
    return "\n".join([f"start: {start}", *writer.rules, r"TEXT: /(.|\n)*/"])


class _Writer:
    """Of one grammar. A method per type writes the expression of a format, and of its ends."""

    def __init__(self, write_schema: Callable[[Any], str], special_tokens: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        """Beside `start`."""
        self._write_schema = write_schema
        self._special = special_tokens
        names = sorted(map(re.escape, special_tokens), key=len, reverse=True)
        self._parts = re.compile(f"({'|'.join(names)})" if names else "$^")

    def write(self, form: object, ends: Ends) -> str:
        """Write a format of any type. Raises RequestError."""
        kind = form.get("type") if isinstance(form, Mapping) else None
        if not isinstance(form, Mapping) or not isinstance(kind, str) or kind not in _TYPES:
            raise _wrong(f"formats are objects whose type is one of {', '.join(_TYPES)}, not {kind!r:.60}")
        return _TYPES[kind](self, form, ends)

    def const_string(self, form: Form, ends: Ends) -> str:
        """{value}."""
        return f"{self._literal(_text(form, 'value'))}{self._then(ends)}"

    def json_schema(self, form: Form, ends: Ends) -> str:
        """{json_schema}."""
        if not isinstance(schema := form.get("json_schema"), dict | bool):
            raise _wrong("a json_schema needs json_schema, an object")
        return f"(%json {self._write_schema(schema)}){self._then(ends)}"

    def regex(self, form: Form, ends: Ends) -> str:
        """{pattern}."""
        return f"/{llguidance.regex_to_lark(_text(form, 'pattern'), _ASCII_ONLY)}/{self._then(ends)}"

    def any_text(self, _: Form, ends: Ends) -> str:
        """Free text."""
        if ends is None:
            raise _wrong("any_text must come last, or before a const_string or a tag")
        return self._text_until([text for text in ends if text]) if any(ends) else "TEXT"

    def sequence(self, form: Form, ends: Ends) -> str:
        """{elements}, one after the other."""
        elements, written, is_begun = _list(form, "elements"), list[str](), False
        for element, following in zip(elements, [*elements[1:], None], strict=True):
            begin = _beginning(following)
            is_free = isinstance(element, Mapping) and element.get("type") in _FREE
            next_ends = ends if following is None else [begin] if begin and is_free else None
            rest = {**element, _BEGINNINGS[element["type"]]: ""} if is_begun else element
            written.append(self.write(rest, next_ends))
            is_begun = following is not None and next_ends is not None
        return " ".join(written)

    def either(self, form: Form, ends: Ends) -> str:
        """{elements}, one of them."""
        return f"({' | '.join(self.write(element, ends) for element in _list(form, 'elements'))})"

    def repeated(self, form: Form, ends: Ends) -> str:
        """{content} or nothing, any number of times, once or more."""
        return f"({self.write(form.get('content'), None)}){_REPEATED[form['type']]}{self._then(ends)}"

    def tag(self, form: Form, ends: Ends) -> str:
        """{begin, content, end}; end may be a list, one of which ends it."""
        closings = form.get("end")
        closings = [closings] if isinstance(closings, str) else closings
        if not (isinstance(closings, list) and closings and all(isinstance(text, str) for text in closings)):
            raise _wrong("a tag's end must be a string, or a list of strings")
        inner = self.write(form.get("content"), closings if all(closings) else ends)
        return f"{self._literal(_text(form, 'begin'))} {inner}{self._then(ends) if all(closings) else ''}"

    def triggered_tags(self, form: Form, ends: Ends) -> str:
        """{triggers, tags}: free text, in which a trigger begins a tag; {at_least_one}: a tag comes first."""
        triggers, tags = _list(form, "triggers"), _list(form, "tags")
        free = [self._triggered(tag, triggers) for tag in tags]
        choice = self._rule(" | ".join(free))
        first = f"({' | '.join(self.tag(tag, None) for tag in tags)})" if form.get("at_least_one") else ""
        if not form.get("stop_after_first"):
            return f"{first} {choice}* {self.any_text({}, ends)}"
        end = self._then(ends)
        return f"{first}{end}" if first else f"({choice}{end} | {self.any_text({}, ends)})"

    def tags_with_separator(self, form: Form, ends: Ends) -> str:
        """{tags, separator}, once or more if {at_least_one}."""
        tag = self._rule(" | ".join(self.tag(tag, None) for tag in _list(form, "tags")))
        more = "" if form.get("stop_after_first") else f" ({self._literal(_text(form, 'separator'))} {tag})*"
        return f"({tag}{more}){'' if form.get('at_least_one') else '?'}{self._then(ends)}"

    def _triggered(self, tag: Any, triggers: Iterable[Any]) -> str:
        begin = _beginning({"type": "tag", **tag}) if isinstance(tag, Mapping) else ""
        trigger = next((t for t in triggers if isinstance(t, str) and t and begin.startswith(t)), None)
        if trigger is None:
            raise _wrong(f"begin {begin!r:.100} starts with none of the triggers")
        text = self._text_until([trigger])
        return f"{text} {self.tag({**tag, 'begin': begin.removeprefix(trigger)}, None)}"

    def _text_until(self, texts: Sequence[str]) -> str:
        """Return free text with the first of these behind it; a token of its own ends it by itself."""
        found = {text: match.start() for text in texts if (match := self._parts.search(text))}
        rules = [f"TEXT {self._literal(text[start:])}" for text, start in found.items()]
        if plain := [text for text in texts if text not in found]:
            rules.append(self._rule(f"TEXT ({' | '.join(map(self._literal, plain))})", "[lazy]"))
        return self._rule(" | ".join(rules)) if len(rules) > 1 or not plain else rules[0]

    def _then(self, ends: Ends) -> str:
        texts = [text for text in ends or () if text]
        return f" ({' | '.join(map(self._literal, texts))})" if texts else ""

    def _literal(self, text: str) -> str:
        """Return a text that is written as it is, token by token where these are special."""
        parts = [part for part in self._parts.split(text) if part] or [""]
        special = self._special
        return " ".join(
            f"<[{special[part]}]>" if part in special else json.dumps(part, ensure_ascii=False)
            for part in parts
        )

    def _rule(self, expression: str, option: str = "") -> str:
        name = f"rule_{len(self.rules)}"
        self.rules.append(f"{name}{option}: {expression}")
        return name


_TYPES: dict[str, Callable[[_Writer, Form, Ends], str]] = {
    "const_string": _Writer.const_string,
    "json_schema": _Writer.json_schema,
    "regex": _Writer.regex,
    "any_text": _Writer.any_text,
    "sequence": _Writer.sequence,
    "or": _Writer.either,
    "optional": _Writer.repeated,
    "star": _Writer.repeated,
    "plus": _Writer.repeated,
    "tag": _Writer.tag,
    "triggered_tags": _Writer.triggered_tags,
    "tags_with_separator": _Writer.tags_with_separator,
}
_REPEATED = {"optional": "?", "star": "*", "plus": "+"}
_FREE = ("any_text", "triggered_tags")
_BEGINNINGS = {"const_string": "value", "tag": "begin"}


def _beginning(form: object) -> str:
    """Return the literal text that a format begins with; "" if there is none."""
    name = _BEGINNINGS.get(str(form.get("type")), "") if isinstance(form, Mapping) else ""
    text = form.get(name) if isinstance(form, Mapping) else ""
    return text if isinstance(text, str) else ""


def _special_tokens(tag: Form) -> dict[str, int]:
    """Return the ids by text. Raises RequestError."""
    given = tag.get("special_tokens", {})
    if not (isinstance(given, dict) and all(text and type(i) is int and i >= 0 for text, i in given.items())):
        raise _wrong("special_tokens must be an object of token ids by text")
    return given


def _of_structures(tag: Form) -> Form:
    """Translate the earlier form. Raises RequestError."""
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not (isinstance(structures, list) and structures and isinstance(triggers, list) and triggers):
        raise _wrong('needs "structures", a list of {begin, schema, end}, and "triggers", a list of strings')
    tags = []
    for structure in structures:
        given = structure if isinstance(structure, dict) else {}
        if not (isinstance(given.get("begin"), str) and isinstance(given.get("end"), str)):
            raise _wrong("structures must be objects with strings begin and end")
        tags.append({**given, "content": {"type": "json_schema", "json_schema": given.get("schema", {})}})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _list(form: Form, name: str) -> list[Any]:
    value = form.get(name)
    if not isinstance(value, list) or not value:
        raise _wrong(f"a {form['type']} needs {name}, a list that is not empty")
    return value


def _text(form: Form, name: str) -> str:
    if not isinstance(value := form.get(name), str):
        raise _wrong(f"a format needs {name}, a string")
    return value


def _wrong(what: str) -> RequestError:
    return RequestError(f"structured_outputs.structural_tag: {what}.", "structured_outputs")
