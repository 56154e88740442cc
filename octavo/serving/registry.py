"""The families of endpoints: an entry each in `ROUTE_MODULES`, and the words in which they list their routes.

Read by `app.make_app`. A module of endpoints has `ROUTES`; a handler takes the request and returns an answer,
or raises an OctavoError, which `errors` turns into one.
"""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from octavo.serving.errors import ErrorBody, error_response

ROUTE_MODULES = {
    "OpenAI": (
        "octavo.serving.openai.models",
        "octavo.serving.openai.completions",
        "octavo.serving.openai.chat",
        "octavo.serving.openai.transcriptions",
        "octavo.serving.openai.invocations",
        "octavo.serving.openai.files",
        "octavo.serving.openai.batches",
        "octavo.serving.openai.websocket",
        "octavo.serving.responses.routes",
    ),
    "Several models": ("octavo.serving.model_pool.routes",),
    "Ollama": ("octavo.serving.ollama.writing", "octavo.serving.ollama.models"),
    "Embeddings and scores": ("octavo.serving.pooling.embeddings", "octavo.serving.pooling.scores"),
    "Anthropic": ("octavo.serving.anthropic.messages",),
    "Text and tokens": ("octavo.serving.openai.tokenize", "octavo.serving.generate"),
    "Monitoring": ("octavo.serving.health", "octavo.serving.metrics_page"),
    "Operators": ("octavo.serving.admin", "octavo.serving.lora_routes", "octavo.serving.prefix_pins"),
    "Pages": ("octavo.serving.web_page", "octavo.serving.openapi"),
    "Not supported": ("octavo.serving.unsupported_routes",),
}
"""By the heading under which /docs shows them."""


@dataclass(frozen=True, slots=True)
class Route:
    """One path. The handler's docstring is the text in /docs."""

    path: str
    handler: Callable[[Request], Awaitable[Response]]
    request_model: Any = None
    """msgspec type of the JSON body; None = there is none."""
    response_model: Any = None
    """msgspec type of the JSON answer; None = anything."""
    methods: tuple[str, ...] = ()
    """`load_routes` fills it in: POST where there is a body, else GET. HEAD is answered where GET is."""
    error_model: Any = ErrorBody
    """msgspec type of the JSON of errors."""
    error_response: Callable[[Exception], Response] = error_response
    """Makes it of what the handler raised."""
    media_type: str = "application/json"
    """Of the answer; "" = it is empty."""
    streams: bool = False
    """Whether the answer may be server-sent events instead."""
    documented: bool = True
    group: str = ""
    """Heading in /docs; `load_routes` fills it in."""


@dataclass(frozen=True, slots=True)
class WebSocketRoute:
    """One path that speaks WebSocket."""

    path: str
    handler: Callable[[WebSocket], Awaitable[None]]


def load_routes() -> Iterator[Route | WebSocketRoute]:
    """Every route of every module, in order."""
    for group, names in ROUTE_MODULES.items():
        for name in names:
            for route in import_module(name).ROUTES:
                yield _completed(route, group) if isinstance(route, Route) else route


def _completed(route: Route, group: str) -> Route:
    methods = route.methods or (("POST",) if route.request_model is not None else ("GET",))
    return replace(route, group=group, methods=methods)
