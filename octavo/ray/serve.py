"""`build_app`: octavo's HTTP routes as a Ray Serve application, with as many replicas as its queues need.

    serve.run(build_app({"model": "org/name", "max_replicas": 4}))        # or in a Serve config:
    applications: [{name: llm, import_path: "octavo.ray.serve:build_app", args: {model: org/name}}]

Ray routes and scales; each replica is a whole server of one engine, without a socket of its own.
"""

import asyncio
import dataclasses
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.base.errors import ConfigError, OctavoError
from octavo.config.args import EngineArgs
from octavo.config.resolve import resolve
from octavo.config.resolve_server import resolve_server
from octavo.config.secret import Secret
from octavo.config.server import ServerConfig
from octavo.frontend.async_engine import AsyncLLM
from octavo.serving.app import make_app
from octavo.serving.engines import Engines
from octavo.serving.middleware.stack import build_stack
from octavo.serving.queue_bound import bounded

_SCALING = ("min_replicas", "max_replicas", "initial_replicas", "target_ongoing_requests")
_DEPLOYMENT = ("name", "ray_actor_options", "max_ongoing_requests", "placement_group_bundles")
_SERVER = {field.name for field in dataclasses.fields(ServerConfig)}
_MOST_ONGOING = 1024
"""Requests that Ray hands to a replica at once: it has a queue of its own."""
_TARGET = 32


def build_app(args: Mapping[str, Any]) -> Any:
    """Return a Ray Serve application. Raises ConfigError for options that cannot work.

    args: options of the engine and of `octavo serve` by name, and Ray's: min_replicas, max_replicas,
        initial_replicas, target_ongoing_requests (waiting and running ones of a replica, by which Ray adds
        and removes replicas), ray_actor_options (such as {"num_gpus": 1}), max_ongoing_requests, name
    """
    try:
        serve = import_module("ray.serve")
    except ImportError as error:
        raise ConfigError(f"octavo.ray needs Ray ({error}): pip install 'octavo[ray]'.") from None
    options = dict(args)
    scaling = {name: options.pop(name) for name in _SCALING if name in options}
    deployment = {name: options.pop(name) for name in _DEPLOYMENT if name in options}
    server = {name: options.pop(name) for name in list(options) if name in _SERVER}
    _server_config(server)
    EngineArgs.from_options(options)
    made = serve.deployment(serve.ingress(_application)(Replica)).options(
        **{"name": "octavo", "max_ongoing_requests": _MOST_ONGOING} | deployment,
        autoscaling_config={"min_replicas": 1, "target_ongoing_requests": _TARGET} | scaling,
    )
    return made.bind(options, server)


class Replica:
    """One engine behind the routes, in a process of Ray's."""

    app: ASGIApp | None = None
    """Of the only replica of this process."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, engine: dict[str, Any], server: dict[str, Any]
    ) -> None:
        """Load the model; Ray sends requests when this returns."""
        config, loop = _server_config(server), asyncio.get_running_loop()
        resolved = await loop.run_in_executor(None, resolve, EngineArgs.from_options(engine))
        self._engine = AsyncLLM(bounded(resolved), on_crash="replay")
        await self._engine.start()
        if not config.store:
            config = dataclasses.replace(config, store=str(self._engine.core.mailbox_path / "store.sqlite"))
        engines = Engines(self._engine, config)
        app = make_app(engines, config)
        await engines.adapters.load_modules()
        await app.state.store.open(as_owner=True)
        self._batches = asyncio.create_task(app.state.batch_runner.run())
        Replica.app = build_stack(app, config, is_loopback=False, board=app.state.metrics_board).app

    async def check_health(self) -> None:
        """Asked by Ray, which replaces a replica that raises."""
        if self._engine.errored:
            raise OctavoError("The engine is gone for good.")

    async def __del__(self) -> None:
        """Awaited by Ray when the replica has answered its last request."""
        self._batches.cancel()
        await self._engine.shutdown()


def _application() -> ASGIApp:
    return _answer


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":  # Ray has no server of octavo's around the application
        for stage in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{stage}.complete"})
        return
    assert Replica.app is not None, "Ray sends requests behind the constructor"
    await Replica.app(scope, receive, send)


def _server_config(options: Mapping[str, Any]) -> ServerConfig:
    keys = {
        name: [Secret.of(key) for key in ([given] if isinstance(given, str) else given)]
        for name in ("api_key", "admin_api_key")
        if (given := options.get(name))
    }
    return resolve_server(ServerConfig(**{**options, **keys}))
