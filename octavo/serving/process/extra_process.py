"""One more process that speaks HTTP: `python -m octavo.serving.process.extra_process FD ORDERS INDEX PARENT`.

Started by `supervisor` with the listening socket. It has all that the main one has but the engine process, to
which it is attached. It accepts connections once that answers, and ends with its parent.
"""

import asyncio
import signal
import sys
from pathlib import Path
from typing import Literal

import msgspec
import uvloop
from starlette.datastructures import State

from octavo.base import log
from octavo.base.errors import OctavoError
from octavo.base.processes import die_with_parent
from octavo.config.engine import EngineConfig
from octavo.frontend.async_engine import AsyncLLM
from octavo.serving.engines import Engines
from octavo.serving.metrics_board import MetricsBoard
from octavo.serving.process.api_process import APIProcess
from octavo.serving.process.listener import Listener
from octavo.serving.process.supervisor import Orders

logger = log.get_logger(__name__)


class ExtraProcess(APIProcess):
    """An API process beside the one that owns the engine."""

    _signals = (signal.SIGTERM,)

    def __init__(self, orders: Orders, folder: Path, index: int, parent_pid: int, listener: Listener) -> None:
        super().__init__(orders.server, listener)
        self._engine_config = EngineConfig.from_msgpack(orders.engine)
        self._folder = folder
        self._index = index
        self._parent_pid = parent_pid

    def _make_engines(self) -> Engines:
        on_crash: Literal["none", "replay"] = "replay" if self._config.on_crash == "replay" else "none"
        engine = AsyncLLM.attached(self._engine_config, self._folder, self._index, on_crash)
        return Engines(engine, self._config)

    async def _prepare(self, state: State) -> None:
        state.engines.adapters.share(self._folder)
        await super()._prepare(state)

    def _open(self, engines: Engines, state: State) -> None:
        logger.info("Serving.")
        board: MetricsBoard = state.metrics_board
        self._tasks = [asyncio.create_task(board.share(self._folder, self._parent_pid))]


def main(arguments: list[str]) -> int:
    """Serve until the parent says so. Returns the exit code."""
    fd, path, index, parent = arguments
    die_with_parent(int(parent), lambda: None)
    log.setup(f"api{index}")
    log.go_to_background("uvicorn.error", "asyncio")
    # Ctrl-C reaches every process of the terminal: the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    orders = msgspec.msgpack.decode(Path(path).read_bytes(), type=Orders)
    with (
        Listener.inherited(int(fd), orders.server) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        try:
            runner.run(ExtraProcess(orders, Path(path).parent, int(index), int(parent), listener).run())
        except OctavoError as error:
            logger.error("%s", error)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
