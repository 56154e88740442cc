"""`Admission`: how many requests may wait. Asked before any work is done for a request.

Used by the asynchronous engine, from one event loop. Each request has a ticket from its arrival to its end,
whatever the end is; the bounds are the options max_num_queued_reqs and max_num_queued_tokens, of all fronts
of the engine together.
"""

from collections.abc import Mapping
from typing import Self

from octavo.base.errors import Overloaded, RequestError
from octavo.config.engine import EngineConfig
from octavo.frontend.admission.queue_usage import QueueUsage, Taken
from octavo.frontend.observe.engine_metrics import EngineMetrics
from octavo.frontend.requests.prompts import PromptType

_CHARS_PER_TOKEN = 4
"""Of ordinary text; only until its tokens have been counted."""
_LONGEST_RETRY_S = 60.0


class Ticket:
    """One request's place; released once, by whoever comes first."""

    def __init__(self, admission: "Admission", num_sequences: int, num_tokens: int) -> None:
        self._admission = admission
        self._num_sequences = num_sequences
        self._num_tokens = num_tokens
        admission.take(num_sequences, num_tokens)

    def set_prompt(self, num_tokens: int) -> None:
        """Its prompt turned out to have so many tokens that wait to be computed; 0: they are computed."""
        if num_tokens != self._num_tokens:
            self._admission.take(0, num_tokens - self._num_tokens)
            self._num_tokens = num_tokens

    def release(self) -> None:
        """Give the place back; may be called twice."""
        self._admission.take(-self._num_sequences, -self._num_tokens)
        self._num_sequences = self._num_tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class Admission:
    """Counts sequences and waiting prompt tokens of all open requests."""

    def __init__(self, config: EngineConfig, metrics: EngineMetrics, usage: QueueUsage | None = None) -> None:
        """usage: shared with other fronts, if there are any."""
        self.num_sequences = 0
        """Of this front."""
        self.num_waiting_tokens = 0
        self._usage = usage or QueueUsage.alone()
        self._seats_each = config.scheduler.max_num_seqs
        self._max_queued = config.front.max_num_queued_reqs
        self._max_tokens = config.front.max_num_queued_tokens
        self._metrics = metrics

    @property
    def _num_seats(self) -> int:
        return self._seats_each * self._metrics.num_replicas

    def check(self, num_sequences: int = 1, num_tokens: int = 0) -> None:
        """Raise Overloaded when a request of this size would have to be refused now, RequestError if always.

        A prompt longer than the bound is taken when none waits: it could never come in else.
        """
        taken = self._usage.total()
        num_queued = taken.num_sequences + num_sequences - self._num_seats
        if 0 < self._max_queued < num_sequences - self._num_seats:
            raise RequestError(
                f"One prompt may have {self._num_seats + self._max_queued} sequences here (max_num_seqs + "
                f"max_num_queued_reqs), got {num_sequences}.",
                "n",
            )
        if self._max_queued == 0 or 0 < self._max_queued < num_queued:
            self._refuse("max_num_queued_reqs", num_queued - num_sequences, self._max_queued, "sequences")
        waiting = taken.num_waiting_tokens
        if self._max_tokens and waiting and waiting + num_tokens > self._max_tokens:
            self._refuse("max_num_queued_tokens", waiting, self._max_tokens, "prompt tokens")

    def reserve(self, num_sequences: int, prompt: PromptType) -> Ticket:
        """Take a place, all or nothing. Raises Overloaded."""
        num_tokens = _estimate(prompt)
        self.check(num_sequences, num_tokens)
        return Ticket(self, num_sequences, num_tokens)

    def take(self, num_sequences: int, num_tokens: int) -> None:
        """Count so much more, or less, for this front."""
        self.num_sequences += num_sequences
        self.num_waiting_tokens += num_tokens
        self._usage.write(Taken(self.num_sequences, self.num_waiting_tokens))

    def forget(self, front: int) -> None:
        """The process of another front has ended: what it had taken is free."""
        self._usage.write(Taken(0, 0), front)

    def _refuse(self, option: str, waiting: int, allowed: int, unit: str) -> None:
        self._metrics.note_rejection(option)
        raise Overloaded(
            f"The engine's queue is full: {max(0, waiting)} {unit} wait, {option}={allowed}. Nothing was "
            "done; try again later.",
            retry_after_s=self._retry_after_s(),
        )

    def _retry_after_s(self) -> float:
        """About when the queue will have moved: rounds of requests ahead times the time of one."""
        latency = self._metrics.request_latency
        mean_s = latency.sum / latency.count if latency.count else 1.0
        num_sequences = self._usage.total().num_sequences
        return min(max(1.0, mean_s * num_sequences / self._num_seats), _LONGEST_RETRY_S)


def _estimate(prompt: object) -> int:
    """Tokens of a prompt that nobody has looked at: it may be anything."""
    if isinstance(prompt, Mapping):
        return _estimate(prompt.get("prompt_token_ids") or prompt.get("prompt") or "")
    if isinstance(prompt, str):
        return len(prompt) // _CHARS_PER_TOKEN + 1
    return len(prompt) if isinstance(prompt, list | tuple) else 1
