"""`SequenceOutput`: one sequence of a request, growing from the core's ids to text, logprobs and an end.

Owned by the output processor. Tokens are spelled when the text is asked for; where stop strings are looked
for, one by one as they come, so that the result does not depend on how many tokens a step brings. What was
not yet handed to the user is kept apart as the news.
"""

from octavo.base import faults
from octavo.frontend.outputs.logprobs import LogprobSpeller, SampleLogprobs, kept_logprobs
from octavo.frontend.outputs.request_output import (
    CompletionOutput,
    RequestSpecDecodeMetrics,
    WeightVersionSpan,
)
from octavo.frontend.outputs.routed_experts import RoutedExperts
from octavo.frontend.text.detokenizer import Detokenizer
from octavo.frontend.text.stop import StopFinder
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages.request import DraftCounts, EngineOutput, FinishReason, TokenLogprobs
from octavo.messages.sampling import SamplingParams


class SequenceOutput:
    """State of one sequence; `feed` it until `finish_reason` is set, `take` what the user is to see."""

    def __init__(
        self, index: int, params: SamplingParams, prompt_ids: list[int], tokenizer: Tokenizer | None
    ) -> None:
        self.index = index
        self._num_prompt_tokens = len(prompt_ids)
        self._routes = RoutedExperts()
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.cumulative_logprob = 0.0
        """Of the tokens whose logprobs the core sent, which it may do unasked by the user."""
        self._params = params
        self._tokenizer = tokenizer
        self._detokenizer = _detokenizer(params, prompt_ids, tokenizer)
        stops = params.stop_strings if self._detokenizer else []
        self._stops = StopFinder(stops, include_stop=params.include_stop_str_in_output) if stops else None
        self._texts: list[str] = []
        """Of deltas: those not yet taken."""
        self._num_spelled = 0
        """Tokens whose text is known, where no stop strings are looked for."""
        self._ends_silently = False
        """The last token ended the sequence and is not part of its text."""
        self._text_is_over = self._detokenizer is None
        self._logprobs: SampleLogprobs | None = None
        if params.logprobs is not None:
            self._logprobs = kept_logprobs(params.logprobs, flat=params.flat_logprobs)
            self._speller = LogprobSpeller(tokenizer if params.detokenize else None, prompt_ids)
        self._stop_reason: int | str | None = None
        self._error: str | None = None
        self._num_taken = 0
        self._end_taken = False
        self._drafts: DraftCounts | None = None
        self._weight_starts: list[tuple[str, int]] = []
        """Versions of weights, and the number of tokens before each; empty while there was only the first."""

    def feed(self, output: EngineOutput) -> bool:
        """Add what a step brought; True when a stop string ended the sequence, so the core must drop it."""
        token_ids = output.new_token_ids
        if output.routes:
            self._routes.take(output.routes)
        if output.weight_version or self._weight_starts:
            self._note_weights(output.weight_version or "default")
        if output.finish_reason is FinishReason.STOP and token_ids and not output.ended_by_text:
            self._ends_silently = not self._params.include_stop_str_in_output
        if self._stops is None:
            self.token_ids += token_ids
            for entry in output.logprobs or ():
                self._add_logprobs(entry)
        elif self._find_stop(output, self._stops):
            return output.finish_reason is None
        if output.finish_reason is not None:
            self._drafts = output.drafts
            self.end(output.finish_reason, output.stop_reason, output.error)
        return False

    def end(self, reason: FinishReason, stop_reason: int | str | None = None, error: str = "") -> None:
        """No more tokens come."""
        self.finish_reason, self._stop_reason, self._error = reason, stop_reason, error or None

    def fail(self, error: str) -> None:
        """End with an error, without touching the text again: handling it may be what failed."""
        self.finish_reason, self._stop_reason, self._error = FinishReason.ERROR, None, error
        self._text_is_over = True

    def is_due(self, interval: int) -> bool:
        """True when there is something new to show: the first token, `interval` more, the end."""
        num_new = len(self.token_ids) - self._num_taken
        has_ended = self.finish_reason is not None and not self._end_taken
        return has_ended or num_new >= (interval if self._num_taken else 1)

    def take(self, *, delta: bool) -> CompletionOutput:
        """The sequence so far, or (delta) what came since the last call."""
        if not self._text_is_over:
            self._spell()
        text, ids_from = "".join(self._texts), self._num_taken if delta else 0
        self._texts = [] if delta else [text]
        completion = CompletionOutput(self.index, text, self.token_ids[ids_from:])
        if self._logprobs is not None:
            completion.cumulative_logprob = self.cumulative_logprob
            completion.logprobs = self._logprobs[ids_from:]
        if self.finish_reason is not None:
            completion.finish_reason = self.finish_reason.value
            completion.stop_reason, completion.error = self._stop_reason, self._error
            completion.weight_versions = self._weight_versions()
            computed = self._num_prompt_tokens + len(self.token_ids) - 1
            completion.routed_experts = self._routes.of(self._params.routed_experts_prompt_start, computed)
            completion.spec_decode_metrics = _told(self._drafts)
            self._end_taken = True
        self._num_taken = len(self.token_ids)
        return completion

    def _note_weights(self, version: str) -> None:
        if not self._weight_starts and self.token_ids:
            self._weight_starts.append(("default", 0))
        if not self._weight_starts or self._weight_starts[-1][0] != version:
            self._weight_starts.append((version, len(self.token_ids)))

    def _weight_versions(self) -> list[WeightVersionSpan] | None:
        starts = self._weight_starts
        ends = [start for _, start in starts[1:]] + [len(self.token_ids)]
        return [WeightVersionSpan(*start, end) for start, end in zip(starts, ends, strict=False)] or None

    def _spell(self) -> None:
        """Add the text that is not there yet; at the end, also what was held back."""
        assert self._detokenizer is not None
        if self._stops is None:
            faults.hit("detok", self)
            end = len(self.token_ids) - self._ends_silently
            self._texts.append(self._detokenizer.feed(self.token_ids[self._num_spelled : end]))
            self._num_spelled = end
        if self.finish_reason is not None:
            held_back = "" if self._stops is None else self._stops.finish()
            self._texts += held_back, self._detokenizer.finish()
            self._text_is_over = True

    def _find_stop(self, output: EngineOutput, stops: StopFinder) -> bool:
        """Add token by token, up to one that completes a stop string, which ends the sequence."""
        assert self._detokenizer is not None
        last = len(output.new_token_ids) - 1
        for n, token_id in enumerate(output.new_token_ids):
            self.token_ids.append(token_id)
            if output.logprobs is not None and n < len(output.logprobs):
                self._add_logprobs(output.logprobs[n])
            if self._ends_silently and n == last:
                return False
            faults.hit("detok", self)
            text = self._detokenizer.feed((token_id,))
            scan = stops.feed(text, armed=len(self.token_ids) > self._params.min_tokens)
            self._texts.append(scan.text)
            if scan.stop is not None:
                self.finish_reason, self._stop_reason = FinishReason.STOP, scan.stop
                self._text_is_over = True
                return True
        return False

    def _add_logprobs(self, entry: TokenLogprobs) -> None:
        faults.hit("logprobs", self)
        self.cumulative_logprob += entry.logprobs[0]
        if self._logprobs is not None:
            self._speller.append(self._logprobs, entry)


def _detokenizer(
    params: SamplingParams, prompt_ids: list[int], tokenizer: Tokenizer | None
) -> Detokenizer | None:
    if tokenizer is None or not params.detokenize:
        return None
    return Detokenizer(
        tokenizer,
        context=prompt_ids,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )


def _told(drafts: DraftCounts | None) -> RequestSpecDecodeMetrics | None:
    """Return the counts in vLLM's form; None where nothing was guessed."""
    if drafts is None or not drafts.num_drafts:
        return None
    most = max(drafts.by_accepted)
    histogram = [drafts.by_accepted.get(count, 0) for count in range(most + 1)]
    return RequestSpecDecodeMetrics(most, histogram, drafts.num_draft_tokens)
