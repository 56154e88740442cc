"""The engine core in a process of its own, seen from the front that started it: it also ends it.

It watches its process, finds out when it hangs, starts another one if it is told to, and tells the other
fronts of these.
"""

import asyncio
import weakref
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from octavo.base.errors import EngineDead, OctavoError, Overloaded
from octavo.base.log import get_logger
from octavo.base.processes import cpu_seconds, dump_stacks
from octavo.base.transport import Mailbox, Sender
from octavo.config.engine import EngineConfig
from octavo.frontend.client.door import Door
from octavo.frontend.client.launch import CoreProcess
from octavo.frontend.client.restart import RestartPolicy
from octavo.frontend.client.stall import StallWatch
from octavo.messages.control import CoreMessage, Failed, FrontMessage, Lost, Ready, Shutdown, front_pipe
from octavo.messages.request import EngineOutputs, SchedulerStats

logger = get_logger(__name__)
_OWNER = 0
_RANK_MODULE = "octavo.runtime.worker.main"
_LAST_WORDS_S = 0.1
"""Between the end of the process and the verdict: its last messages may still be on their way."""
_GRACE_S = 5.0
"""For a core that said that it cannot go on to end its workers."""
_LOADING_GRACE_S = 1.0
"""For one that loads, and has nothing to save."""
_DUMP_S = 0.3
"""For the stacks of a core that hangs to be written."""
_RESTART_S = 2.0
"""About what a start takes: when those who were refused may ask again."""


