"""A whole server without a model: the application over a real AsyncLLM whose core has a FakeExecutor.

    async with served() as server:
        answer = await server.client.post("/v1/completions", json={"prompt": "hello"})

The core is a process of its own, as in production, but loads nothing: it starts in about a second. Start one
per module (`loop_scope="module"`). Prompts are bytes; what is generated is a fixed function of the prompt.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from unittest.mock import patch

import httpx
import msgspec

from octavo.config.server import ServerConfig
from octavo.frontend.async_engine import AsyncLLM
from octavo.serving.app import make_app
from tests.fakes import ByteTokenizer, fake_config
from tests.process_fakes import EXECUTOR

MAX_MODEL_LEN = 256


@dataclass
class Served:
    """A running application."""

    app: object
    engine: AsyncLLM
    client: httpx.AsyncClient
    """Asks it without a socket."""


def serving_engine(
    *,
    step_s: float = 0.0,
    fault: str = "",
    gate: str = "",
    deadly: int | None = None,
    front: dict | None = None,
    on_crash: str = "none",
    **scheduling,
) -> AsyncLLM:
    """An engine, not started. step_s, fault, gate, deadly: orders of tests.process_fakes."""
    config = fake_config(
        **{"max_model_len": MAX_MODEL_LEN, "num_blocks": 512, "max_num_batched_tokens": 256, **scheduling}
    )
    orders = {**config.checkpoint.config, "step_s": step_s, "fault": fault, "gate": gate, "deadly": deadly}
    config = dataclasses.replace(
        config,
        parallel=dataclasses.replace(config.parallel, distributed_executor_backend=EXECUTOR),
        checkpoint=dataclasses.replace(config.checkpoint, config=orders),
        front=dataclasses.replace(config.front, **(front or {})),
    )
    with patch("octavo.frontend.async_engine.tokenizer_for", lambda config: ByteTokenizer()):
        return AsyncLLM(config, on_crash=on_crash)


@asynccontextmanager
async def served(config: ServerConfig | None = None, **engine_options) -> AsyncIterator[Served]:
    """The application with its engine started; options as of `serving_engine`."""
    engine = serving_engine(**engine_options)
    await engine.start()
    app = make_app(engine, config or ServerConfig())
    batches = asyncio.create_task(app.state.batch_runner.run())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
            yield Served(app, engine, client)
    finally:
        batches.cancel()
        app.state.background.end()
        await engine.shutdown()
        await app.state.store.close()


def transport_to(app: object, client_class: type) -> object:
    """The application instead of a network, for an HTTP client of this class: httpx's or its successor's."""
    names = [cls.__module__.partition(".")[0] for cls in client_class.__mro__]
    library = import_module(next(name for name in names if name.startswith("httpx")))
    return library.ASGITransport(app, raise_app_exceptions=False)


def events_of(text: str) -> list:
    """The events of a stream, decoded; [DONE] as it is. Raises when anything else is in it."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    datas = [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
    assert all(f"data: {data}" in blocks for data in datas)
    return [data if data == "[DONE]" else msgspec.json.decode(data) for data in datas]
