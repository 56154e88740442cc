"""`SequenceOutput`: one sequence of a request, growing from the core's ids to text, logprobs and an end.

Owned by the output processor. Tokens are taken one by one where stop strings are looked for, so the result
does not depend on how many tokens a step brings. What was not yet handed to the user is kept apart as the
news.
"""

from octavo.base import faults
from octavo.frontend.logprobs import FlatLogprobs, SampleLogprobs, position_logprobs
from octavo.frontend.outputs import CompletionOutput
from octavo.frontend.text.detokenizer import Detokenizer
from octavo.frontend.text.stop import StopFinder
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages.request import EngineOutput, FinishReason, TokenLogprobs
from octavo.messages.sampling import SamplingParams


class SequenceOutput:
    """State of one sequence; `feed` it until `finish_reason` is set, `take` what the user is to see."""

    def __init__(
        self, index: int, params: SamplingParams, prompt_ids: list[int], tokenizer: Tokenizer | None
    ) -> None:
        self.index = index
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
        self._logprobs: SampleLogprobs | None = None
        if params.logprobs is not None:
            self._logprobs = FlatLogprobs() if params.flat_logprobs else []
        self._stop_reason: int | str | None = None
        self._error: str | None = None
        self._num_taken = self._num_texts_taken = 0
        self._end_taken = False

    def feed(self, output: EngineOutput) -> bool:
        """Add what a step brought; True when a stop string ended the sequence, so the core must drop it."""
        ended_by_token = output.finish_reason is FinishReason.STOP and not output.ended_by_text
        last = len(output.new_token_ids) - 1
        for n, token_id in enumerate(output.new_token_ids):
            self.token_ids.append(token_id)
            if output.logprobs is not None and n < len(output.logprobs):
                self._add_logprobs(output.logprobs[n])
            silent = ended_by_token and n == last and not self._params.include_stop_str_in_output
            if not silent and self._add_text(token_id):
                return output.finish_reason is None
        if output.finish_reason is not None:
            self.end(output.finish_reason, output.stop_reason, output.error)
        return False

    def end(self, reason: FinishReason, stop_reason: int | str | None = None, error: str = "") -> None:
        """No more tokens come."""
        self.finish_reason, self._stop_reason, self._error = reason, stop_reason, error or None
        if self._stops is not None:
            self._texts.append(self._stops.finish())
        if self._detokenizer is not None:
            self._texts.append(self._detokenizer.finish())

    def fail(self, error: str) -> None:
        """End with an error, without touching the text again: handling it may be what failed."""
        self.finish_reason, self._stop_reason, self._error = FinishReason.ERROR, None, error

    def is_due(self, interval: int) -> bool:
        """True when there is something new to show: the first token, `interval` more, the end."""
        num_new = len(self.token_ids) - self._num_taken
        has_ended = self.finish_reason is not None and not self._end_taken
        return has_ended or num_new >= (interval if self._num_taken else 1)

    def take(self, *, delta: bool) -> CompletionOutput:
        """The sequence so far, or (delta) what came since the last call."""
        text_from, ids_from = (self._num_texts_taken, self._num_taken) if delta else (0, 0)
        if not delta:
            self._texts = ["".join(self._texts)]
        completion = CompletionOutput(
            index=self.index,
            text="".join(self._texts[text_from:]),
            token_ids=self.token_ids[ids_from:],
            cumulative_logprob=None if self._logprobs is None else self.cumulative_logprob,
            logprobs=None if self._logprobs is None else self._logprobs[ids_from:],
            finish_reason=None if self.finish_reason is None else self.finish_reason.value,
            stop_reason=self._stop_reason,
            error=self._error,
        )
        self._num_texts_taken, self._num_taken = len(self._texts), len(self.token_ids)
        self._end_taken = self.finish_reason is not None
        return completion

    def _add_text(self, token_id: int) -> bool:
        """True when the token completes a stop string, which ends the sequence."""
        if self._detokenizer is None:
            return False
        faults.hit("detok", self)
        text = self._detokenizer.feed((token_id,))
        if self._stops is None:
            self._texts.append(text)
            return False
        scan = self._stops.feed(text, armed=len(self.token_ids) > self._params.min_tokens)
        self._texts.append(scan.text)
        if scan.stop is None:
            return False
        self.finish_reason, self._stop_reason = FinishReason.STOP, scan.stop
        return True

    def _add_logprobs(self, entry: TokenLogprobs) -> None:
        faults.hit("logprobs", self)
        self.cumulative_logprob += entry.logprobs[0]
        if self._logprobs is not None:
            self._logprobs.append(position_logprobs(entry, self._tokenizer))


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
