"""`make_app`: the engine behind HTTP, as an ASGI application. Called by the server's process, and by tests.

Routes come from the registry. FastAPI finds them and shows them in /docs; bodies are read by `body`, so
FastAPI checks nothing, and every error leaves in one form.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from octavo.config.server import ServerConfig
from octavo.frontend.async_engine import AsyncLLM
from octavo.serving.errors import error_response, handle_exception
from octavo.serving.metrics_board import MetricsBoard
from octavo.serving.openai.batch_runner import BatchRunner
from octavo.serving.openai.models import ServedModels
from octavo.serving.openapi import describe, schemas
from octavo.serving.registry import Route, load_routes
from octavo.serving.responses.background import Background
from octavo.serving.store.database import Store
from octavo.version import __version__


def make_app(engine: AsyncLLM, config: ServerConfig) -> FastAPI:
    """The application; the engine is started and ended by the caller."""
    hidden = config.disable_page
    app = FastAPI(
        title="octavo",
        version=__version__,
        docs_url=None if hidden else "/docs",
        openapi_url=None if hidden else "/openapi.json",
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.engine = engine
    app.state.config = config
    app.state.metrics_board = MetricsBoard(engine.metrics)
    app.state.models = ServedModels.of(engine.config)
    app.state.store = Store(config)
    app.state.background = Background()
    app.state.batch_runner = BatchRunner(engine, config, app.state.models, app.state.store)
    app.add_exception_handler(HTTPException, handle_exception)
    routes = []
    for route in load_routes():
        if isinstance(route, Route):
            routes.append(route)
            _add(app, route)
        else:
            app.add_api_websocket_route(route.path, route.handler)
    app.openapi = partial(_openapi, app, routes, config)  # type: ignore[method-assign]  # FastAPI's way
    return app


def _add(app: FastAPI, route: Route) -> None:
    """One entry for each method, as each has an operation of its own in the description."""
    for method in route.methods:
        app.add_api_route(
            route.path, _endpoint(route.handler), methods=[method], response_model=None, **describe(route)
        )


def _openapi(app: FastAPI, routes: list[Route], config: ServerConfig) -> dict[str, Any]:
    if app.openapi_schema is None:
        app.openapi_schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        app.openapi_schema["components"] = {"schemas": schemas(routes, strict=config.strict)}
    return app.openapi_schema


def _endpoint(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """The handler, with its errors as answers."""

    async def endpoint(request: Request) -> Response:
        try:
            return await handler(request)
        except Exception as error:
            return error_response(error)

    endpoint.__name__ = handler.__name__
    endpoint.__doc__ = handler.__doc__
    return endpoint
