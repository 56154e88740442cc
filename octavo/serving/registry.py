"""The families of endpoints: one line each in `ROUTE_MODULES`, and the words in which they list their routes.

Read by `app.make_app`. A module of endpoints has `ROUTES`; a handler takes the request and returns an answer,
or raises an OctavoError, which `errors` turns into one.
"""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

ROUTE_MODULES = [
    "octavo.serving.openai.models",
    "octavo.serving.openai.completions",
    "octavo.serving.openai.chat",
    "octavo.serving.openai.batch",
    "octavo.serving.openai.files",
    "octavo.serving.openai.batches",
    "octavo.serving.openai.websocket",
    "octavo.serving.openai.tokenize",
    "octavo.serving.responses.routes",
    "octavo.serving.anthropic.messages",
    "octavo.serving.generate",
    "octavo.serving.health",
    "octavo.serving.metrics_page",
    "octavo.serving.admin",
    "octavo.serving.page",
    "octavo.serving.not_yet",
]


@dataclass(frozen=True, slots=True)
class Route:
    """One path. The handler's docstring is the text in /docs."""

    path: str
    handler: Callable[[Request], Awaitable[Response]]
    methods: tuple[str, ...] = ("GET",)
    request_model: Any = None
    """msgspec type of the JSON body; None = there is none."""
    response_model: Any = None
    """msgspec type of the JSON answer; None = anything."""
    error_model: Any = None
    """msgspec type of the JSON of errors; None = the common one."""
    media_type: str = "application/json"
    """Of the answer; "" = it is empty."""
    streams: bool = False
    """Whether the answer may be server-sent events instead."""
    documented: bool = True


@dataclass(frozen=True, slots=True)
class WebSocketRoute:
    """One path that speaks WebSocket."""

    path: str
    handler: Callable[[WebSocket], Awaitable[None]]


def load_routes() -> Iterator[Route | WebSocketRoute]:
    """Every route of every module, in order."""
    for name in ROUTE_MODULES:
        yield from import_module(name).ROUTES
