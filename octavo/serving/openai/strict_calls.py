"""`strict_tag`: holds calls that a model may make (`tool_choice` auto) to the schemas of strict tools.

Used by `tools`. The tag begins where the model begins a call in its own format; the text before, and whether
there is a call at all, stay free. As in vLLM, other tools of the request need a known name and an object.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from octavo.serving.foreign_fields import note_once
from octavo.serving.openai.call_forms import CALL_FORMS, CallForm
from octavo.serving.openai.protocol import Function

SPECIAL = "special_tokens"
"""The key by which a tag made here is known."""
Format = dict[str, Any]
_PATTERNS = {"{n}": "[0-9]+", "{s}": r"[ \n]?", "{type}": "(number|integer|boolean|null|object|array)"}
_HOLE = re.compile(f"({'|'.join(map(re.escape, _PATTERNS))})")
_MAX_REFERENCES = 16
"""Of a schema that is written out, so that it stays small: definitions may refer to others twice."""
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}
_TEXT: Format = {"type": "any_text"}


def strict_tag(
    functions: Sequence[Function],
    parser: str,
    special_tokens: Mapping[str, int],
    *,
    level: str,
    is_parallel: bool,
) -> Format | None:
    """A structural tag; None where nothing asks for one, or where calls of this format cannot be held to one.

    parser: name of the format of calls
    special_tokens: ids of the tokenizer's, by text
    level: "function" holds the calls of any tools to their names, "parameter" to their schemas too
    """
    if level == "auto" and not any(function.strict for function in functions):
        return None
    forms = (form.of(special_tokens) for form in CALL_FORMS.get(parser, ()))
    if (form := next(filter(None, forms), None)) is None:
        note_once("field", "strict", "has no effect on calls in this model's format.")
        return None
    written = "\0".join((form.call, form.end, *form.block, *form.parameter, *form.others))
    special = {text: i for text, i in special_tokens.items() if text in written}
    is_strict = [level == "parameter" or bool(function.strict) for function in functions]
    free = _free([text for text in special if text in "".join(form.parameter)])
    calls = [_call(form, *each, free) for each in zip(functions, is_strict, strict=True)]
    return {"format": _answer(form, calls, special, is_parallel=is_parallel), SPECIAL: special}


def reaches_into_reasoning(parser: str) -> bool:
    """Whether calls of this format stand among thoughts, so that a grammar must begin with these."""
    return any(form.others for form in CALL_FORMS.get(parser, ()))


def _answer(form: CallForm, calls: list[Format], special: Iterable[str], *, is_parallel: bool) -> Format:
    opening, closing = form.block
    tags = calls
    if opening:
        inner = {
            "type": "tags_with_separator",
            "tags": calls,
            "separator": form.separator,
            "at_least_one": True,
            "stop_after_first": not is_parallel,
        }
        tags = [_between(opening, inner, closing)]
    if form.is_first:
        other = {"type": "regex", "pattern": r"([ \n\t]*[^\[ \n\t](.|\n)*)?"}
        return {"type": "or", "elements": [*tags, other]}
    others = [_between(mark, _literal(""), "") for mark in form.others]
    triggers = dict.fromkeys(_trigger(tag["begin"], form, special) for tag in [*tags, *others])
    return {
        "type": "triggered_tags",
        "triggers": [*triggers],
        "tags": [*tags, *others],
        "stop_after_first": not (is_parallel or others),
    }


def _trigger(begin: str, form: CallForm, special: Iterable[str]) -> str:
    """What tells a call from text: a special token, or all up to the tool's name or a line's end."""
    if token := next((text for text in special if begin.startswith(text)), ""):
        return token
    before_name = form.call.partition("{name}")[0]
    known = begin if form.block[0] else begin[: len(before_name)]
    return known.partition("\n")[0] or begin


def _free(tokens: list[str]) -> Format:
    """Arguments of any kind, in which a format has these tokens."""
    if not tokens:
        return _TEXT
    texts = {"type": "tag", "begin": "", "content": _TEXT, "end": tokens}
    return _sequence([{"type": "star", "content": texts}, _TEXT])


def _call(form: CallForm, function: Function, is_strict: bool, free: Format) -> Format:
    schema = function.parameters or _NO_ARGUMENTS
    if form.arguments == "json":
        arguments = _json(schema if is_strict else {"type": "object"})
    else:
        needs_schema = is_strict or form.arguments == "python"  # whose end no text tells
        is_nested = form.arguments in ("gemma", "elements")
        if is_nested and json.dumps(schema).count('"$ref"') > _MAX_REFERENCES:
            needs_schema = False
        try:
            arguments = _WRITERS[form.arguments](form, schema) if needs_schema else free
        except (_OpenError, RecursionError):  # of a type that contains itself
            arguments = free
    return _between(form.call.replace("{name}", function.name), arguments, form.end)


def _tags(form: CallForm, schema: Mapping[str, Any]) -> Format:
    members = _members(schema)
    tags = [_tag(form, key, value) for key, value, _ in members]
    return _sequence([tag if m[2] else _optional(tag) for tag, m in zip(tags, members, strict=True)])


def _tag(form: CallForm, key: str, schema: Mapping[str, Any]) -> Format:
    is_text = _is_text(schema)
    content = _plain_text(schema) if is_text else _value(form, schema)
    known = {"{is_text}": str(is_text).lower(), "{key}": key} | ({"{type}": "string"} if is_text else {})
    before, behind = form.parameter
    for hole, text in known.items():
        before, behind = before.replace(hole, text), behind.replace(hole, text)
    return _between(before, content, behind)


def _value(form: CallForm, schema: Mapping[str, Any]) -> Format:
    """A value that is no text: JSON, or elements."""
    if form.arguments == "elements" and schema.get("type") == "object" and schema.get("properties"):
        return _tags(form, schema)
    if form.arguments == "elements" and schema.get("type") == "array" and "items" in schema:
        return {"type": "star", "content": _tag(form, "item", _part(schema, schema["items"]))}
    return _json(schema)


def _python(_: CallForm, schema: Mapping[str, Any]) -> Format:
    return _separated(schema, "{}=", ", ", _python_value)


def _python_value(schema: Mapping[str, Any]) -> Format:
    if schema.get("type") == "boolean":
        return _either([_literal("True"), _literal("False")])
    return _literal("None") if schema.get("type") == "null" else _json(schema)


def _gemma(form: CallForm, schema: Mapping[str, Any]) -> Format:
    """Members between braces. Raises _OpenError."""
    quote = form.parameter[0]

    def value(schema: Mapping[str, Any]) -> Format:
        if _is_text(schema):
            return _between(quote, _plain_text(schema), quote)
        match schema.get("type"):
            case "object":
                return _between("{", _separated(schema, "{}:", ",", value), "}")
            case "array":
                item = value(_part(schema, schema.get("items")))
                more = {"type": "star", "content": _sequence([_literal(","), item])}
                return _between("[", _optional(_sequence([item, more])), "]")
            case "integer" | "number" | "boolean" | "null":
                return _json(schema)
        raise _OpenError

    return _separated(schema, "{}:", ",", value)


class _OpenError(Exception):
    """A schema does not say how a value is written: the call's arguments stay free."""


