"""`EngineCore`: the loop's body. Schedule, give to the executor, read back, tell the front.

Driven by `process` (its own process) or by the front's in-process client; single-threaded. Keeps up to
`steps_in_flight` steps with the executor: while one runs, the next is planned and the last is read. Knows
neither sockets nor tensors.
"""

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from octavo.base.errors import ConfigError, EngineDead, RequestError
from octavo.base.log import get_logger
from octavo.config.engine import EngineConfig
from octavo.engine import commands
from octavo.engine.executor.interface import Executor
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.startup import plan_cache
from octavo.messages.kv import CachePlan
from octavo.messages.request import EngineOutput, EngineOutputs, EngineRequest, FinishReason
from octavo.messages.step import ModelRunnerOutput

logger = get_logger(__name__)


class EngineCore:
    """One engine: `start` once, then `add`, `abort`, `call` between `step`s, `close` at the end."""

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        self._config = config
        self._executor = executor
        self._scheduler: Scheduler | None = None
        self._in_flight: deque[Future[ModelRunnerOutput]] = deque()
        self._refused: list[EngineOutput] = []
        self._max_in_flight = max(1, config.scheduler.steps_in_flight)

    def start(self) -> CachePlan:
        """Load the model, plan and allocate the KV cache. Raises ConfigError, EngineDead."""
        plan = plan_cache(self._config, self._executor.start(self._config))
        self._executor.allocate(plan)
        self._scheduler = Scheduler(
            self._config.scheduler,
            plan,
            self._config.model.max_model_len,
            self._config.cache.enable_prefix_caching,
        )
        return plan

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of the started engine."""
        if self._scheduler is None:
            raise ConfigError("The engine core has not been started.")
        return self._scheduler

    def add(self, request: EngineRequest) -> None:
        """Accept a request; one that can never run ends with an error output in the next step.

        An id in use is dropped with a warning: an answer would end the request that has the id.
        """
        try:
            self.scheduler.add(request)
        except RequestError as error:
            if error.parameter == "request_id":
                logger.warning("Dropped a request: %s", error)
                return
            self._refused.append(
                EngineOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=FinishReason.ERROR,
                    error=str(error),
                )
            )

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; they get no output any more. Unknown and finished ids are skipped."""
        ids = set(request_ids)
        self._refused = [output for output in self._refused if output.request_id not in ids]
        self.scheduler.abort(ids)

    def has_work(self) -> bool:
        """True while `step` has something to do."""
        return bool(self._refused or self._in_flight) or self.scheduler.has_requests

    def step(self) -> EngineOutputs:
        """Give out steps as long as there is room and work, wait for the oldest, return what it brought.

        Raises EngineDead when a step failed as a whole: what the workers hold is unknown, the core is over.
        """
        while len(self._in_flight) < self._max_in_flight:
            step = self.scheduler.schedule()
            if step is None:
                break
            self._in_flight.append(self._executor.execute(step))
        outputs, self._refused = self._refused, []
        if self._in_flight:
            outputs += self.scheduler.update(self._read_oldest())
        return EngineOutputs(outputs=outputs, stats=self.scheduler.stats())

    def call(self, verb: str, arguments: dict[str, Any]) -> Any:
        """Run a control verb (engine/commands). Raises RequestError for an unknown one."""
        return commands.run(verb, arguments, self.scheduler, self._executor)

    def close(self) -> None:
        """End the workers; open requests are dropped without an output. May be called twice."""
        self._in_flight.clear()
        self._executor.close()

    def _read_oldest(self) -> ModelRunnerOutput:
        try:
            return self._in_flight.popleft().result()
        except EngineDead:
            raise
        except Exception as error:
            raise EngineDead(f"A step failed: {type(error).__name__}: {error}") from error
