"""The line of figures at the end of `generate`: what was computed, how fast, what the prefix cache spared."""

import time
from dataclasses import dataclass, field

import octavo
from octavo.messages.request import FinishReason


@dataclass(slots=True)
class RunStats:
    """Counts over the requests of one run; made right before the first request is added."""

    started_s: float = field(default_factory=time.monotonic)
    first_token_s: float | None = None
    outputs: dict[str, "octavo.RequestOutput"] = field(default_factory=dict)

    def update(self, output: "octavo.RequestOutput") -> None:
        """Take in the newest output of a request (cumulative)."""
        if self.first_token_s is None and any(answer.token_ids for answer in output.outputs):
            self.first_token_s = time.monotonic()
        self.outputs[output.request_id] = output

    def errors(self) -> list[tuple[str, str]]:
        """(request id, text) of each answer that ended with an error."""
        return [
            (request_id, answer.error or "unknown error")
            for request_id, output in self.outputs.items()
            for answer in output.outputs
            if answer.finish_reason == FinishReason.ERROR
        ]

    def line(self) -> str:
        """The figures up to now, as one line."""
        seconds = max(time.monotonic() - self.started_s, 1e-9)
        outputs = self.outputs.values()
        given = sum(len(output.prompt_token_ids or ()) for output in outputs)
        cached = sum(output.num_cached_tokens or 0 for output in outputs)
        new = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
        first = "no token" if self.first_token_s is None else f"{self.first_token_s - self.started_s:.2f} s"
        return (
            f"{_count(len(outputs), 'prompt')} of {_count(given, 'token')} ({cached} from the prefix cache); "
            f"{_count(new, 'new token')} in {seconds:.2f} s = {new / seconds:.1f} tok/s; "
            f"first token after {first}"
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
