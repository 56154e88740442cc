"""What an operator asks of a running server: pause, sleep, caches, profiles, workers, requests of others.

With keys configured whoever bears one may ask, unless there are admins' keys: then who bears one of these.
Without keys the routes are there only in dev mode (--dev-mode or VLLM_SERVER_DEV_MODE=1), else 404. Requests
of another key may be ended with an admin's only. Names and parameters are vLLM's. Verbs of the engine
(frontend/operator) are rows of `VERBS`; of several models, `?model=NAME` says which is meant.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.base.errors import wrong
from octavo.frontend.operator import Operator
from octavo.serving.body import borrow, parse_body, read_body
from octavo.serving.caller import Caller
from octavo.serving.errors import HTTPError
from octavo.serving.registry import Route
from octavo.version import __version__

_OF_POOL = ("/sleep", "/wake_up", "/release_kv_cache_memory")
"""Verbs that a server of several models runs itself."""
Handler = Callable[[Request], Awaitable[Any]]


class Abort(msgspec.Struct):
    """Which requests to end."""

    request_ids: list[str]


class Profile(msgspec.Struct):
    """How the traces are called, and which steps they show."""

    profile_prefix: str | None = None
    delay_iterations: int | None = None
    max_iterations: int | None = None


class NewWeights(msgspec.Struct):
    """Where other weights are, how they are called, and what becomes of open requests."""

    model_path: str
    weight_version: str = ""
    mode: str = "keep"


class TransferInit(msgspec.Struct):
    """Where a trainer waits, and how it sends."""

    init_info: dict[str, Any]


class TransferUpdate(msgspec.Struct):
    """Which tensors it sends."""

    update_info: dict[str, Any]


class TransferEnd(msgspec.Struct):
    """How the new weights are called."""

    weight_version: str | None = None


class NewSize(msgspec.Struct):
    """How many replicas to have, and how long those that end may take."""

    new_data_parallel_size: int
    drain_timeout: int = 300


class NewVersion(msgspec.Struct):
    """How the weights are called from now on."""

    new_version: str


class WorkerCall(msgspec.Struct):
    """A command of the workers."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class Verb:
    """A route that runs a verb of the engine."""

    path: str
    run: Callable[..., Awaitable[Any]]
    """A method of Operator; its docstring is the text in /docs."""
    method: str = "POST"
    query: Mapping[str, Any] = field(default_factory=dict)
    """Its arguments in the query, each with its type."""
    body: Any = None
    """msgspec type of its arguments in a JSON body."""
    result: str = ""
    """The name of its result in the answer; without one the answer is empty, or a status."""
    status: str = ""
    message: str = ""
    """The same under vLLM's other name for it."""
    gathers: str = ""
    """The name of its argument, if that is the body as a whole."""

    async def answer(self, request: Request) -> dict[str, Any] | None:
        """Run the verb with the arguments that are given."""
        params = request.query_params
        arguments = {
            name: _read(name, params.getlist(name), kind)
            for name, kind in self.query.items()
            if name in params
        }
        if self.body is not None:
            body = msgspec.structs.asdict(await self._read_body(request))
            arguments |= {self.gathers: body} if self.gathers else body
        try:
            result = await self.run(Caller.of(request).engine.operator, **arguments)
        except TimeoutError:
            text = f"{self.path} took longer than the {arguments.get('timeout')} s allowed."
            raise HTTPError(504, text) from None
        if self.result:
            return {self.result: result}
        if self.message:
            return {"message": self.message}
        return {"status": self.status} if self.status else None

    async def _read_body(self, request: Request) -> Any:
        headers = request.headers
        if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
            return parse_body("{}", self.body, strict=True)
        return await read_body(request, self.body)

    def route(self) -> Route:
        """The route, for operators only."""
        has_answer = self.result or self.status or self.message
        handler = for_operators(self.answer, self.path.removeprefix("/"), self.run.__doc__)
        media_type = "application/json" if has_answer else ""
        return Route(self.path, handler, self.body, methods=(self.method,), media_type=media_type)


async def abort(request: Request) -> None:
    """End requests by their ids; unknown ones are skipped, and without an admin's key those of others."""
    body, caller = await read_body(request, Abort), Caller.of(request)
    for engine in caller.engines.loaded():
        await engine.abort(body.request_ids, None if caller.is_admin else caller.tenant)


async def server_info(request: Request) -> dict[str, Any]:
    """Version and options; keys are not shown."""
    caller = Caller.of(request)
    config = msgspec.to_builtins(caller.engine.config)
    del config["checkpoint"]
    server = msgspec.to_builtins(caller.config)
    server |= {name: ["***"] * len(server[name]) for name in ("api_key", "admin_api_key")}
    return {"version": __version__, "engine": config, "server": server}


