"""`BeamSearchRequest`: an open request that searches. Every token of every beam is an engine request.

Owned by the output processor. A generation is one request per running hypothesis, for a single token and its
most likely alternatives. The engine holds it after its end, so that those who go on from it share its blocks:
of a long prompt each beam owns a block or two. When a generation is scored, the one before it is let go.

    held: parents ──► open: this generation ──► scored: the next one follows, the parents are let go
"""

from dataclasses import replace
from itertools import count

import msgspec

from octavo.frontend.beam_search.rules import BeamSearch, Hypothesis
from octavo.frontend.outputs.request_output import CompletionOutput, RequestOutput
from octavo.frontend.outputs.sequence_output import SequenceOutput
from octavo.frontend.requests.open_request import NO_ORDERS, OpenRequest, Orders
from octavo.frontend.requests.prepared import PreparedRequest
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages.request import EngineOutput, EngineRequest, FinishReason, TokenLogprobs

_SCORED = (FinishReason.STOP, FinishReason.LENGTH)


class BeamSearchRequest(OpenRequest):
    """Its one output comes at the end, whatever the output kind: only then the best beams are known."""

    def __init__(self, prepared: PreparedRequest, tokenizer: Tokenizer | None) -> None:
        super().__init__(prepared, tokenizer)
        assert prepared.beam_rules is not None
        [self._first] = prepared.engine_requests
        self._rules = prepared.beam_rules
        self._search = BeamSearch(self._rules)
        self._generation = dict(zip([self._first.request_id], self._search.running, strict=True))
        """The hypotheses that the engine scores, by its request ids."""
        self._scores: dict[Hypothesis, TokenLogprobs] = {}
        self._parent_ids: list[str] = []
        self._numbers = count(1)
        self._reason: FinishReason | None = None
        self._error = ""

    @property
    def finished(self) -> bool:
        return self._reason is not None

    def feed(self, output: EngineOutput, now: float) -> Orders:
        """Note a hypothesis' scores; with the last of a generation the next one starts."""
        self._count(output, now)
        if self._num_cached_tokens is None:
            self._num_cached_tokens = output.num_cached_tokens
        if output.finish_reason not in _SCORED:
            assert output.finish_reason is not None  # one token, one output
            return Orders(abort_ids=self.end(output.finish_reason, output.error))
        assert output.logprobs is not None
        self._scores[self._generation[output.request_id]] = output.logprobs[0]
        if len(self._scores) < len(self._generation):
            return NO_ORDERS
        self._search.advance(self._scores)
        if self._search.is_done:
            return Orders(abort_ids=self.end(FinishReason.LENGTH))
        return self._next_generation()

    def fail(self, output: EngineOutput, error: str) -> Orders:
        """End the search: without this hypothesis it would be another one."""
        return Orders(abort_ids=self.end(FinishReason.ERROR, error))

    def end(self, reason: FinishReason, error: str = "") -> list[str]:
        """Stop, with the best of what there is; everything held is let go."""
        self._reason, self._error = reason, error
        return [*self._parent_ids, *self._generation]

    def make_output(self) -> RequestOutput | None:
        if self._reason is None:
            return None
        best = self._search.best(self._prepared.params.n)
        shown = [self._complete(index, ranked.hypothesis) for index, ranked in enumerate(best)]
        return self._wrap(shown, finished=True)

    def _next_generation(self) -> Orders:
        ids = {hypothesis: engine_id for engine_id, hypothesis in self._generation.items()}
        requests = {h: self._engine_request(h, ids[h.parent]) for h in self._search.running if h.parent}
        leader_ids = {request.sharing.leader_id for request in requests.values()}
        childless = [engine_id for engine_id in self._generation if engine_id not in leader_ids]
        let_go = [*self._parent_ids, *childless]
        self._parent_ids = list(leader_ids)
        self._generation = {request.request_id: hypothesis for hypothesis, request in requests.items()}
        self._scores = {}
        return Orders(let_go, list(requests.values()))

    def _engine_request(self, hypothesis: Hypothesis, leader_id: str) -> EngineRequest:
        return msgspec.structs.replace(
            self._first,
            request_id=f"{self._first.request_id}.{next(self._numbers)}",
            prompt_token_ids=self._prepared.prompt_token_ids + hypothesis.token_ids(),
            sharing=msgspec.structs.replace(self._first.sharing, leader_id=leader_id),
        )

    def _complete(self, index: int, hypothesis: Hypothesis) -> CompletionOutput:
        prepared = self._prepared
        sequence = SequenceOutput(index, prepared.params, prepared.prompt_token_ids, self._tokenizer)
        reason, stop_reason = self._end_of(hypothesis)
        sequence.feed(
            EngineOutput(
                request_id="",
                new_token_ids=hypothesis.token_ids(),
                logprobs=[step.scores for step in hypothesis.path() if step.scores],
                finish_reason=reason,
                stop_reason=stop_reason,
                error=self._error if reason is self._reason else "",
            )
        )
        return replace(sequence.take(delta=False), cumulative_logprob=hypothesis.cum_logprob)

    def _end_of(self, hypothesis: Hypothesis) -> tuple[FinishReason, int | None]:
        """Why it ended, and the stop token; as of any other output."""
        if hypothesis.token_id in self._rules.end_ids:
            is_eos = hypothesis.token_id in self._first.limits.eos_token_ids
            return FinishReason.STOP, None if is_eos else hypothesis.token_id
        if hypothesis.num_tokens == self._rules.max_tokens:
            return FinishReason.LENGTH, None
        assert self._reason is not None
        return self._reason, None
