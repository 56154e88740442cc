"""`AsyncLifecycle`: the half of AsyncLLM that starts the core, reads what it sends, and may outlive it.

Above it stand the requests (async_engine); it knows of them only that they can be failed all at once. When
the core dies or hangs, every open request ends with EngineDead; whether another core comes is the client's
business (client/zmq).
"""

import asyncio
import time
from abc import abstractmethod
from collections.abc import Awaitable, Iterable
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any

from octavo.base.errors import EngineDead, Overloaded, RequestError, Unsupported
from octavo.base.log import get_logger
from octavo.config.engine import EngineConfig
from octavo.frontend.async_control import AsyncEngineControl
from octavo.frontend.client.door import Door
from octavo.frontend.client.zmq import AsyncClient
from octavo.frontend.engine_metrics import EngineMetrics
from octavo.frontend.health import Health, HealthState
from octavo.frontend.input_processor import InputProcessor
from octavo.frontend.otel import tracer_for
from octavo.frontend.output_processor import OutputProcessor
from octavo.frontend.stats_line import StatsLine
from octavo.frontend.text.loader import tokenizer_for
from octavo.messages.control import EndRequests, Ready
from octavo.messages.request import EngineRequest, FinishReason, SchedulerStats

logger = get_logger(__name__)
_GRACE_S = 5.0
"""What the core gets to end by itself before it is killed."""