_WRITERS: dict[str, Callable[[CallForm, Mapping[str, Any]], Format]] = {
    "tags": _tags,
    "elements": _tags,
    "python": _python,
    "gemma": _gemma,
}


def _separated(
    schema: Mapping[str, Any], name: str, separator: str, write: Callable[[Mapping[str, Any]], Format]
) -> Format:
    """The members of an object, those that it needs first."""
    members = sorted(_members(schema), key=lambda member: not member[2])
    written = [_sequence([_literal(name.format(key)), write(value)]) for key, value, _ in members]
    more = [_sequence([_literal(separator), each]) for each in written]
    tail = [each if member[2] else _optional(each) for each, member in zip(more, members, strict=True)]
    starts = range(1 if members and members[0][2] else len(members))
    choices = [_sequence([written[start], *tail[start + 1 :]]) for start in starts]
    if not choices:
        return _literal("")
    return choices[0] if members[0][2] else _optional(_either(choices))


def _members(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], bool]]:
    """Name, schema and whether it must be there, of each property."""
    properties, needed = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        return []
    needed = needed if isinstance(needed, list) else []
    return [(key, _part(schema, value), key in needed) for key, value in properties.items()]


def _part(whole: Mapping[str, Any], part: Any) -> Mapping[str, Any]:
    """A schema within another, with the definitions that it may refer to; a reference is what it means."""
    schema = part if isinstance(part, dict) else {}
    kept = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
    match str(schema.get("$ref", "")).split("/"):
        case ["#", ("$defs" | "definitions") as place, name] if isinstance(kept.get(place), dict):
            meant = kept[place].get(name)
            schema = meant if isinstance(meant, dict) and "$ref" not in meant else schema
    return {**kept, **schema}


def _is_text(schema: Mapping[str, Any]) -> bool:
    given = schema.get("type")
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if given is None and isinstance(values, list) and values:
        return all(isinstance(value, str) for value in values)
    return given == "string" or (isinstance(given, list) and "string" in given)


def _plain_text(schema: Mapping[str, Any]) -> Format:
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if isinstance(values, list) and values:
        return _either([_literal(value if isinstance(value, str) else str(value)) for value in values])
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and schema.get("type") == "string" and pattern[:1] + pattern[-1:] == "^$":
        return {"type": "regex", "pattern": pattern[1:-1]}
    return _TEXT


def _between(before: str, content: Format, behind: str) -> Format:
    begin, *rest = _HOLE.split(before)
    end, *tail = _HOLE.split(behind)
    tag = {"type": "tag", "begin": begin, "content": content, "end": end}
    if rest:
        inner = _sequence([*map(_piece, rest), {**tag, "begin": ""}])
        tag = {**tag, "content": inner, "end": ""}
    return _sequence([tag, *map(_piece, tail)]) if any(tail) else tag


def _piece(text: str) -> Format:
    return {"type": "regex", "pattern": _PATTERNS[text]} if text in _PATTERNS else _literal(text)


def _json(schema: Mapping[str, Any]) -> Format:
    return {"type": "json_schema", "json_schema": dict(schema)}


def _literal(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


def _either(elements: list[Format]) -> Format:
    return {"type": "or", "elements": elements}


def _sequence(elements: list[Format]) -> Format:
    return {"type": "sequence", "elements": elements} if elements else _literal("")
