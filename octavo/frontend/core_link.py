"""`CoreLink`: starts the core, hands it requests, reads what it sends, may outlive it. A part of AsyncLLM.

It keeps the open requests in its OutputProcessor and knows of their readers only that they can be failed all
at once. When the core dies or hangs, whether another core comes is the client's business (client/zmq). Open
requests go on in it (`Replay`) or, as the caller wants, end with EngineDead.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any, TypeVar

from octavo.base.errors import EngineDead, Overloaded, RequestError, Unsupported
from octavo.base.log import get_logger
from octavo.config.engine import EngineConfig
from octavo.frontend.client.balanced import BalancedDoor, LostReplica
from octavo.frontend.client.door import Door
from octavo.frontend.client.quarantine import AT_FAULT
from octavo.frontend.client.zmq import AsyncClient
from octavo.frontend.observe.core_state import CoreState
from octavo.frontend.observe.engine_metrics import EngineMetrics
from octavo.frontend.observe.health import Health, HealthState
from octavo.frontend.output_processor import OutputProcessor
from octavo.frontend.replay import Replay
from octavo.frontend.requests.open_request import Receiver
from octavo.frontend.requests.prepared import PreparedRequest
from octavo.messages.control import EndRequests, Ready
from octavo.messages.request import EngineOutputs, EngineRequest, FinishReason, SchedulerStats

T = TypeVar("T")
logger = get_logger(__name__)
GRACE_S = 5.0
"""What a core gets to end by itself before it is killed."""
_POLL_S, _LATE_POLL_S = 0.01, 0.5
_SLICE = 16
"""Requests that are sent at a time."""


class CoreLink:
    """One core after the other and the requests open in it, used from one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        client: Door | BalancedDoor,
        processor: OutputProcessor,
        metrics: EngineMetrics,
        *,
        learn: Callable[[Ready], None],
        fail: Callable[[EngineDead], None],
        replays: bool = False,
    ) -> None:
        """Start nothing yet.

        learn: called with what each new core decided at its start
        fail: called when the core has ended, with the error for everyone who waits for an output
        replays: whether open requests go on in the next core, if one comes
        """
        self.client = client
        self.state = CoreState(metrics, config.observability)
        if isinstance(client, BalancedDoor):
            client.on_return, client.keeps_requests = self.state.note_restart, replays
        self.processor = processor
        self.error: EngineDead | None = None
        """Why the core has ended; None while it has not."""
        self._shutdown_timeout = config.front.shutdown_timeout
        self._learn, self._fail = learn, fail
        self._replay = Replay(processor, config.scheduler.max_request_seconds, is_on=replays)
        self._gone = asyncio.Event()
        """Set when the core is gone for good."""
        self._starting: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._is_draining = False
        self._endings: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start the core and wait until the model is loaded; once. Raises ConfigError, EngineDead.

        And RequestError on an event loop that is not the first one: outputs are read on that one alone, a
        request of another would wait for ever.
        """
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        elif self._starting.get_loop() is not asyncio.get_running_loop():
            raise RequestError(
                "This engine was started on another event loop, and works on that one only. asyncio.run() "
                "makes a new one each time: put all that uses the engine into one call of it."
            )
        try:
            await asyncio.shield(self._starting)
        except asyncio.CancelledError:
            if self._starting.cancelled():
                raise EngineDead("The engine has been shut down.") from None
            raise

    @property
    def stats(self) -> SchedulerStats:
        """Return the state of the first core as of its last step."""
        return self.state.stats

    @property
    def is_up(self) -> bool:
        """True when the first start has succeeded."""
        return bool(self._tasks)

    def check_health(self) -> None:
        """Raise EngineDead when the core has ended."""
        if self.error is not None:
            raise copy(self.error)  # what is raised collects frames: a new one for each

    def check_awaited(self) -> None:
        """Raise EngineDead when the core has ended and open requests do not go on."""
        if not self._replay.goes_on(self.error):
            self.check_health()

    def check_open(self) -> None:
        """Raise EngineDead when the core has ended, Overloaded when it is about to: nothing new may begin."""
        self.check_health()
        if self._is_draining:
            raise Overloaded("The engine is shutting down: send the request to another one.")

    def health(self) -> Health:
        """How the engine is; at once, from what is known here."""
        return self.state.health(self._state(), "" if self.error is None else str(self.error))

    async def wait_until_dead(self) -> EngineDead:
        """Return when the core is gone and no other one comes: why."""
        await self._gone.wait()
        assert self.error is not None
        return self.error

    @property
    def mailbox_path(self) -> Path:
        """The directory by which other fronts find the core (AsyncLLM.attached)."""
        return self._own_client().mailbox_path

    def detach_front(self, front: int) -> None:
        """End the requests of another front."""
        client = self._own_client()
        if self.is_up:
            with suppress(EngineDead):  # then there is nothing to end
                client.detach(front)

    def open(self, prepared: PreparedRequest, receiver: Receiver) -> None:
        """Open a request here and in the core, or in neither; `receiver` gets its outputs.

        While open requests wait for the next core, it does so too.
        """
        self.check_awaited()
        self._replay.check(prepared.engine_requests)
        self.processor.add(prepared, receiver)
        try:
            ids = [request.request_id for request in prepared.engine_requests]
            if self.error is None and not self._replay.holds_back(ids):
                for request in prepared.engine_requests:
                    self.client.add(request)
        except BaseException as error:
            if not isinstance(error, EngineDead) or not self._replay.goes_on(error):
                self.forget([prepared.key])
                raise

    def end(self, keys: Iterable[str], reason: FinishReason, error: str = "") -> None:
        """End requests, here and in the core, with a last output."""
        self._send_aborts(self.processor.end(keys, reason, error).abort_ids)

    def forget(self, keys: Iterable[str]) -> None:
        """End requests whose readers are gone, here and in the core."""
        self._send_aborts(self.processor.forget(keys))

    def tell_fronts(self, request_ids: list[str] | None, tenant: str | None = None) -> None:
        """Have the other fronts end these requests of theirs; None: all."""
        if self.is_up and self.error is None:
            with suppress(EngineDead):  # then theirs have ended too
                self.client.tell_fronts(request_ids, tenant)

    async def call(
        self, verb: str, arguments: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> Any:
        """Run a command of the core (engine/commands). Raises EngineDead, TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self.start()
            return await self.client.call(verb, arguments)

    async def apply(self, function: Callable[[Any], Any]) -> list[Any]:
        """Raise Unsupported: the workers are in other processes."""
        raise Unsupported(
            "The engine runs in a process of its own, and functions are not sent to processes (that "
            "takes pickle, which runs whatever it is given): name a command of the worker, or use LLM."
        )

    async def rest(self, seconds: float) -> None:
        """Wait, while others of the loop go on."""
        await asyncio.sleep(seconds)

    async def aside(self, work: Callable[[], T]) -> T:
        """Return what `work` does on a thread."""
        return await asyncio.to_thread(work)

    def open_keys(self) -> list[str]:
        """The keys of all requests open in this front."""
        return self.processor.open_keys()

    def end_all(self, keys: list[str]) -> None:
        """End these requests as aborted, and all those of other fronts."""
        self.end(keys, FinishReason.ABORT)
        self.tell_fronts(None)

    async def finish_all(self, keys: list[str]) -> None:
        """Wait until these requests have ended, and all of other fronts in the core. Raises EngineDead."""
        open_keys = set(keys)
        while open_keys := open_keys.intersection(self.processor.open_keys()):
            await asyncio.sleep(_POLL_S)
        self.check_health()
        while await self.call("num_inside"):
            await asyncio.sleep(_POLL_S)

    async def drain(self, timeout_s: float) -> None:
        """Return when no request is open. Raises TimeoutError after `timeout_s` seconds, EngineDead."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.processor.has_unfinished_requests():
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise TimeoutError(
                f"Timeout reached after {timeout_s} seconds waiting for requests to drain."
            ) from None
        self.check_health()

    def shut_down(self, timeout_s: float | None, grace_s: float, then: Callable[[], None]) -> Awaitable[None]:
        """Begin the end of the core and refuse new requests; await what it returns to see it done.

        timeout_s: for open requests to finish, else they end with EngineDead; shutdown_timeout when None
        grace_s: for the core to end by itself. While it still loads, it is ended at once.
        then: called on a thread when the core has ended
        """
        self._is_draining = True
        ending = self._end_core(self._shutdown_timeout if timeout_s is None else timeout_s, grace_s, then)
        try:
            task = asyncio.get_running_loop().create_task(ending)
        except RuntimeError:  # no loop runs: the caller brings one
            return ending
        self._endings.add(task)  # a loop keeps no task alive
        task.add_done_callback(self._endings.discard)
        return task

    async def _end_core(self, timeout_s: float, grace_s: float, then: Callable[[], None]) -> None:
        if self._starting is not None:
            await self._wind_up(self._starting, timeout_s)
        await self.client.close(grace_s)
        await asyncio.to_thread(self.processor.close)
        await asyncio.to_thread(then)

    async def _wind_up(self, starting: asyncio.Task[None], timeout_s: float) -> None:
        starting.cancel()
        await asyncio.wait([starting])
        if self.is_up and self._replay.goes_on(self.error):
            with suppress(TimeoutError, EngineDead):
                await self.drain(timeout_s)
        self.state.line.log_end()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._state() != "dead":
            self.forget(self.processor.open_keys())
            self._fail_all(EngineDead("The engine has been shut down."))

    async def _start(self) -> None:
        self._note_start(await self.client.start())
        works = [self._live(), self.state.log(), *([self._end_late()] if self._replay.is_on else [])]
        self._tasks = [asyncio.create_task(work) for work in works]

    def _note_start(self, ready: Ready) -> None:
        self.state.note_start()
        self._learn(ready)

    def _state(self) -> HealthState:
        if self.error is not None:
            return "dead" if self.error.retry_after_s is None else "restarting"
        if self._is_draining:
            return "draining"
        if not self.is_up:
            return "starting"
        return "stalled" if self.client.is_stalled else "ready"

    def _own_client(self) -> AsyncClient | BalancedDoor:
        if not isinstance(self.client, AsyncClient | BalancedDoor):
            raise Unsupported("This front is attached to the core of another one: ask that front.")
        return self.client

    async def _live(self) -> None:
        """Task: one core after the other, as long as another one comes."""
        error = await self._read()
        while error is not None:
            logger.error("%s", error)
            self.error = error
            self.state.clear()
            self._note_death(self.processor.engine_ids())
            if not self._replay.goes_on(error):
                self._fail_all(error)
            if error.retry_after_s is None:
                self._gone.set()
                return
            error = await self._restart() or await self._read()

    async def _read(self) -> EngineDead | None:
        """Take every output of the core until it ends: why it did."""
        try:
            async for news in self.client.outputs():
                match news:
                    case EndRequests():
                        self._end_as_told(news)
                    case LostReplica(request_ids):
                        if news.is_crash:
                            self._note_death(request_ids)
                        self.state.drop(news.replica)
                        if not self._replay.is_on:
                            await self._take(news.to_outputs())
                        await self._send_requests(self._replay.take(request_ids), is_patient=True)
                    case EngineOutputs():
                        self.state.note_step(news.stats, news.engine)
                        await self._take(news)
        except EngineDead as error:
            return error
        except Exception as error:
            logger.exception("The front cannot go on.")
            return EngineDead(f"The outputs of the engine cannot be read: {error}")
        return None

    async def _take(self, outputs: EngineOutputs) -> None:
        """Hand out what a step brought, and send what follows from it."""
        self._replay.note_outputs(outputs.outputs)
        processed = self.processor.process(outputs)
        self._send_aborts(processed.abort_ids)
        await self._send_requests(processed.new_requests)
        await self._send_requests(self._replay.take_next(), is_patient=True)

    async def _restart(self) -> EngineDead | None:
        """Wait for the next core: why it did not come."""
        try:
            ready = await self.client.start()
        except EngineDead as error:
            return error
        except Exception as error:
            logger.exception("The engine core cannot be started again.")
            return EngineDead(f"The engine core cannot be started again: {error}")
        self._note_start(ready)
        self.error = None
        self.state.note_restart()
        with suppress(EngineDead):  # whoever reads is told
            await self._send_requests(self._replay.take(self.processor.engine_ids()), is_patient=True)
        return None

    def _note_death(self, engine_ids: list[str]) -> None:
        """Remember what was under way in a core that has ended; end what made it."""
        if (key := self._replay.note_death(engine_ids)) is not None:
            self.end([key], FinishReason.ERROR, AT_FAULT)

    async def _end_late(self) -> None:
        """Task: the time of a request runs on while no core has it."""
        while True:
            await asyncio.sleep(_LATE_POLL_S)
            self.end(self._replay.late_keys(), FinishReason.TIMEOUT)

    def _end_as_told(self, order: EndRequests) -> None:
        ids = order.request_ids
        keys = self.processor.open_keys() if ids is None else self.processor.keys_of(ids, order.tenant)
        self.end(keys, FinishReason.ABORT)

    def _send_aborts(self, request_ids: list[str]) -> None:
        if request_ids and self.error is None:
            with suppress(EngineDead):  # the reading task is about to tell everybody
                self.client.abort(request_ids)

    async def _send_requests(self, requests: list[EngineRequest], *, is_patient: bool = False) -> None:
        """Go on with open requests; one that cannot go on ends with an error, or waits if `is_patient`.

        Others have their turn after a slice of them; what ends meanwhile does not go on.
        """
        for count, request in enumerate(requests, 1):
            if count % _SLICE == 0:
                await asyncio.sleep(0)
            while (key := self.processor.owner_of(request.request_id)) is not None:
                try:
                    self.client.add(request)
                except Overloaded as error:
                    if is_patient:
                        await asyncio.sleep(_POLL_S)
                        continue
                    self.end([key], FinishReason.ERROR, str(error))
                break

    def _fail_all(self, error: EngineDead) -> None:
        """End every open request with this error, once."""
        self.error = error
        self.processor.forget(self.processor.open_keys(), FinishReason.ERROR)
        self._fail(error)
