"""`Backlog`: what a core has said and a front has not read yet; steps that wait there become one.

To handle a request's output costs the same for one token and for many. So a front that is behind its core,
and takes all that waits at once, catches up: its clients get longer pieces, instead of waiting ever longer
for the next one. Owned by the door. Readers know outputs of several tokens: a step may bring them, too.
"""

import asyncio
from collections import deque
from typing import TypeVar

from octavo.messages.control import EndRequests
from octavo.messages.request import EngineOutput, EngineOutputs

T = TypeVar("T")


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
    by_id = {output.request_id: output for output in step.outputs}
    for output in later.outputs:
        earlier = by_id.get(output.request_id)
        if earlier is None or earlier.weight_version != output.weight_version:  # each is of one version
            step.outputs.append(output)
            by_id[output.request_id] = output
        else:
            _append(earlier, output)
    step.stats = later.stats


def _append(output: EngineOutput, later: EngineOutput) -> None:
    if not output.new_token_ids:  # until the first token, each says how it began
        output.num_cached_tokens = later.num_cached_tokens
        output.scheduled_s = later.scheduled_s
        output.num_cache_creation_tokens = later.num_cache_creation_tokens
    output.new_token_ids += later.new_token_ids
    output.logprobs = _both(output.logprobs, later.logprobs)
    output.prompt_logprobs = _both(output.prompt_logprobs, later.prompt_logprobs)
    output.finish_reason, output.stop_reason = later.finish_reason, later.stop_reason
    output.error, output.ended_by_text = later.error, later.ended_by_text
    output.num_preemptions = later.num_preemptions
    output.source = later.source
    output.routes = _both(output.routes, later.routes)


def _both(one: list[T] | None, other: list[T] | None) -> list[T] | None:
    return one + other if one is not None and other is not None else one or other
