"""`serve`: the process of `octavo serve`. It owns the engine, and the further API processes if there are.

Started by `cli.serve` with a socket that listens already; a client that comes early is told that the server
starts.
"""

import asyncio
import dataclasses
import os
import resource
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import cast

import uvloop
from starlette.datastructures import State

from octavo.base import log
from octavo.base.errors import ConfigError
from octavo.config import EngineArgs, resolve
from octavo.config.parallel import ParallelConfig
from octavo.config.served_models import ServedModels
from octavo.config.server import ServerConfig
from octavo.frontend.async_engine import AsyncLLM, OnCrash
from octavo.frontend.prefix_pins import preload_prefixes
from octavo.serving.engines import Engines
from octavo.serving.model_pool.engines import PooledEngines
from octavo.serving.process.api_process import APIProcess
from octavo.serving.process.listener import Listener
from octavo.serving.process.supervisor import ExtraProcesses
from octavo.serving.queue_bound import bounded
from octavo.serving.responses.record import fail_left

logger = log.get_logger(__name__)
_CORES_PER_PROCESS, _MOST_PROCESSES = 4, 4
_STORE = "store.sqlite"


def serve(what: EngineArgs | ServedModels, config: ServerConfig, listener: Listener) -> None:
    """Serve one model or several until asked to end.

    Raises ConfigError when model or options cannot work, EngineDead.
    """
    log.go_to_background("uvicorn.error", "asyncio")
    _raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(MainProcess(what, config, listener).run())


class MainProcess(APIProcess):
    """The API process that owns the engine."""

    def __init__(self, what: EngineArgs | ServedModels, config: ServerConfig, listener: Listener) -> None:
        super().__init__(config, listener)
        self._what = what
        self._extra_processes: ExtraProcesses | None = None
        self._batches: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Answer from the start: a probe that waits in the queue of the socket learns nothing."""
        self._http.start()
        await super().run()

    def _make_engines(self) -> Engines:
        on_crash = cast(OnCrash, self._config.on_crash.replace("exit", "none"))
        if isinstance(self._what, ServedModels):
            self._config = dataclasses.replace(self._config, api_server_count=1)
            return PooledEngines(self._what, on_crash)
        config = bounded(resolve(self._what))
        count = self._config.api_server_count or num_api_processes(config.parallel)
        self._config = dataclasses.replace(self._config, api_server_count=count)
        engine = AsyncLLM(config, on_crash=on_crash, num_fronts=self._config.api_server_count)
        if not self._config.store:  # a file that all API processes can open, and that goes with the engine
            self._config = dataclasses.replace(self._config, store=str(engine.core.mailbox_path / _STORE))
        return Engines(engine, self._config)

    async def _prepare(self, state: State) -> None:
        engines: Engines = state.engines
        if (engine := engines.only()) is not None:
            if self._config.api_server_count > 1:
                engines.adapters.share(engine.core.mailbox_path)
            await engines.adapters.load_modules()
        await state.store.open(as_owner=True)
        await state.store.run(fail_left)
        if self._config.preload_prefixes and engine is not None:
            await self._preload(engine, self._config.preload_prefixes)

    async def _preload(self, engine: AsyncLLM, path: str) -> None:
        if len(self._config.api_key) > 1:
            raise ConfigError(
                "preload_prefixes: with several API keys nobody would find these prefixes, as each key has "
                "cached prompts of its own. Pin them with each key, by POST /v1/prefix_cache/pins."
            )
        count = await preload_prefixes(engine, path)
        logger.info("%d prefixes of %s are in the cache.", count, path)

    def _open(self, engines: Engines, state: State) -> None:
        self._batches = asyncio.create_task(state.batch_runner.run())
        self._tasks = [self._batches]
        if self._config.api_server_count > 1 and (engine := engines.only()) is not None:
            self._extra_processes = ExtraProcesses(engine, self._config, self._listener)
            self._extra_processes.start()
            sharing = state.metrics_board.share(engine.core.mailbox_path, os.getpid())
            self._tasks.append(asyncio.create_task(sharing))
        _say(_invitation(engines.names, self._listener.url, self._config))

    async def _drained(self) -> None:
        if self._batches is not None:  # they go on with the next server, if there is a store
            self._batches.cancel()
        others = [self._extra_processes.drained()] if self._extra_processes else []
        await asyncio.gather(super()._drained(), *others)

    async def _end(self, grace_s: float) -> None:
        if self._extra_processes is not None:
            await self._extra_processes.end(grace_s)
        await super()._end(grace_s)


def _say(text: str) -> None:
    """Print, if somebody reads it; a full pipe holds up a thread of its own."""

    def write() -> None:
        with suppress(OSError, ValueError):
            print(text, flush=True)  # noqa: T201

    threading.Thread(target=write, name="say", daemon=True).start()


def num_api_processes(parallel: ParallelConfig) -> int:
    """So many that writing the tokens keeps up with a GPU. A CPU's engine needs the cores itself."""
    if parallel.device_kind not in ("cuda", "rocm") or parallel.num_replicas > 1:
        return 1
    return min(_MOST_PROCESSES, max(1, parallel.cpu_threads // _CORES_PER_PROCESS))


def _invitation(names: Sequence[str], url: str, config: ServerConfig) -> str:
    place = f"--unix-socket {url.removeprefix('unix:')} http://localhost" if config.uds else url
    key = ' -H "Authorization: Bearer $KEY"' if config.api_key else ""
    page = "" if config.disable_page or config.uds else f"\n  page   {url}/"
    others = f" and {len(names) - 1} more" * (len(names) > 1)
    return (
        f"\noctavo serves {names[0]}{others} at {url}{page}\n"
        f"  try    curl {place}/v1/chat/completions -H 'Content-Type: application/json'{key} "
        """-d '{"messages": [{"role": "user", "content": "What is the capital of France?"}]}'\n"""
        "  end    Ctrl-C\n"
    )


def _raise_file_limit() -> None:
    """As many connections as the system lets this user have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536) if hard > 0 else 65536), hard))
