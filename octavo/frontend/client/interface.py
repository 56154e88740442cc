"""`EngineClient`: the front's door to one engine core, for callers that drive the steps themselves (`LLM`).

The asynchronous front has the same verbs on an event loop: `zmq.AsyncClient`.
"""

from abc import ABC, abstractmethod
from typing import Any

from octavo.messages.control import Ready
from octavo.messages.request import EngineOutputs, EngineRequest


class EngineClient(ABC):
    """One engine core, used by one thread. After EngineDead only `close` may be called."""

    @abstractmethod
    def start(self) -> Ready:
        """Load the model and plan the cache. Raises ConfigError when the user can mend it."""

    @abstractmethod
    def add(self, request: EngineRequest) -> None:
        """Hand over a request; it ends with exactly one finish reason in a later `step`."""

    @abstractmethod
    def abort(self, request_ids: list[str]) -> None:
        """End these requests; unknown and finished ids are skipped."""

    @abstractmethod
    def has_work(self) -> bool:
        """Whether `step` has something to do or to report."""

    @abstractmethod
    def step(self) -> EngineOutputs:
        """Run one step of the core and return what it brought. Raises EngineDead."""

    @abstractmethod
    def call(self, verb: str, arguments: dict[str, Any] | None = None) -> Any:
        """Run the core's command `verb` and return its result. Raises OctavoError when it is refused."""

    @abstractmethod
    def close(self) -> None:
        """End the core and free its memory; may be called twice."""
