"""`SteppedCore`: a core that runs when its caller asks for a step, and its open requests. Part of LLMEngine.

CoreLink is the same on an event loop. Its coroutines never wait: they are there for `Operator`.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from octavo.frontend.client.inproc import InprocClient
from octavo.frontend.client.replicated import ReplicatedClient
from octavo.frontend.engine_lock import EngineLock
from octavo.frontend.output_processor import OutputProcessor
from octavo.frontend.outputs.request_output import RequestOutput
from octavo.frontend.requests.prepared import PreparedRequest
from octavo.messages.request import FinishReason, SchedulerStats

T = TypeVar("T")


class SteppedCore:
    """One core. Several threads may call its methods; no KeyboardInterrupt comes in the middle of one."""

    def __init__(self, client: InprocClient | ReplicatedClient, processor: OutputProcessor) -> None:
        self.client = client
        self.processor = processor
        self.stats = SchedulerStats()
        """As of the last step."""
        self.early: list[RequestOutput] = []
        """Outputs that came while the engine was being paused."""
        self.lock = EngineLock()
        """Held for several calls that belong together."""

    def open(self, prepared: PreparedRequest) -> None:
        """Open a request here and in the core."""
        with self.lock:
            self.processor.add(prepared)
            for request in prepared.engine_requests:
                self.client.add(request)

    def forget(self, keys: Iterable[str]) -> None:
        """End requests without a further output, here and in the core."""
        with self.lock:
            if abort_ids := self.processor.forget(keys):
                self.client.abort(abort_ids)

    def step(self) -> list[RequestOutput]:
        """Run one step: what it brought, for users. Raises EngineDead."""
        with self.lock:
            outputs = self.client.step()
            self.stats = outputs.stats
            processed = self.processor.process(outputs)
            if processed.abort_ids:
                self.client.abort(processed.abort_ids)
            for request in processed.new_requests:
                self.client.add(request)
        return processed.request_outputs

    def take_early(self) -> list[RequestOutput]:
        """Hand out the outputs that came while the engine was being paused."""
        with self.lock:
            early, self.early = self.early, []
        return early

    async def call(
        self, verb: str, arguments: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> Any:
        """Run a command of the core. A call in one's own process cannot be left: there is no timeout."""
        with self.lock:
            return self.client.call(verb, arguments)

    async def apply(self, function: Callable[[Any], Any]) -> list[Any]:
        """Call a function with the worker of each rank. Raises Unsupported if it is in another process."""
        results: list[Any] = await self.call("collective_rpc", {"function": function})
        return results

    async def rest(self, seconds: float) -> None:
        """Wait, in the caller's thread."""
        time.sleep(seconds)

    async def aside(self, work: Callable[[], T]) -> T:
        """Return what `work` does, in the caller's thread."""
        return work()

    def open_keys(self) -> list[str]:
        """The keys of all open requests."""
        return self.processor.open_keys()

    def end_all(self, keys: list[str]) -> None:
        """End these requests as aborted; their last outputs are early ones."""
        with self.lock:
            processed = self.processor.end(keys, FinishReason.ABORT)
            self.client.abort(processed.abort_ids)
            self.early += processed.request_outputs

    async def finish_all(self, keys: list[str]) -> None:
        """Step until all requests have ended; the outputs are early ones."""
        del keys  # nobody else adds any
        while self.processor.has_unfinished_requests():
            self.early += self.step()
