"""`OpenRequest`: a client's request between its first and its last output.

Owned by the output processor, which hands it what the core brings and asks it what the client is to see.
`SampledRequest` is the common kind, n independent sequences; beam search has its own.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from octavo.frontend.input_processor import PreparedRequest
from octavo.frontend.outputs import CompletionOutput, RequestOutput, RequestStateStats
from octavo.frontend.prompt_scoring import PromptScores
from octavo.frontend.sequence_output import SequenceOutput
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages.request import EngineOutput, EngineRequest, FinishReason
from octavo.messages.sampling import RequestOutputKind, SamplingParams

Receiver = Callable[[RequestOutput], None]


class Orders(NamedTuple):
    """What the core is to be told: ids to abort, and what to compute next."""

    abort_ids: Sequence[str] = ()
    new_requests: Sequence[EngineRequest] = ()


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

    @property
    def params(self) -> SamplingParams:
        """What was asked of it."""
        return self._prepared.params

    @property
    def due_s(self) -> float:
        """Monotonic time by which the answer is wanted; infinite when at no certain time."""
        due_s = self._prepared.engine_requests[0].due_s
        return math.inf if due_s is None else due_s

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

    def _count(self, output: EngineOutput, now: float) -> None:
        stats = self.stats
        stats.scheduled_ts = stats.scheduled_ts or output.scheduled_s
        if output.finish_reason is not None:
            stats.num_preemptions += output.num_preemptions
        if output.new_token_ids:
            stats.num_generation_tokens += len(output.new_token_ids)
            stats.first_token_ts = stats.first_token_ts or now
            stats.last_token_ts = now

    def _wrap(
        self,
        completions: list[CompletionOutput],
        *,
        finished: bool,
        prompt_scores: PromptScores | None = None,
    ) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prepared.prompt,
            prompt_token_ids=self._prepared.prompt_token_ids,
            prompt_logprobs=prompt_scores.logprobs if prompt_scores else None,
            prompt_token_id_logprobs=prompt_scores.of_candidates if prompt_scores else None,
            outputs=completions,
            finished=finished,
            metrics=self.stats,
            num_cached_tokens=self._num_cached_tokens,
        )


class SampledRequest(OpenRequest):
    """`best_of` sequences, each an engine request of its own, of which the `n` best are shown."""

    def __init__(self, prepared: PreparedRequest, tokenizer: Tokenizer | None) -> None:
        super().__init__(prepared, tokenizer)
        params, ids = prepared.params, prepared.prompt_token_ids
        if prepared.engine_requests[0].prompt_embeds is not None:
            ids = []  # they mean nothing, so no text may depend on them
        self._sequences = {
            request.request_id: SequenceOutput(index, params, ids, tokenizer)
            for index, request in enumerate(prepared.engine_requests)
        }
        self._is_ranked = len(self._sequences) > params.n
        self._prompt_scores = PromptScores(params, tokenizer)
        self._prompt_scores_shown = False

    @property
    def finished(self) -> bool:
        """True when every sequence has ended."""
        return all(sequence.finish_reason is not None for sequence in self._sequences.values())

    def feed(self, output: EngineOutput, now: float) -> Orders:
        """Hand a step's output to its sequence, which may end before the core knows."""
        self._count(output, now)
        sequence = self._sequences[output.request_id]
        if sequence.index == 0:
            self._take_prompt_facts(output)
        return Orders(abort_ids=[output.request_id] if sequence.feed(output) else ())

    def fail(self, output: EngineOutput, error: str) -> Orders:
        """End the output's sequence."""
        self._sequences[output.request_id].fail(error)
        return Orders(abort_ids=[output.request_id] if output.finish_reason is None else ())

    def end(self, reason: FinishReason, error: str = "") -> list[str]:
        """End the open sequences."""
        open_ids = [
            engine_id for engine_id, sequence in self._sequences.items() if sequence.finish_reason is None
        ]
        for engine_id in open_ids:
            self._sequences[engine_id].end(reason, error=error)
        return open_ids

    def make_output(self) -> RequestOutput | None:
        """Cumulative, delta or final; who is among the best is known only in the end."""
        params, finished = self._prepared.params, self.finished
        sequences = list(self._sequences.values())
        news = [sequence for sequence in sequences if sequence.is_due(params.stream_interval or 1)]
        is_final = self._is_ranked or params.output_kind is RequestOutputKind.FINAL_ONLY
        if not news or (is_final and not finished):
            return None
        delta = params.output_kind is RequestOutputKind.DELTA
        if self._is_ranked:
            shown = self._best(sequences)
        else:
            shown = [sequence.take(delta=delta) for sequence in (news if delta else sequences)]
        prompt_scores = None if delta and self._prompt_scores_shown else self._prompt_scores
        self._prompt_scores_shown = True
        return self._wrap(shown, finished=finished, prompt_scores=prompt_scores)

    def _best(self, sequences: list[SequenceOutput]) -> list[CompletionOutput]:
        """The n sequences of the highest cumulative logprob, best first; failed ones come last."""
        ranked = sorted(
            sequences, key=lambda s: (s.finish_reason is FinishReason.ERROR, -s.cumulative_logprob)
        )
        best = [sequence.take(delta=False) for sequence in ranked[: self._prepared.params.n]]
        return [replace(completion, index=rank) for rank, completion in enumerate(best)]

    def _take_prompt_facts(self, output: EngineOutput) -> None:
        if self._num_cached_tokens is None:
            self._num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs:
            self._prompt_scores.take(output.prompt_logprobs)
