"""`make_app`: the engine behind HTTP, as an ASGI application. Called by the server's process, and by tests.

Routes come from the registry, and Starlette's router finds them. Bodies are read by `body`; every error
leaves in one form.
"""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute
from starlette.routing import Route as Path
from starlette.routing import WebSocketRoute as SocketPath

from octavo.config.server import ServerConfig
from octavo.frontend.async_engine import AsyncLLM
from octavo.serving.body_budget import BodyBudget
from octavo.serving.endpoint import Endpoint
from octavo.serving.engines import Engines
from octavo.serving.errors import handle_exception
from octavo.serving.metrics_board import MetricsBoard
from octavo.serving.openai.batch_runner import BatchRunner
from octavo.serving.registry import Route, WebSocketRoute, load_routes
from octavo.serving.responses.background import Background
from octavo.serving.store.database import Store


def make_app(engine: AsyncLLM, config: ServerConfig) -> Starlette:
    """The application; the engine is started and ended by the caller."""
    app = Starlette(
        routes=[_path(route) for route in load_routes()],
        exception_handlers={HTTPException: handle_exception},
    )
    app.router.redirect_slashes = False
    app.state.engines = Engines(engine)
    app.state.config = config
    app.state.metrics_board = MetricsBoard(engine.metrics)
    app.state.bodies = BodyBudget(config.max_pending_body_bytes)
    app.state.store = Store(config)
    app.state.background = Background()
    app.state.batch_runner = BatchRunner(app.state.engines, config, app.state.store)
    return app


def _path(route: Route | WebSocketRoute) -> BaseRoute:
    if isinstance(route, WebSocketRoute):
        return SocketPath(route.path, route.handler)
    return Path(route.path, Endpoint(route), methods=route.methods)
