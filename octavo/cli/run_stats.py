"""Figures of what was computed and how fast: of one answer (`Pace`), of a whole run (`RunStats`)."""

import time

import octavo
from octavo.messages.request import FinishReason


class Pace:
    """How fast tokens come; made when they are asked for."""

    def __init__(self) -> None:
        self._started_s = self._last_s = time.monotonic()
        self._first_s: float | None = None
        self._num_tokens = 0

    def note(self, num_tokens: int) -> None:
        """So many have come in all."""
        self._last_s, self._num_tokens = time.monotonic(), num_tokens
        if self._first_s is None and num_tokens:
            self._first_s = self._last_s

    def line(self, noun: str = "token") -> str:
        """The figures so far."""
        if self._first_s is None:
            return f"no {noun}"
        seconds = max(self._last_s - self._started_s, 1e-9)
        speed = (
            f"{_count(self._num_tokens, noun)} in {seconds:.2f} s = {self._num_tokens / seconds:.1f} tok/s"
        )
        return f"{speed}; first token after {self._first_s - self._started_s:.2f} s"


class RunStats:
    """Counts over the requests of one run; made right before the first request is added."""

    def __init__(self) -> None:
        self._outputs: dict[str, octavo.RequestOutput] = {}
        self._pace = Pace()
        self._num_tokens = 0

    def update(self, output: "octavo.RequestOutput") -> None:
        """Take in the newest output of a request (cumulative)."""
        self._num_tokens += _tokens(output) - _tokens(self._outputs.get(output.request_id))
        self._outputs[output.request_id] = output
        self._pace.note(self._num_tokens)

    def errors(self) -> list[tuple[str, str]]:
        """(request id, text) of each answer that ended with an error."""
        return [
            (request_id, answer.error or "unknown error")
            for request_id, output in self._outputs.items()
            for answer in output.outputs
            if answer.finish_reason == FinishReason.ERROR
        ]

    def line(self) -> str:
        """The figures up to now: what was given, what the prefix cache spared, how fast it went."""
        outputs = self._outputs.values()
        given = sum(len(output.prompt_token_ids or ()) for output in outputs)
        cached = sum(output.num_cached_tokens or 0 for output in outputs)
        prompts = f"{_count(len(outputs), 'prompt')} of {_count(given, 'token')}"
        return f"{prompts} ({cached} from the prefix cache); {self._pace.line('new token')}"


def _tokens(output: "octavo.RequestOutput | None") -> int:
    return sum(len(answer.token_ids) for answer in output.outputs) if output else 0


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
