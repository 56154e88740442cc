"""`OpenRequest`: a client's request between its first and its last output.

Owned by the output processor, which hands it what the core brings and asks it what the client is to see.
`SampledRequest` is the common kind, n independent sequences; beam search has its own.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from octavo.frontend.outputs.request_output import CompletionOutput, RequestOutput, RequestStateStats
from octavo.frontend.outputs.sequence_output import SequenceOutput
from octavo.frontend.requests.kv_transfer import told
from octavo.frontend.requests.prepared import PreparedRequest
from octavo.frontend.requests.prompt_scoring import PromptScores
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages.pooling import Pooled
from octavo.messages.request import EngineOutput, EngineRequest, FinishReason, KVSource
from octavo.messages.sampling import RequestOutputKind, SamplingParams

Receiver = Callable[[RequestOutput], None]


class Orders(NamedTuple):
    """What the core is to be told: ids to abort, and what to compute next."""

    abort_ids: Sequence[str] = ()
    new_requests: Sequence[EngineRequest] = ()


NO_ORDERS = Orders()


class OpenRequest(ABC):
    """What all kinds have in common."""

    def __init__(self, prepared: PreparedRequest, tokenizer: Tokenizer | None) -> None:
        self.request_id = prepared.request_id
        self.key = prepared.key
        self.receiver: Receiver | None = None
        """Who gets the outputs; None: whoever drives the steps."""
        self._prepared = prepared
        self._tokenizer = tokenizer
        self.stats = RequestStateStats(arrival_time=prepared.arrival_s, queued_ts=time.monotonic())
        self._num_cached_tokens: int | None = None
        self._num_cache_creation_tokens: int | None = None
        self.num_media_tokens: dict[str, int] = {}
        """Of the prompt, by modality."""
        for item in self.asked.spec.media:
            count = self.num_media_tokens.get(item.modality, 0)
            self.num_media_tokens[item.modality] = count + item.length
        self._source: KVSource | None = None

    @property
    def params(self) -> SamplingParams:
        """What was asked of it."""
        return self._prepared.params

    @property
    def asked(self) -> EngineRequest:
        """What the core was asked first for it."""
        return self._prepared.engine_requests[0]

    @property
    def tenant(self) -> str:
        """Whose request it is."""
        return self.asked.standing.tenant

    @property
    def due_s(self) -> float:
        """Monotonic time by which the answer is wanted; infinite when at no certain time."""
        due_s = self._prepared.engine_requests[0].standing.due_s
        return math.inf if due_s is None else due_s

    def num_cached(self, output: EngineOutput) -> int:
        """How many tokens of the prompt were found in the cache, virtual ones left out."""
        return max(0, output.num_cached_tokens - self.asked.spec.num_virtual_tokens)

    @property
    def adapter_name(self) -> str | None:
        """The name of its adapter, or of their sum."""
        given = self._prepared.lora_request, self._prepared.prompt_adapter_request
        return "+".join(adapter.lora_name for adapter in given if adapter is not None) or None

    @property
    def trace_headers(self) -> Mapping[str, str]:
        """The place of this request in its client's trace (W3C)."""
        return self._prepared.trace_headers

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self._prepared.prompt_token_ids)

    @property
    @abstractmethod
    def finished(self) -> bool:
        """True when nothing more comes."""

    @abstractmethod
    def feed(self, output: EngineOutput, now: float) -> Orders:
        """Take in what a step brought for one of its engine requests."""

    def resume(self, asked: EngineRequest) -> EngineRequest:
        """What another core must be told to go on with one of its engine requests."""
        return asked

    @abstractmethod
    def fail(self, output: EngineOutput, error: str) -> Orders:
        """`feed` raised for this output: end what it belongs to, without touching the output again."""

    @abstractmethod
    def end(self, reason: FinishReason, error: str = "") -> list[str]:
        """End it from the front; the core's ids to abort."""

    @abstractmethod
    def make_output(self) -> RequestOutput | None:
        """What the client is to see now, in the kind asked for; None when there is nothing new."""

    def break_off(self, error: str) -> RequestOutput:
        """Its last output when `make_output` fails: nothing of what was generated is looked at again."""
        reason = FinishReason.ERROR.value
        lost = [CompletionOutput(i, "", [], finish_reason=reason, error=error) for i in range(self.params.n)]
        return self._wrap(lost, finished=True)

    def _count(self, output: EngineOutput, now: float, num_before: int = 0) -> None:
        """num_before: tokens that its sequence has already."""
        stats, num_new = self.stats, len(output.new_token_ids)
        if not stats.first_token_ts:
            stats.scheduled_ts = stats.scheduled_ts or output.scheduled_s
            stats.first_token_ts = now if num_new or output.pooled else 0.0
        if num_new:
            stats.num_generation_tokens += num_new
            stats.max_num_generation_tokens = max(stats.max_num_generation_tokens, num_before + num_new)
            stats.last_token_ts = now
        if output.finish_reason is not None:
            stats.num_preemptions += output.num_preemptions
            self._source = output.source or self._source

    def _wrap(
        self,
        completions: list[CompletionOutput],
        *,
        finished: bool,
        prompt_scores: PromptScores | None = None,
    ) -> RequestOutput:
        source = self._prepared.engine_requests[0].spec.source
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prepared.prompt,
            prompt_token_ids=self._prepared.prompt_token_ids,
            prompt_logprobs=prompt_scores.logprobs if prompt_scores else None,
            prompt_token_id_logprobs=prompt_scores.of_candidates if prompt_scores else None,
            outputs=completions,
            finished=finished,
            metrics=self.stats,
            lora_request=self._prepared.lora_request,
            num_cached_tokens=self._num_cached_tokens,
            num_cache_creation_tokens=self._num_cache_creation_tokens,
            num_media_tokens=self.num_media_tokens,
            encoder_prompt=self._prepared.encoder_prompt,
            encoder_prompt_token_ids=source.token_ids if source else None,
            kv_transfer_params=told(self._source) if finished else None,
        )


