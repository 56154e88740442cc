"""`Backlog`: what a core has said and a front has not read yet; steps that wait there become one.

To handle a request's output costs the same for one token and for many. So a front that is behind its core,
and takes all that waits at once, catches up: its clients get longer pieces, instead of waiting ever longer
for the next one. Owned by the door. Readers know outputs of several tokens: a step may bring them, too.
"""

import asyncio
from collections import deque
from typing import TypeVar

from octavo.messages.control import EndRequests
from octavo.messages.pooling import Pooled
from octavo.messages.request import EngineOutput, EngineOutputs, RoutedTokens, TokenLogprobs

T = TypeVar("T", list[TokenLogprobs], list[RoutedTokens], Pooled)


class Backlog:
    """A queue for one event loop and one reader."""

    def __init__(self) -> None:
        self._messages: deque[EngineOutputs | EndRequests | None] = deque()
        self._news = asyncio.Event()

    def put(self, message: EngineOutputs | EndRequests | None) -> None:
        """Add a message. None: nothing follows."""
        self._messages.append(message)
        self._news.set()

    async def get(self) -> EngineOutputs | EndRequests | None:
        """The next message; of steps, all up to the next one of another kind."""
        while not self._messages:
            self._news.clear()
            await self._news.wait()
        message = self._messages.popleft()
        if isinstance(message, EngineOutputs):
            while self._messages and isinstance(later := self._messages[0], EngineOutputs):
                self._messages.popleft()
                _append_step(message, later)
        return message


def _append_step(step: EngineOutputs, later: EngineOutputs) -> None:
    places = {output.request_id: place for place, output in enumerate(step.outputs)}
    for output in later.outputs:
        place = places.get(output.request_id)
        if place is None or step.outputs[place].weight_version != output.weight_version:
            places[output.request_id] = len(step.outputs)  # each is of one version
            step.outputs.append(output)
        else:
            _prepend(step.outputs[place], output)
            step.outputs[place] = output
    step.stats = later.stats


def _prepend(earlier: EngineOutput, output: EngineOutput) -> None:
    """Put what came earlier before it; how its request stands, and ends, the later one says."""
    if earlier.new_token_ids:  # until the first token, each says how it began
        output.num_cached_tokens = earlier.num_cached_tokens
        output.scheduled_s = earlier.scheduled_s
        output.num_cache_creation_tokens = earlier.num_cache_creation_tokens
    earlier.new_token_ids += output.new_token_ids
    output.new_token_ids = earlier.new_token_ids
    output.logprobs = _both(earlier.logprobs, output.logprobs)
    output.prompt_logprobs = _both(earlier.prompt_logprobs, output.prompt_logprobs)
    output.routes = _both(earlier.routes, output.routes)
    output.pooled = _both(earlier.pooled, output.pooled)


def _both(one: T | None, other: T | None) -> T | None:
    return one + other if one is not None and other is not None else one or other
