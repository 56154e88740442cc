"""POST /models/load and /models/unload, GET /models/sse: names and forms of llama.cpp's router.

GET /models is `openai.models`'. With admins' keys, only they may load and unload.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.base.errors import RequestError
from octavo.serving.body import read_body
from octavo.serving.caller import Caller
from octavo.serving.errors import HTTPError
from octavo.serving.model_pool.engines import PooledEngines
from octavo.serving.openai.answers import json_response
from octavo.serving.registry import Route
from octavo.serving.streaming import EventStream, event


class ModelName(msgspec.Struct):
    """Which model is meant."""

    model: str
    needs_model: ClassVar[bool] = False


class Done(msgspec.Struct):
    """It is done, or has begun."""

    success: bool = True


async def load_model(request: Request) -> Response:
    """Load a model, or wake it; answered when it is there. One that failed is tried again."""
    engines, body = _engines(request), await read_body(request, ModelName)
    await engines.pool.load(engines.model(body.model))
    return json_response(Done())


async def unload_model(request: Request) -> Response:
    """End a model's engine once its requests have ended; 400 if it has none."""
    engines, body = _engines(request), await read_body(request, ModelName)
    model = engines.model(body.model)
    if model.engine is None:
        raise RequestError(f"The model {body.model!r} is not running.", "model")
    await engines.pool.unload(model)
    return json_response(Done())


async def follow_models(request: Request) -> Response:
    """The states of the models, as server-sent events: first how each is, then what becomes of it."""
    return EventStream(_events(_engines(request)), Caller.of(request).config)


async def _events(engines: PooledEngines) -> AsyncGenerator[bytes, None]:
    async with aclosing(engines.pool.feed.follow()) as changes:
        following = asyncio.ensure_future(anext(changes))  # from before the first are told
        try:
            for model in engines.pool.models.values():
                yield _event(model.name, "model_status", model.state)
            while True:
                name, state = await following
                yield _event(name, "status_change", state)
                following = asyncio.ensure_future(anext(changes))
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


def _event(name: str, kind: str, state: str) -> bytes:
    return event(msgspec.json.encode({"model": name, "event": kind, "data": {"status": state}}))


def _engines(request: Request) -> PooledEngines:
    caller = Caller.of(request)
    if not isinstance(caller.engines, PooledEngines):
        text = (
            "This server has one model, which stays loaded: start octavo serve with --models or --models-dir."
        )
        raise HTTPError(404, f"{request.url.path} is not there. {text}")
    if caller.config.admin_api_key and not caller.is_admin:
        raise HTTPError(403, "This needs a key of an admin (--admin-api-key).")
    return caller.engines


ROUTES = [
    Route("/models/load", load_model, ModelName, Done),
    Route("/models/unload", unload_model, ModelName, Done),
    Route("/models/sse", follow_models, media_type="text/event-stream"),
]
