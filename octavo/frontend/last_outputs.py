"""`LastOutputs`: those of requests of AsyncLLM.add_request, until AsyncLLM.step is called."""

import asyncio
from collections.abc import Callable

from octavo.frontend.admission.admission import Ticket
from octavo.frontend.outputs.request_output import RequestOutput


class LastOutputs:
    """Holds the requests' places in the queue, then their last outputs. Used on one event loop."""

    def __init__(self) -> None:
        self._tickets: dict[str, Ticket] = {}
        """Of open requests, by key."""
        self._finished: list[RequestOutput] = []
        self._news = asyncio.Event()

    def expect(self, key: str, ticket: Ticket) -> None:
        """Wait for the last output of a request, and release its ticket then."""
        self._tickets[key] = ticket

    def receive(self, key: str, output: RequestOutput) -> None:
        """Take an output of a request that is expected."""
        ticket = self._tickets[key]
        ticket.set_prompt(0)
        if output.finished:
            ticket.release()
            del self._tickets[key]
            self._finished.append(output)
            self._news.set()

    async def take(self, check: Callable[[], None]) -> list[RequestOutput]:
        """Wait for last outputs and hand them out; [] when none is expected. Raises what `check` raises."""
        while not self._finished:
            check()
            if not self._tickets:
                break
            self._news.clear()
            await self._news.wait()
        finished, self._finished = self._finished, []
        return finished

    def fail(self) -> None:
        """Expect nothing more: the core has ended."""
        for ticket in self._tickets.values():
            ticket.release()
        self._tickets.clear()
        self._news.set()
