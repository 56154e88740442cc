"""GET /openapi.json: the description of the API, made from the routes and the structs of bodies and answers.

The page at /docs shows it.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from octavo.base.foreign import FIELDS
from octavo.config.server import ServerConfig
from octavo.serving.registry import Route, load_routes
from octavo.version import __version__

_REFERENCE = "#/components/schemas/{name}"
_ANYTHING: dict[str, Any] = {}
_ONE_IS_NEEDED = {"CompletionRequest": ("prompt", "prompt_embeds"), "TokenizeRequest": ("prompt", "messages")}
"""Fields of which one must be given."""
_CONVERTER = re.compile(r":\w+(?=})")
"""Of a path's parameter, as in {name:path}."""


async def openapi(request: Request) -> Response:
    """The description of the API."""
    config: ServerConfig = request.app.state.config
    if config.disable_page:
        raise HTTPException(404)
    return Response(_encoded(config.strict), media_type="application/json")


@cache
def _encoded(strict: bool) -> bytes:
    return msgspec.json.encode(describe_api(strict=strict))


def describe_api(*, strict: bool) -> dict[str, Any]:
    """The OpenAPI document; strict: bodies have no fields but the known and the ignored ones."""
    routes = [route for route in load_routes() if isinstance(route, Route) and route.documented]
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = _CONVERTER.sub("", route.path)
        for method in route.methods:
            paths.setdefault(path, {})[method.lower()] = _operation(route, path, method)
    return {
        "openapi": "3.1.0",
        "info": {"title": "octavo", "version": __version__},
        "paths": paths,
        "components": {"schemas": _schemas(routes, strict=strict)},
    }


def _operation(route: Route, path: str, method: str) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    if route.media_type:
        answer[route.media_type] = {"schema": _reference(route.response_model)}
    if route.streams:
        answer["text/event-stream"] = {"schema": _ANYTHING}
    error = {"application/json": {"schema": _reference(route.error_model)}}
    name = route.handler.__name__
    operation: dict[str, Any] = {
        "tags": [route.group],
        "summary": name.replace("_", " ").title(),
        "description": route.handler.__doc__,
        "operationId": re.sub(r"\W", "_", name + path) + f"_{method.lower()}",
        "responses": {
            "200": {"description": "The answer.", **({"content": answer} if answer else {})},
            "default": {"description": "What went wrong.", "content": error},
        },
    }
    if names := re.findall(r"{(\w+)}", path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if route.request_model is not None:
        body = {"application/json": {"schema": _reference(route.request_model)}}
        operation["requestBody"] = {"required": True, "content": body}
    return operation


def _schemas(routes: Iterable[Route], *, strict: bool) -> dict[str, Any]:
    asked = {route.request_model for route in routes if route.request_model is not None}
    answered = {route.response_model for route in routes if route.response_model is not None}
    answered |= {route.error_model for route in routes}
    _, components = msgspec.json.schema_components([*asked, *answered], ref_template=_REFERENCE)
    for model in asked:
        name = model.__name__
        components[name] = _body_schema(components[name], strict=strict)
    return components


def _body_schema(schema: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    properties = {
        **schema["properties"],
        **{name: _ANYTHING for name, field in FIELDS.items() if not field.is_refused},
    }
    described = {**schema, "properties": properties, "additionalProperties": not strict}
    if (names := _ONE_IS_NEEDED.get(schema["title"])) is not None:
        given = {"not": {"type": "null"}}
        described["anyOf"] = [{"required": [name], "properties": {name: given}} for name in names]
    return described


def _reference(model: Any) -> dict[str, Any]:
    return _ANYTHING if model is None else {"$ref": _REFERENCE.format(name=model.__name__)}


ROUTES = [Route("/openapi.json", openapi, documented=False)]
