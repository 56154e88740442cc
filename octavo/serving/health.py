"""GET /health, /ready, /ping, /version, /load: for those who watch the server. They answer at once.

/health says whether the engine lives: restart the server when it stays 503. /ready says whether to send
requests. With keys configured only /health is open.
"""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.frontend.observe.health import HealthState
from octavo.serving.caller import Caller
from octavo.serving.openai.answers import json_response
from octavo.serving.registry import Route
from octavo.version import __version__


class Status(msgspec.Struct):
    """How the server is."""

    status: HealthState


class Load(msgspec.Struct):
    """How much there is to do."""

    server_load: int
    """Sequences that run or wait."""


class Version(msgspec.Struct):
    """Which octavo this is."""

    version: str


async def health(request: Request) -> Response:
    """200 while the engine lives, also while it drains or refuses requests; else 503."""
    return _status(request, ("ready", "draining"))


async def ready(request: Request) -> Response:
    """200 while requests are taken; 503 as soon as the server is asked to end."""
    return _status(request, ("ready",))


async def load(request: Request) -> Response:
    """How many sequences run or wait."""
    now = Caller.of(request).engines.health()
    return json_response(Load(now.num_running + now.num_waiting))


async def version(request: Request) -> Response:
    """The version of octavo."""
    return json_response(Version(__version__))


def _status(request: Request, good: tuple[HealthState, ...]) -> Response:
    state = Caller.of(request).engines.health().state
    if state == "ready" and request.scope.get("state", {}).get("is_draining"):
        state = "draining"
    headers = None if state in good else {"Retry-After": "1"}
    return json_response(Status(state), 200 if state in good else 503, headers)


ROUTES = [
    Route("/health", health, response_model=Status),
    Route("/ready", ready, response_model=Status),
    Route("/ping", health, response_model=Status, methods=("GET", "POST")),
    Route("/load", load, response_model=Load),
    Route("/version", version, response_model=Version),
]
