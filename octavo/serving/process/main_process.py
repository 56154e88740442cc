"""`serve`: the process of `octavo serve`. It owns the engine, and the further API processes if there are.

Started by `cli.serve` with a socket that listens already; a client that comes early is told that the server
starts.
"""

import asyncio
import dataclasses
import os
import resource
import threading
from contextlib import suppress
from typing import Literal, cast

import uvloop
from starlette.datastructures import State

from octavo.base import log
from octavo.base.errors import ConfigError
from octavo.config import EngineArgs, EngineConfig, resolve
from octavo.config.parallel import ParallelConfig
from octavo.config.server import ServerConfig
from octavo.frontend.async_engine import AsyncLLM
from octavo.frontend.prefix_pins import preload_prefixes
from octavo.serving.process.api_process import APIProcess
from octavo.serving.process.listener import Listener
from octavo.serving.process.supervisor import ExtraProcesses
from octavo.serving.responses.record import fail_left

logger = log.get_logger(__name__)
_QUEUED_PER_SEAT = 4
_CORES_PER_PROCESS, _MOST_PROCESSES = 4, 4
_STORE = "store.sqlite"


def serve(args: EngineArgs, config: ServerConfig, listener: Listener) -> None:
    """Serve until asked to end. Raises ConfigError when model or options cannot work, EngineDead."""
    log.go_to_background("uvicorn.error", "asyncio")
    _raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(MainProcess(args, config, listener).run())


class MainProcess(APIProcess):
    """The API process that owns the engine."""

    def __init__(self, args: EngineArgs, config: ServerConfig, listener: Listener) -> None:
        super().__init__(config, listener)
        self._args = args
        self._extra_processes: ExtraProcesses | None = None
        self._batches: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Answer from the start: a probe that waits in the queue of the socket learns nothing."""
        self._http.start()
        await super().run()

    def _make_engine(self) -> AsyncLLM:
        config = _bounded(resolve(self._args))
        count = self._config.api_server_count or num_api_processes(config.parallel)
        self._config = dataclasses.replace(self._config, api_server_count=count)
        on_crash = cast(Literal["none", "restart", "replay"], self._config.on_crash.replace("exit", "none"))
        engine = AsyncLLM(config, on_crash=on_crash, num_fronts=self._config.api_server_count)
        if not self._config.store:  # a file that all API processes can open, and that goes with the engine
            self._config = dataclasses.replace(self._config, store=str(engine.core.mailbox_path / _STORE))
        return engine

    async def _prepare(self, state: State) -> None:
        if self._config.api_server_count > 1 and self._engine is not None:
            state.engines.adapters.share(self._engine.core.mailbox_path)
        await state.engines.adapters.load_modules()
        await state.store.open(as_owner=True)
        await state.store.run(fail_left)
        if self._config.preload_prefixes:
            await self._preload(state.engines.of(""), self._config.preload_prefixes)

    async def _preload(self, engine: AsyncLLM, path: str) -> None:
        if len(self._config.api_key) > 1:
            raise ConfigError(
                "preload_prefixes: with several API keys nobody would find these prefixes, as each key has "
                "cached prompts of its own. Pin them with each key, by POST /v1/prefix_cache/pins."
            )
        count = await preload_prefixes(engine, path)
        logger.info("%d prefixes of %s are in the cache.", count, path)

    def _open(self, engine: AsyncLLM, state: State) -> None:
        self._batches = asyncio.create_task(state.batch_runner.run())
        self._tasks = [self._batches]
        if self._config.api_server_count > 1:
            self._extra_processes = ExtraProcesses(engine, self._config, self._listener)
            self._extra_processes.start()
            sharing = state.metrics_board.share(engine.core.mailbox_path, os.getpid())
            self._tasks.append(asyncio.create_task(sharing))
        _say(_invitation(engine.config.served_names[0], self._listener.url, self._config))

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


def _bounded(config: EngineConfig) -> EngineConfig:
    """With a bound of the queue, if none was chosen."""
    if config.front.max_num_queued_reqs >= 0:
        return config
    bound = _QUEUED_PER_SEAT * config.scheduler.max_num_seqs * config.parallel.num_replicas
    return dataclasses.replace(config, front=dataclasses.replace(config.front, max_num_queued_reqs=bound))


def num_api_processes(parallel: ParallelConfig) -> int:
    """So many that writing the tokens keeps up with a GPU. A CPU's engine needs the cores itself."""
    if not parallel.device.startswith("cuda") or parallel.num_replicas > 1:
        return 1
    return min(_MOST_PROCESSES, max(1, parallel.cpu_threads // _CORES_PER_PROCESS))


def _invitation(model: str, url: str, config: ServerConfig) -> str:
    """What to try, once the server is ready."""
    place = f"--unix-socket {url.removeprefix('unix:')} http://localhost" if config.uds else url
    key = ' -H "Authorization: Bearer $KEY"' if config.api_key else ""
    page = "" if config.disable_page or config.uds else f"\n  page   {url}/"
    return (
        f"\noctavo serves {model} at {url}{page}\n"
        f"  try    curl {place}/v1/chat/completions -H 'Content-Type: application/json'{key} "
        """-d '{"messages": [{"role": "user", "content": "What is the capital of France?"}]}'\n"""
        "  end    Ctrl-C\n"
    )


def _raise_file_limit() -> None:
    """As many connections as the system lets this user have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536) if hard > 0 else 65536), hard))
