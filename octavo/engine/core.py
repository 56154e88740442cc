"""`EngineCore`: the loop's body. Schedule, give to the executor, read back, tell the front.

Driven by `process` (its own process) or by the front's in-process client; single-threaded. Keeps up to
`steps_in_flight` steps with the executor: while one runs, the next is planned and the last is read. Knows
neither sockets nor tensors.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from octavo.base import faults
from octavo.base.errors import ConfigError, EngineDead, RequestError
from octavo.base.log import get_logger
from octavo.config.engine import EngineConfig
from octavo.engine import commands
from octavo.engine.executor.interface import Executor
from octavo.engine.pause import PauseState
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.startup import plan_cache, plan_store
from octavo.engine.step_pacing import StepPacing
from octavo.engine.structured.matchers import RequestMatchers
from octavo.engine.timeouts import Timeouts
from octavo.messages.kv import CachePlan
from octavo.messages.request import EngineOutput, EngineOutputs, EngineRequest
from octavo.messages.step import ModelRunnerOutput, num_kept_masks

logger = get_logger(__name__)
_LONGEST_WAIT_S = 3600.0
_FEW_OPEN = 64
"""Up to so many requests, an early first token is worth more than a device that never waits."""


class EngineCore:
    """One engine: `start` once, then `add`, `abort`, `call` between `step`s, `close` at the end."""

    def __init__(
        self, config: EngineConfig, executor: Executor, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """clock: seconds, the same that the front's arrival times are of."""
        self._config = config
        self._executor = executor
        self._scheduler: Scheduler | None = None
        self._in_flight: deque[Future[ModelRunnerOutput]] = deque()
        self._early: list[EngineOutput] = []
        """Outputs that the next step will bring besides its own."""
        self._pause_state = PauseState()
        version, path = config.checkpoint.weight_version, config.checkpoint.path
        self._weights = commands.WeightsInUse(version, path if version else "", version)
        self._matchers = RequestMatchers(
            config.checkpoint.vocab_size, num_kept_masks(config.scheduler.max_num_rows)
        )
        self._timeouts = Timeouts(config.scheduler.max_request_seconds)
        self._clock = clock
        self._pacing = StepPacing(clock)
        self._max_in_flight = max(1, config.scheduler.steps_in_flight)
        self._num_stages = config.parallel.pipeline_parallel_size
        self._num_dropped = 0

    def start(self) -> CachePlan:
        """Load the model, plan and allocate the KV cache. Raises ConfigError, EngineDead."""
        plan = plan_cache(self._config, self._executor.start(self._config))
        plan.store = plan_store(self._config, plan)
        self._executor.allocate(plan)
        caching, limits = self._config.cache.enable_prefix_caching, self._config.scheduler
        self._scheduler = Scheduler(
            limits,
            plan,
            plan.max_total_tokens,
            caching,
            self._matchers,
            self._num_stages,
            self._config.cache.prefix_pin_share,
            self._clock,
        )
        return plan

    @property
    def scheduler(self) -> Scheduler:
        """Return the scheduler of the started engine."""
        if self._scheduler is None:
            raise ConfigError("The engine core has not been started.")
        return self._scheduler

    def prepare(self, request: EngineRequest) -> None:
        """Do what would take time in `add`; called before it, on any thread."""
        self._matchers.prepare(request)
        self.scheduler.prepare(request)
        self._executor.prepare(request.spec)

    def takes_time(self, request: EngineRequest) -> bool:
        """Return True if `prepare` has something to do for this request."""
        is_slow = request.constraint is not None or self.scheduler.kv.shared.reads
        return is_slow or self._executor.takes_time(request.spec)

    def add(self, request: EngineRequest) -> None:
        """Accept a request; one that can never run ends with an error output in the next step.

        An id in use is dropped with a warning: an answer would end the request that has the id. While the
        engine is paused, the request is queued.
        """
        if self._pause_state.queue_if_paused(request):
            self._timeouts.add(request)
        else:
            self._enter(request)

    def _enter(self, request: EngineRequest) -> None:
        try:
            self.scheduler.add(request)
        except RequestError as error:
            if error.parameter == "request_id":
                self._num_dropped += 1
                logger.warning("Dropped a request: %s", error)
                return
            self._early.append(EngineOutput.failed(request.request_id, str(error)))
        else:
            self._timeouts.add(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; they get no output any more. Unknown and finished ids are skipped."""
        ids = set(request_ids)
        self._early = [output for output in self._early if output.request_id not in ids]
        self._pause_state.drop_queued(ids)
        self.scheduler.abort(ids)
        for request_id in ids:
            self._timeouts.discard(request_id)

    def has_work(self) -> bool:
        """Return True while `step` has something to do."""
        is_pending = bool(self._early or self._in_flight)
        return is_pending or (self.scheduler.has_requests and not self._pause_state.is_frozen)

    def wait_s(self) -> float:
        """Return how long the loop may wait for news before the next `step`.

        Without work, until somebody's time is over. Where few run, until the device is about to need a step.
        """
        if not self.has_work():
            until_s = self._timeouts.next_s()
        elif self._may_delay_dispatch():
            until_s = self._pacing.due_s()
        else:
            return 0.0
        return _LONGEST_WAIT_S if until_s is None else min(max(0.0, until_s - self._clock()), _LONGEST_WAIT_S)

    def use_pause(self) -> bool:
        """Have the workers prepare something, if there is no work; return True if more is left."""
        return not self.has_work() and self._executor.use_pause()

    def step(self) -> EngineOutputs:
        """Give out steps as long as there is room and work, wait for the oldest, return what it brought.

        Raises EngineDead when a step failed as a whole: what the workers hold is unknown, the core is over.
        """
        self._end_late()
        while self._may_dispatch():
            began_s, is_late = self._clock(), bool(self._in_flight) and self._in_flight[0].done()
            step = self.scheduler.schedule()
            if step is None:
                break
            faults.hit("core.step")
            self._in_flight.append(self._executor.execute(step))
            self._pacing.begin_step(step.num_tokens, began_s, is_late=is_late)
        outputs, self._early = self._early, []
        if self._in_flight:
            outputs += self._read_oldest()
        else:
            self._executor.beat()
        for output in outputs:
            if output.finish_reason is not None:
                self._timeouts.discard(output.request_id)
        stats = self.scheduler.stats()
        stats.num_dropped, stats.has_work = self._num_dropped, self.has_work()
        stats.weight_version, stats.weight_path = self._weights.version, self._weights.path
        return EngineOutputs(outputs=outputs, stats=stats)

    def call(self, verb: str, arguments: dict[str, Any]) -> Any:
        """Run a control verb (engine/commands) behind the steps in flight. Raises RequestError."""
        while self._in_flight:
            self._early += self._read_oldest()
        parts = commands.Parts(self.scheduler, self._executor, self._pause_state, self._weights)
        result = commands.run(verb, arguments, parts)
        for request in self._pause_state.take_queued():
            self._enter(request)
        return result

    def close(self) -> None:
        """End the workers; open requests are dropped without an output. May be called twice."""
        self._in_flight.clear()
        if self._scheduler is not None:
            self._scheduler.kv.shared.close()
        self._executor.close()

    def _end_late(self) -> None:
        """End the requests whose time is over, wherever they are."""
        late = self._timeouts.take_late(self._clock())
        if late:
            for request in self._pause_state.drop_queued(late):
                self._enter(request)  # to end like the others
            self._early += self.scheduler.time_out(late)

    def _may_delay_dispatch(self) -> bool:
        """Return True if the next step may be dispatched later: one is running and few requests are open."""
        if self._num_stages > 1:
            return False
        is_next = bool(self._in_flight) and not self._early and self._may_dispatch()
        return is_next and self.scheduler.num_open <= _FEW_OPEN

    def _may_dispatch(self) -> bool:
        is_full = len(self._in_flight) >= self._max_in_flight or self.scheduler.awaits_masks
        return not (is_full or self._pause_state.is_frozen or self.scheduler.awaits_results)

    def _read_oldest(self) -> list[EngineOutput]:
        """Return what the oldest step brought; the newest may have waited for just that to sample."""
        try:
            result = self._in_flight.popleft().result()
        except EngineDead:
            raise
        except Exception as error:
            raise EngineDead(f"A step failed: {type(error).__name__}: {error}") from error
        outputs = self.scheduler.update(result, self._pacing.end_step())
        if version := self._weights.version:
            for output in outputs:
                output.weight_version = version
        if (masks := self.scheduler.take_masks()) is not None:
            self._executor.sample(masks)
        return outputs