class AsyncClient(Door):
    """One engine core, used from one event loop. After EngineDead `close`, or `start` if it says so."""

    def __init__(
        self, config: EngineConfig, restarts: RestartPolicy | None = None, num_fronts: int = 1
    ) -> None:
        """restarts: whether another core follows one that died; None: never.

        num_fronts: this one and those that will attach themselves
        """
        super().__init__(_OWNER)
        self._config = config
        self._restarts = restarts
        self._num_fronts = num_fronts
        self._core: CoreProcess | None = None
        self._mailbox: Mailbox | None = None
        self._others: list[Sender[FrontMessage]] = []
        self._delay_s = 0.0
        self._watch: StallWatch | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._weight_version = ""

    @property
    def mailbox_path(self) -> Path:
        """The directory by which other fronts find the core."""
        return self._open_mailbox().path

    async def start(self) -> Ready:
        """Start a process and wait until the model is loaded; a second one after a while.

        Raises the core's own ConfigError at first, later and else EngineDead; then nothing is left running.
        """
        await self._bury()
        await asyncio.sleep(self._delay_s)
        self._loop = asyncio.get_running_loop()
        self._life += 1
        self.is_stalled = False
        if self._weight_version != (known := self._config.checkpoint.weight_version):
            logger.warning(
                "The weights %r are lost with the engine; the next one has %r. To have them come back, name "
                "a folder for them: weight_transfer_config, keep_in.",
                self._weight_version,
                known or "default",
            )
        self._begin()
        mailbox = self._open_mailbox()
        self._listen(mailbox)
        on_exit = partial(self._notice_exit, self._life)
        self._core = CoreProcess(self._config, mailbox, self._life, self._num_fronts, on_exit)
        try:
            ready = await self._ready
        except EngineDead as error:
            await (self.close() if error.retry_after_s is None else self._bury())
            raise
        except BaseException:
            await self.close(_LOADING_GRACE_S)
            raise
        self._watch_over(self._core)
        if self.standing:
            await self.stand(self.standing.copy())
        return ready

    def fail(self, error: EngineDead) -> None:
        """End this life: `outputs` raises the error; `start`, if it may follow, ends the core."""
        self._lose(error)

    def follow(self, other: "AsyncClient") -> None:
        """Have the next core begin as that one stands, with its weights if they are in files."""
        self.standing = other.standing.copy()
        self._config = replace(self._config, checkpoint=other._config.checkpoint)

    async def close(self, timeout_s: float = 5.0) -> None:
        """End the core: it aborts what is open; after `timeout_s` it is killed. May be called twice."""
        self._closing = True
        await self._bury(timeout_s)
        self._tell_others(Lost(self._life, "The engine has been shut down."))
        while self._others:
            self._others.pop().close(linger_s=_LAST_WORDS_S)
        if self._mailbox is not None:
            self._mailbox.close()

    async def give_up(self, error: EngineDead) -> None:
        await super().give_up(error)
        await self._bury(0.0)

    def _open_mailbox(self) -> Mailbox:
        if self._mailbox is None:
            self._mailbox = Mailbox.create()
            weakref.finalize(self, self._mailbox.close)
            addresses = [self._mailbox.address(front_pipe(i)) for i in range(1, self._num_fronts)]
            self._others = [Sender(address) for address in addresses]
        return self._mailbox

    async def _bury(self, grace_s: float = _GRACE_S) -> None:
        """End the present core, if there is one, and wait until nothing of it is left."""
        if self._core is None:
            return
        if self._watcher is not None:
            if not self.is_stalled:
                self._watcher.cancel()
            await asyncio.wait([self._watcher])
        await asyncio.to_thread(self._core.end, 0.0 if self.is_stalled else grace_s)
        await self._over.wait()
        await self._stop_listening()
        self._core = None

    def _hand_over(self, message: CoreMessage) -> None:
        assert self._core is not None
        self._core.pipe.try_send(message)

    def _take(self, message: FrontMessage) -> None:
        if isinstance(message, EngineOutputs):
            if self._watch is not None:
                self._watch.note(message.stats, has_outputs=bool(message.outputs))
            self._note_weights(message.stats)
        super()._take(message)

    def _note_weights(self, stats: SchedulerStats) -> None:
        """Have the next core begin with the weights that this one has now, if they can be read somewhere."""
        known, path, version = self._config.checkpoint, stats.weight_path, stats.weight_version
        self._weight_version = version
        if path and (known.path, known.weight_version) != (path, version):
            there = replace(known, path=path, weight_version=version)
            self._config = replace(self._config, checkpoint=there)

    def _take_news(self, message: FrontMessage) -> None:
        match message:
            case Ready():
                if not self._ready.done():  # else the start was cancelled
                    self._ready.set_result(message)
            case Failed():
                self._lose(message.to_error())
            case Shutdown():
                self._lose(EngineDead("The engine core has been shut down."))

    def _notice_exit(self, life: int, code: int) -> None:
        """On the thread that waits for the process."""
        with suppress(RuntimeError):  # the event loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(self._loop.call_later, _LAST_WORDS_S, self._verdict, life, code)

    def _verdict(self, life: int, code: int) -> None:
        if life == self._life:
            self._lose(
                EngineDead(f"The engine core ended unexpectedly with exit code {code}; its log says why.")
            )

    def _lose(self, error: OctavoError) -> None:
        """The first cause counts. Decide whether another core comes, and tell the other fronts."""
        if self._over.is_set():
            return
        delay_s = self._next_delay_s()
        if delay_s is not None:
            self._delay_s = delay_s
            error = EngineDead(str(error), delay_s + _RESTART_S)
        elif self._life > 1:
            error = EngineDead(str(error))
        super()._lose(error)
        self._tell_others(Lost(self._life, str(error), getattr(error, "retry_after_s", None)))

    def _next_delay_s(self) -> float | None:
        """How long to wait before the next start; None: there is none."""
        was_there = self._life > 1 or self._ready.done()
        if self._closing or self._restarts is None or not was_there:
            return None
        return self._restarts.delay_s()

    def _tell_others(self, message: Lost) -> None:
        for other in self._others:
            with suppress(Overloaded):  # it has stopped reading, and will be ended
                other.try_send(message)

    def _watch_over(self, core: CoreProcess) -> None:
        self._watch = self._watcher = None
        if (timeout_s := self._config.front.stall_timeout) > 0:
            on_cpu = self._config.parallel.device == "cpu"
            is_each_busy = not on_cpu and self._config.parallel.pipeline_parallel_size == 1
            used = partial(cpu_seconds, core.pid, _RANK_MODULE if is_each_busy else "")
            self._watch = StallWatch(timeout_s, used, on_cpu=on_cpu)
            self._watcher = asyncio.create_task(self._end_when_stalled(core, self._watch))

    async def _end_when_stalled(self, core: CoreProcess, watch: StallWatch) -> None:
        """Task: a core that hangs is asked for its stacks and killed."""
        while not await asyncio.to_thread(watch.is_stalled):
            await asyncio.sleep(watch.interval_s)
        if self._over.is_set():
            return
        self.is_stalled = True
        error = EngineDead(f"The engine core hangs: no step for {watch.silence_s:.1f} s. It has been killed.")
        logger.error("The engine core hangs; its stacks follow, if it can still write them.")
        dump_stacks(core.pid)
        await asyncio.sleep(_DUMP_S)
        self._lose(error)
        await asyncio.to_thread(core.end, 0.0)
