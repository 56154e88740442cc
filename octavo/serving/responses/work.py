"""`ResponseWork`: one response in the making, told as a stream, awaited, or left to the background.

Made by `routes`. Whichever way, the turn is the same; a response that was asked to be stored is in the store
before its end is told.
"""

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from octavo.base.log import get_logger
from octavo.serving.caller import Caller
from octavo.serving.errors import HTTPError
from octavo.serving.openai.protocol import ChatRequest
from octavo.serving.openai.turn import TurnStart, turn_events
from octavo.serving.responses import record
from octavo.serving.responses.answers import Response
from octavo.serving.responses.background import EventLog
from octavo.serving.responses.record import StoredResponse
from octavo.serving.responses.response_answer import ResponseAnswer
from octavo.serving.store.database import Store
from octavo.serving.streaming import StreamEvent, named_event

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ResponseWork:
    """Used once."""

    caller: Caller
    store: Store
    asked: ChatRequest
    stored: StoredResponse
    """Its response grows."""
    answer: ResponseAnswer

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events. Raises what `turn_events` does, before the first."""
        has_begun = False
        try:
            async with aclosing(self._told()) as told:
                async for events in told:
                    if data := b"".join(map(named_event, events)):
                        has_begun = True
                        yield data
        except Exception as error:
            if not has_begun:
                raise
            yield b"".join(map(named_event, self.answer.fail(error)))
        await self._keep()
        yield named_event(self.answer.told_end())

    async def finish(self) -> Response:
        """The whole response."""
        async with aclosing(self._told()) as told:
            async for events in told:
                for _ in events:
                    pass  # told to nobody
        await self._keep()
        return self.stored.response

    async def go_on(self, log: EventLog | None = None) -> None:
        """Task: what `add` has put into the store is worked on there; log: who wants to may read along."""
        log = log or EventLog()
        try:
            with await self.caller.engines.borrow(self.asked.model or self.caller.model):
                async with aclosing(self._told()) as told:
                    async for events in told:
                        log.add(map(named_event, events))
        except Exception as error:
            log.add(map(named_event, self.answer.fail(error)))
        await self._settle()
        log.end(lambda _: named_event(self.answer.told_end()))

    async def add(self) -> None:
        """Put it into the store as it is."""
        await self.store.run(partial(record.add, tenant=self.caller.tenant, stored=self.stored))

    async def _told(self) -> AsyncGenerator[Iterator[StreamEvent], None]:
        """What a stream tells, event by event of the turn. Each to be exhausted."""
        async with aclosing(turn_events(self.caller, self.asked, "responses")) as turn:
            async for event in turn:
                yield self.answer.take(event)
                if isinstance(event, TurnStart) and self.stored.response.background:
                    await self._settle()

    async def _settle(self) -> None:
        """Bring the store up to date, unless the response has been deleted there."""
        await self._write(record.settle)

    async def _keep(self) -> None:
        """A store without room is no reason to withhold the answer."""
        if self.stored.response.store:
            self.stored.response.store = await self._write(record.add)

    async def _write(self, change: Callable[..., object]) -> bool:
        """Whether the store has taken it."""
        try:
            await self.store.run(partial(change, tenant=self.caller.tenant, stored=self.stored))
        except HTTPError as error:
            logger.warning("The response %s is not kept: %s", self.stored.response.id, error)
            return False
        return True


def told_cancelled(response: Response, number: int) -> bytes:
    """The last event of one that was cancelled: OpenAI's clients know no type for it, so status says it."""
    return named_event({"type": "response.incomplete", "sequence_number": number, "response": response})
