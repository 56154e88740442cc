"""The engine core in the caller's process: every verb is a plain call, a step runs in the caller's thread.

`zmq.AsyncClient` has the same verbs on an event loop.
"""

from typing import Any

from octavo.base.errors import EngineDead
from octavo.base.registry import load_object, load_plugins
from octavo.config.engine import EngineConfig
from octavo.messages.control import Ready
from octavo.messages.kv import CachePlan
from octavo.messages.request import EngineOutputs, EngineRequest

_CORE = "octavo.engine.core:EngineCore"
_MAKE_EXECUTOR = "octavo.engine.executor:make_executor"


class InprocClient:
    """An EngineCore and its executor, used by one thread. After EngineDead only `close` may be called."""

    def __init__(self, config: EngineConfig) -> None:
        load_plugins()
        self._core: Any = load_object(_CORE)(config, load_object(_MAKE_EXECUTOR)(config))
        self._is_closed = False

    def start(self) -> Ready:
        """Load the model and plan the cache. Raises ConfigError when the user can mend it."""
        try:
            plan: CachePlan = self._core.start()
        except BaseException:
            self.close()
            raise
        return Ready(plan, plan.max_model_len)

    def add(self, request: EngineRequest) -> None:
        """Hand over a request; it ends with exactly one finish reason in a later `step`."""
        self._refuse_when_closed()
        self._core.prepare(request)
        self._core.add(request)

    def abort(self, request_ids: list[str]) -> None:
        """End these requests; unknown and finished ids are skipped."""
        self._core.abort(request_ids)

    def has_work(self) -> bool:
        """Whether `step` has something to do or to report."""
        return bool(self._core.has_work())

    def step(self) -> EngineOutputs:
        """Run one step. An error in it leaves the core's state unknown: EngineDead, with the cause."""
        self._refuse_when_closed()
        try:
            outputs: EngineOutputs = self._core.step()
        except EngineDead:
            raise
        except Exception as error:
            raise EngineDead(f"A step of the engine failed: {type(error).__name__}: {error}") from error
        return outputs

    def call(self, verb: str, arguments: dict[str, Any] | None = None) -> Any:
        """Run the core's command `verb` and return its result. Raises EngineDead after `close`."""
        self._refuse_when_closed()
        return self._core.call(verb, arguments or {})

    def close(self) -> None:
        """End the core and free its memory; may be called twice."""
        self._is_closed = True
        self._core.close()

    def _refuse_when_closed(self) -> None:
        if self._is_closed:
            raise EngineDead("The engine has been shut down.")
