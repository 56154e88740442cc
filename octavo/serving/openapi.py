"""The description of the API: /openapi.json, from the structs that bodies become and answers are.

Called by `app`; FastAPI has the paths, this module what goes in and out.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from octavo.serving.errors import ErrorBody
from octavo.serving.fields import IGNORED
from octavo.serving.registry import Route

_REFERENCE = "#/components/schemas/{name}"
_ANYTHING: dict[str, Any] = {}
_ONE_IS_NEEDED = {"CompletionRequest": ("prompt", "prompt_embeds"), "TokenizeRequest": ("prompt", "messages")}
"""Fields of which one must be given."""


def describe(route: Route) -> dict[str, Any]:
    """Keyword arguments of FastAPI's add_api_route that describe `route`."""
    answer: dict[str, Any] = {}
    if route.media_type:
        answer[route.media_type] = {"schema": _reference(route.response_model)}
    if route.streams:
        answer["text/event-stream"] = {"schema": _ANYTHING}
    extra: dict[str, Any] = {}
    if route.request_model is not None:
        body = {"application/json": {"schema": _reference(route.request_model)}}
        extra["requestBody"] = {"required": True, "content": body}
    if names := [part[1:-1].partition(":")[0] for part in route.path.split("/") if part.startswith("{")]:
        extra["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    error = {"application/json": {"schema": _reference(route.error_model or ErrorBody)}}
    return {
        "response_class": Response,  # else FastAPI promises JSON
        "responses": {
            200: {"description": "The answer.", **({"content": answer} if answer else {})},
            "default": {"description": "What went wrong.", "content": error},
        },
        "openapi_extra": extra,
        "include_in_schema": route.documented,
    }


def schemas(routes: Iterable[Route], *, strict: bool) -> dict[str, Any]:
    """Components by name; strict: bodies have no fields but the known and the ignored ones."""
    documented = [route for route in routes if route.documented]
    asked = {route.request_model for route in documented if route.request_model is not None}
    answered = {route.response_model for route in documented if route.response_model is not None}
    answered |= {route.error_model for route in documented if route.error_model is not None}
    _, components = msgspec.json.schema_components([*asked, *answered, ErrorBody], ref_template=_REFERENCE)
    for model in asked:
        name = model.__name__
        components[name] = _body_schema(components[name], strict=strict)
    return components


def _body_schema(schema: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    properties = {**schema["properties"], **dict.fromkeys(IGNORED, _ANYTHING)}
    described = {**schema, "properties": properties, "additionalProperties": not strict}
    if (names := _ONE_IS_NEEDED.get(schema["title"])) is not None:
        given = {"not": {"type": "null"}}
        described["anyOf"] = [{"required": [name], "properties": {name: given}} for name in names]
    return described


def _reference(model: Any) -> dict[str, Any]:
    return _ANYTHING if model is None else {"$ref": _REFERENCE.format(name=model.__name__)}