class SampledRequest(OpenRequest):
    """`best_of` sequences, each an engine request of its own, of which the `n` best are shown."""

    def __init__(self, prepared: PreparedRequest, tokenizer: Tokenizer | None) -> None:
        super().__init__(prepared, tokenizer)
        params, ids = prepared.params, prepared.prompt_token_ids
        if prepared.engine_requests[0].spec.embeds is not None:
            ids = []  # they mean nothing, so no text may depend on them
        self._sequences = {
            request.request_id: SequenceOutput(index, params, ids, tokenizer)
            for index, request in enumerate(prepared.engine_requests)
        }
        self._open = self._sequences.copy()
        """Those that go on."""
        self._is_ranked = len(self._sequences) > params.n
        self._is_final = self._is_ranked or params.output_kind is RequestOutputKind.FINAL_ONLY
        self._is_delta = params.output_kind is RequestOutputKind.DELTA
        self._interval = params.stream_interval or 1
        self._prompt_scores = PromptScores(params, tokenizer, self.asked.spec.num_virtual_tokens)
        self._prompt_scores_shown = False

    @property
    def finished(self) -> bool:
        return not self._open

    def feed(self, output: EngineOutput, now: float) -> Orders:
        """Hand a step's output to its sequence, which may end before the core knows."""
        sequence = self._sequences[output.request_id]
        self._count(output, now, len(sequence.token_ids))
        if sequence.index == 0 and (self._num_cached_tokens is None or output.prompt_logprobs):
            self._take_prompt_facts(output)
        is_over_here = sequence.feed(output)
        if sequence.finish_reason is not None:
            self._open.pop(output.request_id, None)
        return Orders(abort_ids=[output.request_id]) if is_over_here else NO_ORDERS

    def resume(self, asked: EngineRequest) -> EngineRequest:
        """Behind the tokens that have come; before the first one the prompt is scored anew."""
        sequence = self._sequences[asked.request_id]
        if sequence.index == 0 and not sequence.token_ids:
            self._prompt_scores = PromptScores(self.params, self._tokenizer)
        return msgspec.structs.replace(asked, given_output_ids=sequence.token_ids.copy())

    def fail(self, output: EngineOutput, error: str) -> Orders:
        self._sequences[output.request_id].fail(error)
        self._open.pop(output.request_id, None)
        return Orders(abort_ids=[output.request_id] if output.finish_reason is None else ())

    def end(self, reason: FinishReason, error: str = "") -> list[str]:
        ended, self._open = self._open, {}
        for sequence in ended.values():
            sequence.end(reason, error=error)
        return list(ended)

    def make_output(self) -> RequestOutput | None:
        """Cumulative, delta or final; who is among the best is known only in the end."""
        if self._is_final and self._open:
            return None
        sequences = self._sequences.values()
        news = [sequence for sequence in sequences if sequence.is_due(self._interval)]
        if not news:
            return None
        if self._is_ranked:
            shown = self._best(sequences)
        else:
            delta = self._is_delta
            shown = [sequence.take(delta=delta) for sequence in (news if delta else sequences)]
        prompt_scores = None if self._is_delta and self._prompt_scores_shown else self._prompt_scores
        self._prompt_scores_shown = True
        return self._wrap(shown, finished=self.finished, prompt_scores=prompt_scores)

    def _best(self, sequences: Iterable[SequenceOutput]) -> list[CompletionOutput]:
        """The n sequences of the highest cumulative logprob, best first; failed ones come last."""
        ranked = sorted(
            sequences, key=lambda s: (s.finish_reason is FinishReason.ERROR, -s.cumulative_logprob)
        )
        best = [sequence.take(delta=False) for sequence in ranked[: self._prepared.params.n]]
        return [replace(completion, index=rank) for rank, completion in enumerate(best)]

    def _take_prompt_facts(self, output: EngineOutput) -> None:
        if self._num_cached_tokens is None:
            self._num_cached_tokens = self.num_cached(output)
            self._num_cache_creation_tokens = output.num_cache_creation_tokens
        if output.prompt_logprobs:
            self._prompt_scores.take(output.prompt_logprobs)


class PooledRequest(SampledRequest):
    """A request to a pooling model: it has one result, or those of a list's texts, and nothing generated."""

    _pooled: Pooled | None = None

    def feed(self, output: EngineOutput, now: float) -> Orders:
        earlier, later = self._pooled, output.pooled
        self._pooled = later if earlier is None else earlier if later is None else earlier + later
        return super().feed(output, now)

    def resume(self, asked: EngineRequest) -> EngineRequest:
        """Of a list, all texts anew."""
        self._pooled = None
        return super().resume(asked)

    def make_output(self) -> RequestOutput | None:
        made = super().make_output()
        if made is not None:
            made.pooled = self._pooled
        return made