class AsyncLifecycle(AsyncEngineControl):
    """One core and what the front keeps about it, used from one event loop."""

    input_processor: InputProcessor

    def __init__(self, config: EngineConfig, client: Door) -> None:
        """Load the tokenizer; the core's process starts with `start`."""
        self.config = config
        self.num_restarts = 0
        """Cores started in the place of dead ones."""
        self.tokenizer = tokenizer_for(config)
        self.stats = SchedulerStats()
        """As of the last step."""
        self.metrics = EngineMetrics(config)
        self._stats_line = StatsLine(self.metrics, config.observability)
        self._output_processor = OutputProcessor(
            self.tokenizer,
            self.metrics,
            strict_ids=config.front.strict_request_ids,
            log_requests=config.observability.enable_log_requests,
            tracer=tracer_for(config),
        )
        self._client = client
        self._last_step_s = time.monotonic()
        self._gone = asyncio.Event()
        """Set when the core is gone for good."""
        self._starting: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._is_draining = False
        self._endings: set[asyncio.Task[None]] = set()
        self._error: EngineDead | None = None

    @abstractmethod
    def _fail_open(self, error: EngineDead) -> None:
        """End every open request with this error."""

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

    async def check_health(self) -> None:
        """Raise EngineDead when the core has ended."""
        if self._error is not None:
            raise copy(self._error)

    async def do_log_stats(self) -> None:
        """Log the line of statistics now."""
        self._stats_line.log()

    def health(self) -> Health:
        """How the engine is; at once, from what is known here."""
        return Health(
            state=self._state(),
            reason="" if self._error is None else str(self._error),
            num_restarts=self.num_restarts,
            last_step_age_s=time.monotonic() - self._last_step_s,
            num_running=self.stats.num_running,
            num_waiting=self.stats.num_waiting,
        )

    async def wait_until_dead(self) -> EngineDead:
        """Return when the core is gone and no other one comes: why."""
        await self._gone.wait()
        assert self._error is not None
        return self._error

    @property
    def mailbox_path(self) -> Path:
        """The directory by which other fronts find the core (AsyncLLM.attached)."""
        return self._own_client().mailbox_path

    def detach_front(self, front: int) -> None:
        """End the requests of another front."""
        client = self._own_client()
        if self._is_up:
            with suppress(EngineDead):  # then there is nothing to end
                client.detach(front)

    @property
    def is_running(self) -> bool:
        """True from the end of the start to the end of the core."""
        return bool(self._tasks) and self._error is None

    @property
    def is_stopped(self) -> bool:
        """True when the core has ended."""
        return self._error is not None

    @property
    def errored(self) -> bool:
        """True when the core has ended: nothing can be asked of it, unless it is restarted."""
        return self._error is not None

    @property
    def dead_error(self) -> EngineDead | None:
        """Why it ended."""
        return self._error

    def shutdown(self, timeout: float | None = None, grace_s: float = _GRACE_S) -> Awaitable[None]:
        """End the core; requests still open after `timeout` seconds end with EngineDead. May be called twice.

        timeout: option shutdown_timeout when None. New requests are refused from now on.
        grace_s: for the core to end by itself. While it still loads, it is ended at once.
        A plain call on the event loop begins it, as vLLM's does; await what it returns to see it done.
        """
        self._is_draining = True
        ending = self._shut_down(timeout, grace_s)
        try:
            task = asyncio.get_running_loop().create_task(ending)
        except RuntimeError:  # no loop runs: the caller brings one
            return ending
        self._endings.add(task)  # a loop keeps no task alive
        task.add_done_callback(self._endings.discard)
        return task

    async def _shut_down(self, timeout: float | None, grace_s: float) -> None:
        if self._starting is not None:
            await self._drain(timeout)
        await self._client.close(grace_s)
        await asyncio.to_thread(self._output_processor.close)
        await asyncio.to_thread(self.input_processor.close)

    async def _drain(self, timeout: float | None) -> None:
        assert self._starting is not None
        self._starting.cancel()
        await asyncio.wait([self._starting])
        if self._is_up and self._error is None:
            with suppress(TimeoutError, EngineDead):
                await self.wait_for_requests_to_drain(
                    self.config.front.shutdown_timeout if timeout is None else timeout
                )
        self._stats_line.log_end()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._state() != "dead":
            self._send_aborts(self._output_processor.forget(self._output_processor.open_keys()))
            self._fail_all(EngineDead("The engine has been shut down."))

    async def _start(self) -> None:
        self._learn(await self._client.start())
        self._tasks = [asyncio.create_task(self._live()), asyncio.create_task(self._log_stats())]

    def _learn(self, ready: Ready) -> None:
        """Take over what the core decided at its start."""
        self.config = self.config.with_max_model_len(ready.max_model_len)
        self._last_step_s = time.monotonic()

    @property
    def _is_up(self) -> bool:
        """The first start has succeeded."""
        return bool(self._tasks)

    def _state(self) -> HealthState:
        if self._error is not None:
            return "dead" if self._error.retry_after_s is None else "restarting"
        if self._is_draining:
            return "draining"
        if not self._is_up:
            return "starting"
        return "stalled" if self._client.is_stalled else "ready"

    def _own_client(self) -> AsyncClient:
        if not isinstance(self._client, AsyncClient):
            raise Unsupported("This front is attached to the core of another one: ask that front.")
        return self._client

    def _refuse_when_ending(self) -> None:
        if self._error is not None:
            raise copy(self._error)  # what is raised collects frames: a new one for each
        if self._is_draining:
            raise Overloaded("The engine is shutting down: send the request to another one.")

    def _end(self, keys: Iterable[str], reason: FinishReason, error: str = "") -> None:
        self._send_aborts(self._output_processor.end(keys, reason, error).abort_ids)

    async def _call(self, verb: str, arguments: dict[str, Any] | None = None) -> Any:
        await self.start()
        return await self._client.call(verb, arguments)

    async def _live(self) -> None:
        """Task: one core after the other, as long as another one comes."""
        error = await self._read()
        while error is not None:
            logger.error("%s", error)
            self._fail_all(error)
            if error.retry_after_s is None:
                self._gone.set()
                return
            error = await self._come_back() or await self._read()

    async def _read(self) -> EngineDead | None:
        """Take every output of the core until it ends: why it did."""
        try:
            async for outputs in self._client.outputs():
                if isinstance(outputs, EndRequests):
                    self._end_as_told(outputs)
                    continue
                self._note(outputs.stats)
                processed = self._output_processor.process(outputs)
                self._send_aborts(processed.abort_ids)
                self._send_requests(processed.new_requests)
        except EngineDead as error:
            return error
        except Exception as error:
            logger.exception("The front cannot go on.")
            return EngineDead(f"The outputs of the engine cannot be read: {error}")
        return None

    async def _come_back(self) -> EngineDead | None:
        """Wait for the next core: why it did not come."""
        try:
            ready = await self._client.start()
        except EngineDead as error:
            return error
        except Exception as error:
            logger.exception("The engine core cannot be started again.")
            return EngineDead(f"The engine core cannot be started again: {error}")
        self._learn(ready)
        self._error = None
        self.num_restarts += 1
        self.metrics.note_restart()
        logger.warning("A new engine core is ready; it is restart number %d.", self.num_restarts)
        return None

    def _note(self, stats: SchedulerStats) -> None:
        if stats.num_steps != self.stats.num_steps:
            self._last_step_s = time.monotonic()
        self.stats = stats

    async def _log_stats(self) -> None:
        """Task: the periodic line."""
        while self._stats_line.is_wanted and self._error is None:
            await asyncio.sleep(self._stats_line.interval_s)
            self._stats_line.log_if_due()

    def _end_as_told(self, order: EndRequests) -> None:
        """By another front."""
        processor, ids = self._output_processor, order.request_ids
        keys = processor.open_keys() if ids is None else processor.keys_of(ids, order.tenant)
        self._end(keys, FinishReason.ABORT)

    def _tell_fronts(self, request_ids: list[str] | None, tenant: str | None = None) -> None:
        if self._is_up and self._error is None:
            with suppress(EngineDead):  # then theirs have ended too
                self._client.tell_fronts(request_ids, tenant)

    def _send_aborts(self, request_ids: list[str]) -> None:
        if request_ids and self._error is None:
            with suppress(EngineDead):  # the reading task is about to tell everybody
                self._client.abort(request_ids)

    def _send_requests(self, requests: list[EngineRequest]) -> None:
        """Go on with open requests; one that cannot go on ends with an error."""
        for request in requests:
            try:
                self._client.add(request)
            except Overloaded as error:
                if (key := self._output_processor.owner_of(request.request_id)) is not None:
                    self._end([key], FinishReason.ERROR, str(error))

    def _fail_all(self, error: EngineDead) -> None:
        """Every open request ends with this error, once."""
        self._error = error
        self.stats = SchedulerStats()
        self._output_processor.forget(self._output_processor.open_keys(), FinishReason.ERROR)
        self._fail_open(self._error)