def for_operators(handler: Handler, name: str, doc: str | None) -> Callable[[Request], Awaitable[Response]]:
    """The handler where it may be used, its result as JSON; None is an empty answer."""

    async def endpoint(request: Request) -> Response:
        caller = Caller.of(request)
        if not (caller.config.api_key or caller.config.dev_mode):
            text = f"{request.scope['endpoint'].path} needs a key configured (--api-key) or --dev-mode."
            raise HTTPError(404, text)
        if caller.config.admin_api_key and not caller.is_admin and handler is not abort:
            raise HTTPError(403, "This needs a key of an admin (--admin-api-key).")
        if handler is not abort:
            await _borrow(request, caller)
        result = await handler(request)
        if result is None:
            return Response()
        return Response(msgspec.json.encode(result), media_type="application/json")

    endpoint.__name__, endpoint.__doc__ = name, doc
    return endpoint


async def _borrow(request: Request, caller: Caller) -> None:
    """Have the model there that the query names. Raises HTTPError for what several models forbid."""
    path = request.scope["endpoint"].path
    if caller.engines.only() is None and path in _OF_POOL:
        text = f"{path} is the server's own affair here: use POST /models/load and /models/unload."
        raise HTTPError(409, text)
    await borrow(request, None)


def _read(name: str, given: list[str], kind: Any) -> Any:
    """An argument in the query; where it stands more than once, the last counts."""
    try:
        return msgspec.convert(given if kind == list[str] else given[-1], kind, strict=False)
    except msgspec.ValidationError:
        kinds = {bool: "true or false", int: "a whole number"}
        raise wrong(name, f"must be {kinds[kind]}, got {given[-1][:20]!r}") from None


_RESET = {"reset_running_requests": bool, "reset_connector": bool}
VERBS = [
    Verb("/pause", Operator.pause_generation, query={"mode": str, "clear_cache": bool}, status="paused"),
    Verb("/resume", Operator.resume_generation, status="resumed"),
    Verb("/is_paused", Operator.is_paused, "GET", result="is_paused"),
    Verb("/sleep", Operator.sleep, query={"level": int, "mode": str}),
    Verb("/wake_up", Operator.wake_up, query={"tags": list[str]}),
    Verb("/is_sleeping", Operator.is_sleeping, "GET", result="is_sleeping"),
    Verb("/update_weights_from_disk", Operator.update_weights_from_disk, body=NewWeights, status="updated"),
    Verb("/get_weight_version", Operator.get_weight_version, "GET", result="weight_version"),
    Verb("/weight_info", Operator.get_weight_version, "GET", result="weight_version"),
    Verb(
        "/init_weight_transfer_engine",
        Operator.init_weight_transfer_engine,
        body=TransferInit,
        gathers="request",
        message="Weight transfer initialized",
    ),
    Verb(
        "/shutdown_weight_transfer_engine",
        Operator.shutdown_weight_transfer_engine,
        message="Weight transfer shut down",
    ),
    Verb("/start_weight_update", Operator.start_weight_update, message="Weight update started"),
    Verb(
        "/update_weights",
        Operator.update_weights,
        body=TransferUpdate,
        gathers="request",
        message="Weights updated",
    ),
    Verb(
        "/finish_weight_update",
        Operator.finish_weight_update,
        body=TransferEnd,
        message="Weight update finished",
    ),
    Verb("/update_weight_version", Operator.update_weight_version, body=NewVersion, status="updated"),
    Verb("/scale_elastic_ep", Operator.scale_elastic_ep, body=NewSize, message="Scaled"),
    Verb("/release_kv_cache_memory", Operator.release_kv_cache_memory),
    Verb("/reset_prefix_cache", Operator.reset_prefix_cache, query=_RESET),
    Verb("/reset_mm_cache", Operator.reset_mm_cache),
    Verb("/reset_encoder_cache", Operator.reset_encoder_cache),
    Verb("/start_profile", Operator.start_profile, body=Profile),
    Verb("/stop_profile", Operator.stop_profile, result="traces"),
    Verb("/collective_rpc", Operator.collective_rpc, body=WorkerCall, result="results"),
]
_ABORT = for_operators(abort, "abort", abort.__doc__)
ROUTES = [
    Route("/abort", _ABORT, Abort, media_type=""),
    Route("/abort_requests", _ABORT, Abort, media_type=""),
    *(verb.route() for verb in VERBS),
    Route("/server_info", for_operators(server_info, "server_info", server_info.__doc__)),
]
