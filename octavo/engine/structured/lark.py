"""`StructuredOutputsParams` as one grammar in Lark, in the dialect of llguidance.

Called by the back end's `translate`. Every grammar begins with the line that switches forcing off.
"""

import json
from functools import partial
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from octavo.base.errors import RequestError
from octavo.engine.structured.structural_tag import tag_to_lark
from octavo.messages.structured import StructuredOutputsParams

_DIRECTIVE = "%llguidance"
_HEADER = f'{_DIRECTIVE} {{"no_forcing": true}}'
MAX_INDENT = 128
WHITE_SPACE = rf"[ \t]{{1,4}}|\r?\n[ \t]{{0,{MAX_INDENT}}}"
"""Between JSON tokens. Bounded, because small models may write blanks until they run out of tokens."""
_NO_WHITE_SPACE = {"whitespace_flexible": False}
_USUAL_OPTIONS = ({"whitespace_pattern": WHITE_SPACE}, _NO_WHITE_SPACE)
_ASCII_ONLY = "d"
"""Character classes that mean ASCII: \\d."""


def to_lark(params: StructuredOutputsParams) -> str:
    """Raises RequestError for a grammar or tag that cannot be read; what it says is checked by compiling."""
    return f"{_HEADER}\n{_rules(params)}"


def schema_of(grammar: str) -> dict[str, Any] | None:
    """Return the schema that is all of a grammar; None for another grammar, or for unusual white space."""
    head = f"{_HEADER}\nstart: %json "
    try:
        schema = json.loads(grammar.removeprefix(head)) if grammar.startswith(head) else None
    except (ValueError, RecursionError):  # a user's own grammar may begin like that
        return None
    return schema if isinstance(schema, dict) and schema.get("x-guidance") in _USUAL_OPTIONS else None


def _rules(params: StructuredOutputsParams) -> str:
    match params.kind:
        case "grammar":
            return _from_grammar(params.grammar or "")
        case "structural_tag":
            assert isinstance(params.structural_tag, dict)
            return tag_to_lark(params.structural_tag, partial(_schema, params=params))
        case "regex":
            start = f"/{llguidance.regex_to_lark(params.regex or '', _ASCII_ONLY)}/"
        case "choice":
            start = " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice or ())
        case kind:
            start = f"%json {_schema(params.json if kind == 'json' else {'type': 'object'}, params)}"
    return f"start: {start}"


def _from_grammar(grammar: str) -> str:
    try:
        lark: str = any_to_lark(grammar)
    except Exception as error:  # the library has no narrower kind
        raise RequestError(f"Grammar error: {error}", "structured_outputs") from error
    return lark.removeprefix(f"{_DIRECTIVE} {{}}")


def _schema(schema: Any, params: StructuredOutputsParams) -> str:
    """Return the schema as text, with the options for JSON where the library looks for them."""
    if params.disable_additional_properties:
        schema = _closed(schema, has_parts='"allOf"' in json.dumps(schema))
    white_space: dict[str, Any] = {"whitespace_pattern": params.whitespace_pattern or WHITE_SPACE}
    if params.disable_any_whitespace:
        white_space = _NO_WHITE_SPACE
    if schema is True:
        schema = {}
    if isinstance(schema, dict):
        own = schema.get("x-guidance")
        schema = {**schema, "x-guidance": white_space | (own if isinstance(own, dict) else {})}
    return json.dumps(schema, ensure_ascii=False)


_DEFINITIONS = ("$defs", "definitions")
_MAPS = ("properties", "patternProperties", "dependentSchemas", *_DEFINITIONS)
"""Keywords that hold schemas by name."""
_VALUES = ("const", "enum", "default", "examples")
_COMBINED = ("allOf", "anyOf", "oneOf", "if", "then", "else")
"""Keywords whose schemas judge the same object."""


def _closed(schema: Any, *, is_part: bool = False, has_parts: bool = False) -> Any:
    """Return the schema, where objects have only the properties that are named.

    is_part: it judges an object together with other schemas, which may name more: then it stays open
    has_parts: there is an allOf somewhere, so that definitions may be such parts
    """
    if isinstance(schema, list):
        return [_closed(item, is_part=is_part, has_parts=has_parts) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kinds = schema.get("type", "object")
    is_object = kinds == "object" or (isinstance(kinds, list) and "object" in kinds)
    is_object = is_object and isinstance(schema.get("properties"), dict)
    shares = is_part or "allOf" in schema or (is_object and any(key in schema for key in _COMBINED))
    closed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            is_open = has_parts and key in _DEFINITIONS
            parts = value.items()
            closed[key] = {name: _closed(part, is_part=is_open, has_parts=has_parts) for name, part in parts}
        elif key in _VALUES:
            closed[key] = value
        else:
            closed[key] = _closed(value, is_part=shares and key in _COMBINED, has_parts=has_parts)
    if is_object and not shares and not {"additionalProperties", "patternProperties"} & schema.keys():
        closed["additionalProperties"] = False
    return closed
