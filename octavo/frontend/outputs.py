"""What a request brings, as users see it. Public; names follow vLLM's, fields without a use yet stay None.

Made by the output processor. Times are of the monotonic clock, in seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Logprob:
    """One token's logprob at one position; rank 1 = most likely."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""By token id: the chosen token first, then the most likely ones in order."""
SampleLogprobs = list[PositionLogprobs]
PromptLogprobs = list[PositionLogprobs | None]
"""One entry per prompt token; None for the first."""


@dataclass(slots=True)
class RequestStateStats:
    """When a request was where; 0.0 = not yet. Ends in `_ts`: monotonic seconds."""

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0

    @property
    def first_token_latency(self) -> float:
        """Seconds from arrival to the first token."""
        return max(0.0, self.first_token_ts - self.arrival_time)


@dataclass(slots=True)
class CompletionOutput:
    """One sequence of a request. With RequestOutputKind.DELTA: what is new of it."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None
    """stop, length, abort, error, timeout, repetition; None while it goes on."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for end of text."""
    error: str | None = None
    """With finish_reason "error": what went wrong."""
    lora_request: Any = None
    routed_experts: Any = None
    sampling_mask: Any = None
    spec_decode_metrics: Any = None
    weight_versions: Any = None

    def finished(self) -> bool:
        """True when no token follows."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """One request: its prompt and its sequences, ordered by index."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    """True when every sequence has ended."""
    metrics: RequestStateStats | None = None
    lora_request: Any = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache."""
    num_cache_creation_tokens: int | None = None
    prompt_token_id_logprobs: Any = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None

    def add(self, next_output: "RequestOutput", aggregate: bool) -> None:
        """Merge a later output of the same request; `aggregate`: append deltas, else the later one wins."""
        self.finished |= next_output.finished
        self.metrics = next_output.metrics
        by_index = {output.index: n for n, output in enumerate(self.outputs)}
        for new in next_output.outputs:
            n = by_index.get(new.index)
            if n is None:
                self.outputs.append(new)
            else:
                self.outputs[n] = _joined(self.outputs[n], new) if aggregate else new
        self.outputs.sort(key=lambda output: output.index)


def _joined(old: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    return CompletionOutput(
        index=new.index,
        text=old.text + new.text,
        token_ids=[*old.token_ids, *new.token_ids],
        cumulative_logprob=new.cumulative_logprob,
        logprobs=None if new.logprobs is None else (old.logprobs or []) + new.logprobs,
        finish_reason=new.finish_reason,
        stop_reason=new.stop_reason,
        error=new.error,
    )
