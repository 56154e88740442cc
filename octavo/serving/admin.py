"""What an operator asks of a running server: pause, sleep, caches, profiles, workers, requests of others.

With keys configured whoever bears one may ask, unless there are admins' keys: then who bears one of these.
Without keys the routes are there only in dev mode (--dev-mode or VLLM_SERVER_DEV_MODE=1), else 404. Requests
of another key may be ended with an admin's only. Names and parameters are vLLM's.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.base.errors import RequestError
from octavo.serving.body import read_body
from octavo.serving.caller import Caller
from octavo.serving.errors import HTTPError
from octavo.serving.registry import Route
from octavo.version import __version__

Handler = Callable[[Request], Awaitable[Any]]


class Abort(msgspec.Struct):
    """Which requests to end."""

    request_ids: list[str]


class Profile(msgspec.Struct):
    """How the traces are called."""

    profile_prefix: str | None = None


class WorkerCall(msgspec.Struct):
    """A command of the workers."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None


async def abort(request: Request) -> None:
    """End requests by their ids; unknown ones are skipped, and without an admin's key those of others."""
    body, caller = await read_body(request, Abort), Caller.of(request)
    await caller.engine.abort(body.request_ids, None if caller.is_admin else caller.tenant)


async def pause(request: Request) -> dict[str, str]:
    """Compute nothing until /resume; `mode`: abort, wait or keep."""
    mode, clear_cache = _word(request, "mode", "abort"), _flag(request, "clear_cache", default=True)
    await Caller.of(request).engine.pause_generation(mode=mode, clear_cache=clear_cache)
    return {"status": "paused"}


async def resume(request: Request) -> dict[str, str]:
    """Go on."""
    await Caller.of(request).engine.resume_generation()
    return {"status": "resumed"}


async def is_paused(request: Request) -> dict[str, bool]:
    """Whether the engine is paused, or asleep."""
    return {"is_paused": await Caller.of(request).engine.is_paused()}


async def sleep(request: Request) -> None:
    """Give up memory; `level` 1: the KV cache, 2: the weights too; `mode` as for /pause."""
    level = _word(request, "level", "1")
    if not level.isdecimal():
        raise RequestError(f"level must be 0, 1 or 2, got {level[:20]!r}.", "level")
    await Caller.of(request).engine.sleep(int(level), mode=_word(request, "mode", "abort"))


async def wake_up(request: Request) -> None:
    """Take memory back; `tags`: weights, kv_cache, or all when there are none."""
    await Caller.of(request).engine.wake_up(request.query_params.getlist("tags") or None)


async def is_sleeping(request: Request) -> dict[str, bool]:
    """Whether any memory is given up."""
    return {"is_sleeping": await Caller.of(request).engine.is_sleeping()}


async def release_kv_cache_memory(request: Request) -> None:
    """Give up the KV cache alone."""
    await Caller.of(request).engine.release_kv_cache_memory()


async def reset_prefix_cache(request: Request) -> None:
    """Forget all cached prompts; `reset_running_requests`: those of running requests too."""
    running = _flag(request, "reset_running_requests", default=False)
    await Caller.of(request).engine.reset_prefix_cache(running)


async def reset_mm_cache(request: Request) -> None:
    """Nothing to forget: text only."""
    await Caller.of(request).engine.reset_mm_cache()


async def start_profile(request: Request) -> None:
    """Record on every rank what the device does."""
    has_body = request.headers.get("content-length", "0") != "0"
    body = await read_body(request, Profile) if has_body else Profile()
    await Caller.of(request).engine.start_profile(body.profile_prefix)


async def stop_profile(request: Request) -> dict[str, list[str]]:
    """End the recording; the paths of the traces."""
    return {"traces": await Caller.of(request).engine.stop_profile()}


async def collective_rpc(request: Request) -> dict[str, list[Any]]:
    """Run a command of the workers on every rank."""
    call = await read_body(request, WorkerCall)
    if call.args:
        raise RequestError("Commands of workers take named arguments: kwargs.", "args")
    engine = Caller.of(request).engine
    try:
        return {"results": await engine.collective_rpc(call.method, call.timeout, call.args, call.kwargs)}
    except TimeoutError:
        raise HTTPError(504, f"{call.method} took longer than the {call.timeout} s allowed.") from None


async def server_info(request: Request) -> dict[str, Any]:
    """Version and options; keys are not shown."""
    caller = Caller.of(request)
    config = msgspec.to_builtins(caller.engine.config)
    del config["checkpoint"]
    server = msgspec.to_builtins(caller.config)
    server |= {name: ["***"] * len(server[name]) for name in ("api_key", "admin_api_key")}
    return {"version": __version__, "engine": config, "server": server}


def _for_operators(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """The handler where it may be used, its result as JSON; None is an empty answer."""

    async def endpoint(request: Request) -> Response:
        caller = Caller.of(request)
        if not (caller.config.api_key or caller.config.dev_mode):
            text = f"{request.scope['endpoint'].path} needs a key configured (--api-key) or --dev-mode."
            raise HTTPError(404, text)
        if caller.config.admin_api_key and not caller.is_admin and handler is not abort:
            raise HTTPError(403, "This needs a key of an admin (--admin-api-key).")
        result = await handler(request)
        if result is None:
            return Response()
        return Response(msgspec.json.encode(result), media_type="application/json")

    endpoint.__name__, endpoint.__doc__ = handler.__name__, handler.__doc__
    return endpoint


def _word(request: Request, name: str, default: str) -> Any:
    return request.query_params.get(name, default)


def _flag(request: Request, name: str, *, default: bool) -> bool:
    given = request.query_params.get(name, str(default)).lower()
    if given not in ("true", "false", "1", "0"):
        raise RequestError(f"{name} must be true or false, got {given[:20]!r}.", name)
    return given in ("true", "1")


def _post(path: str, handler: Handler, body: Any = None) -> Route:
    media_type = "application/json" if handler.__annotations__["return"] else ""
    return Route(path, _for_operators(handler), ("POST",), request_model=body, media_type=media_type)


def _get(path: str, handler: Handler) -> Route:
    return Route(path, _for_operators(handler))


ROUTES = [
    _post("/abort", abort, Abort),
    _post("/abort_requests", abort, Abort),
    _post("/pause", pause),
    _post("/resume", resume),
    _get("/is_paused", is_paused),
    _post("/sleep", sleep),
    _post("/wake_up", wake_up),
    _get("/is_sleeping", is_sleeping),
    _post("/release_kv_cache_memory", release_kv_cache_memory),
    _post("/reset_prefix_cache", reset_prefix_cache),
    _post("/reset_mm_cache", reset_mm_cache),
    _post("/reset_encoder_cache", reset_mm_cache),
    _post("/start_profile", start_profile, Profile),
    _post("/stop_profile", stop_profile),
    _post("/collective_rpc", collective_rpc, WorkerCall),
    _get("/server_info", server_info),
]
