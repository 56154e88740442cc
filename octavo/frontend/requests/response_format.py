"""`structured_outputs_of`: the form that a request over HTTP asks for, however it says so.

Called by the HTTP layer. OpenAI's `response_format`, vLLM's `structured_outputs` and the `guided_*` fields
before it come to the same; they may be given together as long as only one names a kind.
"""

from collections.abc import Mapping
from typing import Any

from octavo.base.errors import RequestError, wrong
from octavo.messages.structured import KINDS, StructuredOutputsParams

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_decoding_backend": "backend",
    "guided_whitespace_pattern": "whitespace_pattern",
}
FIELDS = ("response_format", "structured_outputs", *_GUIDED)
"""Fields of a request that are read here."""
_NAME = "response_format"


def structured_outputs_of(request: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """None when a text of any form will do. Raises RequestError.

    request: values of FIELDS as JSON has them; None and absent are the same
    """
    stated = request.get("structured_outputs")
    if stated is not None and not isinstance(stated, Mapping):
        raise wrong("structured_outputs", "must be an object")
    guided = {new: request[old] for old, new in _GUIDED.items() if request.get(old) is not None}
    parts = [stated or {}, _from_response_format(request.get(_NAME)), guided]
    kinds = [kind for part in parts for kind in KINDS if part.get(kind) is not None]
    if len(kinds) > 1:
        raise RequestError(
            "You can only use one kind of structured outputs constraint but multiple are specified: "
            f"{', '.join(kinds)}.",
            "structured_outputs",
        )
    if not kinds and stated is None:
        return None
    merged = {name: value for part in parts for name, value in part.items() if value is not None}
    return StructuredOutputsParams.of(merged)


def _from_response_format(value: object) -> dict[str, Any]:
    if value is None:
        return {}
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema" and isinstance(value, Mapping):
        form = value.get("json_schema")
        is_strict = isinstance(form, Mapping) and form.get("strict") is True
        return {"json": _schema(form), "disable_additional_properties": is_strict or None}
    if kind == "structural_tag" and isinstance(value, Mapping):
        return {"structural_tag": dict(value)}
    raise RequestError(
        "response_format must be an object whose type is text, json_object, json_schema or structural_tag.",
        _NAME,
    )


def _schema(value: object) -> Any:
    """What `json_schema` holds beside its name. Schemas are always kept; `strict` closes their objects."""
    schema = value.get("schema") if isinstance(value, Mapping) else None
    if schema is None:
        raise RequestError(
            'response_format of type json_schema needs {"json_schema": {"name": …, "schema": {…}}}.', _NAME
        )
    return schema
