"""`make_app`: the engine behind HTTP, as an ASGI application. Called by the server's process, and by tests.

Routes come from the registry, and Starlette's router finds them. Bodies are read by `body`; every error
leaves in one form.
"""

from contextlib import ExitStack

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import BaseRoute
from starlette.routing import Route as Path
from starlette.routing import WebSocketRoute as SocketPath
from starlette.types import Receive, Scope, Send

from octavo.config.server import ServerConfig
from octavo.frontend.async_engine import AsyncLLM
from octavo.serving.body_budget import body_budget
from octavo.serving.engines import Engines
from octavo.serving.errors import handle_exception
from octavo.serving.metrics_board import MetricsBoard
from octavo.serving.openai.batch_runner import BatchRunner
from octavo.serving.openai.files import upload_budget
from octavo.serving.registry import Route, WebSocketRoute, load_routes
from octavo.serving.responses.background import Background
from octavo.serving.store.database import Store


class Endpoint:
    """One route's handler. Starlette's router puts it into `scope["endpoint"]`."""

    def __init__(self, route: Route) -> None:
        self.path = route.path
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        with ExitStack() as request.state.borrowed:
            try:
                response = await self._route.handler(request)
            except Exception as error:
                response = self._route.error_response(error)
            await response(scope, receive, send)


def make_app(served: AsyncLLM | Engines, config: ServerConfig) -> Starlette:
    """The application over an engine, or several; they are started and ended by the caller."""
    engines = served if isinstance(served, Engines) else Engines(served, config)
    app = Starlette(
        routes=[_path(route) for route in load_routes()], exception_handlers={HTTPException: handle_exception}
    )
    app.router.redirect_slashes = False
    app.state.engines = engines
    app.state.config = config
    app.state.metrics_board = MetricsBoard(engines.metrics, engines.refresh_metrics)
    app.state.bodies = body_budget(config)
    app.state.uploads = upload_budget()
    app.state.store = Store(config)
    app.state.background = Background()
    app.state.batch_runner = BatchRunner(engines, config, app.state.store)
    return app


def _path(route: Route | WebSocketRoute) -> BaseRoute:
    if isinstance(route, WebSocketRoute):
        return SocketPath(route.path, route.handler)
    return Path(route.path, Endpoint(route), methods=route.methods)
