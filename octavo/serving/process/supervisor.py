"""`ExtraProcesses`: the API processes beside the main one, on the same socket, as the main one sees them.

Used by `main_process`. One that ends by itself is replaced; the engine is told first, and ends its requests.
"""

import asyncio
from contextlib import suppress
from functools import partial

import msgspec

from octavo.base.log import get_logger
from octavo.base.processes import Child
from octavo.config.server import ServerConfig
from octavo.frontend.async_engine import AsyncLLM
from octavo.serving.process.listener import Listener

logger = get_logger(__name__)
_MODULE = "octavo.serving.process.extra_process"
_ORDERS = "api_processes.orders"
_RESTART_S = 1.0


class Orders(msgspec.Struct):
    """What an API process reads when it starts; keys are in it as digests only."""

    server: ServerConfig
    engine: bytes
    """EngineConfig, as msgpack."""


class ExtraProcesses:
    """API processes 1 … N-1."""

    def __init__(self, engine: AsyncLLM, config: ServerConfig, listener: Listener) -> None:
        """Write down their orders, in the engine's private directory."""
        self._engine = engine
        self._count = config.api_server_count
        self._fd = listener.socket.fileno()
        self._orders = engine.core.mailbox_path / _ORDERS
        self._orders.write_bytes(msgspec.msgpack.encode(Orders(config, engine.config.to_msgpack())))
        self._loop = asyncio.get_running_loop()
        self._children: dict[int, Child] = {}
        self._is_ending = False
        self._are_gone = asyncio.Event()

    def start(self) -> None:
        """Start all of them; each accepts connections once it knows the engine."""
        for index in range(1, self._count):
            self._start(index)

    async def drained(self) -> None:
        """Have them finish their requests and end; returns when they have."""
        self._is_ending = True
        for child in self._children.values():
            child.terminate()
        while self._children:
            self._are_gone.clear()
            await self._are_gone.wait()

    async def end(self, grace_s: float) -> None:
        """Have them end now, or kill them after `grace_s`."""
        self._is_ending = True
        for child in self._children.values():
            child.terminate()
        for child in list(self._children.values()):
            await asyncio.to_thread(child.end, grace_s)

    def _start(self, index: int) -> None:
        if not self._is_ending:
            arguments = str(self._fd), str(self._orders), str(index)
            notice = partial(self._notice, index)
            self._children[index] = Child(_MODULE, *arguments, on_exit=notice, inherited_fds=(self._fd,))

    def _notice(self, index: int, code: int) -> None:
        """On the thread that waits for the process."""
        with suppress(RuntimeError):  # the loop is closed: this process ends too
            self._loop.call_soon_threadsafe(self._lost, index, code)

    def _lost(self, index: int, code: int) -> None:
        del self._children[index]
        self._are_gone.set()
        if self._is_ending:
            return
        logger.error("API process %d ended with exit code %d; another one follows.", index, code)
        self._engine.detach_front(index)
        self._loop.call_later(_RESTART_S, self._start, index)
