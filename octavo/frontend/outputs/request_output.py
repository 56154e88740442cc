"""What a request brings, as users see it. Public; names follow vLLM's, fields without a use yet stay None.

Made by the output processor. Times are of the monotonic clock, in seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.frontend.outputs.logprobs import PromptLogprobs, SampleLogprobs, joined
from octavo.messages.adapters import LoRARequest, LoRASum
from octavo.messages.pooling import Pooled


@dataclass(slots=True)
class RequestStateStats:
    """When a request was where; 0.0 = not yet. Ends in `_ts`: monotonic seconds."""

    num_generation_tokens: int = 0
    """Of all its sequences."""
    max_num_generation_tokens: int = 0
    """Of its longest sequence."""
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    """Handed to the engine."""
    scheduled_ts: float = 0.0
    """First taken into a step."""
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    num_preemptions: int = 0
    """Times its sequences lost their blocks to others."""

    @property
    def first_token_latency(self) -> float:
        """Seconds from arrival to the first token."""
        return max(0.0, self.first_token_ts - self.arrival_time)

    @property
    def queue_time(self) -> float:
        """Seconds from the hand-over to the first step."""
        return max(0.0, self.scheduled_ts - self.queued_ts)

    @property
    def prefill_time(self) -> float:
        """Seconds from the first step to the first token."""
        return max(0.0, self.first_token_ts - self.scheduled_ts)

    @property
    def decode_time(self) -> float:
        """Seconds from the first token to the last."""
        return max(0.0, self.last_token_ts - self.first_token_ts)

    @property
    def inference_time(self) -> float:
        """Seconds from the first step to the last token."""
        return max(0.0, self.last_token_ts - self.scheduled_ts)


@dataclass(slots=True)
class RequestSpecDecodeMetrics:
    """What was guessed of a sequence ahead of its tokens, and came true."""

    num_spec_tokens: int
    """The most tokens of a draft that came true."""
    histogram: list[int]
    """Drafts, by how many of their tokens came true."""
    num_draft_tokens: int

    @property
    def num_accepted_tokens(self) -> int:
        """Tokens that came true."""
        return sum(count * drafts for count, drafts in enumerate(self.histogram))


@dataclass(slots=True)
class WeightVersionSpan:
    """Output tokens [start, end) were made by weights of this name."""

    version: str
    start: int
    end: int


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
    """In the end, with enable_return_routed_experts: the experts of each token but the last, whose layers
    have not computed it, as a numpy array [tokens, layers, k]."""
    sampling_mask: Any = None
    spec_decode_metrics: RequestSpecDecodeMetrics | None = None
    """At the end, of an engine that guesses tokens ahead; None if a stop string ended it."""
    weight_versions: list[WeightVersionSpan] | None = None
    """At the end, of an engine whose weights have been replaced."""

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
    lora_request: LoRARequest | LoRASum | None = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache."""
    num_cache_creation_tokens: int | None = None
    """Prompt tokens that were computed and are kept in the prefix cache."""
    prompt_token_id_logprobs: list[list[float]] | None = None
    """Row i scores the candidates for prompt position prompt_logprob_start + 1 + i."""
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    pooled: Pooled | None = None
    """Of a pooling model: the result; outputs then has no text."""
    num_media_tokens: Mapping[str, int] = field(default_factory=dict)
    """Prompt tokens that stand for images and the like, by modality."""

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
        logprobs=joined(old.logprobs, new.logprobs),
        finish_reason=new.finish_reason,
        stop_reason=new.stop_reason,
        error=new.error,
    )
