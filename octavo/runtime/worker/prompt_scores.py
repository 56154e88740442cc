"""`PromptScores` scores prompt tokens and candidates beside them, chunk by chunk, for requests that ask."""

from collections.abc import Callable

import torch

from octavo.messages.request import TokenLogprobs
from octavo.messages.sampling import SamplingParams
from octavo.messages.step import NewRequest
from octavo.runtime.batch import ForwardBatch
from octavo.runtime.models.interface import Model
from octavo.runtime.sampling.logprobs import score_candidates, score_tokens
from octavo.runtime.worker.pending import PendingStep
from octavo.runtime.worker.prepare import Work
from octavo.runtime.worker.request_state import RequestState
from octavo.runtime.worker.step_part import StepPart

_ROWS_AT_ONCE = 256  # bounds the memory of a long chunk: rows x vocabulary x 4 bytes


class PromptScores(StepPart):
    """Remembers which rows want their prompts scored, and how."""

    def __init__(self, logprobs_mode: str, state: RequestState) -> None:
        super().__init__()
        self.fix: Callable[[int | None], None] = lambda _: None
        """Called with the row that is scored next, and with None behind the last."""
        self._mode, self._state = logprobs_mode, state

    def read(self, request: NewRequest) -> SamplingParams | None:
        params = request.sampling
        is_wanted = params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None
        return params if is_wanted else None

    def before(self, work: Work, batch: ForwardBatch) -> None:
        """Ask for the hidden states of all tokens while there are prompts to score."""
        if self._wanted:
            batch.wanted = None

    def after(self, work: Work, hidden: torch.Tensor, model: Model, outcome: PendingStep) -> None:
        """Score, for each such request, the prompt tokens that follow those computed in this step.

        Entry i belongs to prompt position computed + 1 + i: the token and the most probable others, if
        they are wanted, then the position's candidates.
        """
        if not self._wanted:
            return
        state = self._state
        for index, row in enumerate(work.rows.tolist()):
            if row not in self._wanted:
                continue
            first = int(work.computed[index])
            last = min(int(work.ends[index]), int(state.num_prompt_tokens[row]) - 1)
            self.fix(row)
            rows = hidden[work.starts[index] :][: last - first]
            targets = state.token_ids[row, first + 1 : last + 1]
            entries = outcome.prompt_logprobs[outcome.request_ids[work.owners[index]]] = []
            for start in range(0, last - first, _ROWS_AT_ONCE):
                part = slice(start, start + _ROWS_AT_ONCE)
                params = self._wanted[row]
                entries += self._score(params, model, rows[part], targets[part], first + start)
            if last == state.num_prompt_tokens[row] - 1:
                self.remove(row)
        self.fix(None)

    def _score(
        self, params: SamplingParams, model: Model, hidden: torch.Tensor, targets: torch.Tensor, position: int
    ) -> list[TokenLogprobs]:
        """Score one run of prompt tokens. position: of the first row of `hidden`, before its target"""
        count, candidates = len(targets), params.prompt_candidates
        bare = min(count, max(0, params.prompt_logprob_start - position)) if candidates else count
        unscored = bare if params.prompt_logprobs is None else 0
        if unscored == count:
            return [_nothing() for _ in range(count)]
        logits = model.logits(hidden[unscored:])
        if params.prompt_logprobs is None:
            entries = [_nothing() for _ in range(count)]
        else:
            entries = score_tokens(logits, targets, params.prompt_logprobs, self._mode)
        if bare < count:
            row = position + bare - params.prompt_logprob_start
            wanted = candidates[row:] if len(candidates) > 1 else candidates * count
            wanted = wanted[: count - bare]
            scores = score_candidates(logits[bare - unscored :], wanted, self._mode)
            for entry, ids, values in zip(entries[bare:], wanted, scores, strict=True):
                entry.token_ids += ids
                entry.logprobs += values
                entry.ranks += [0] * len(ids)
        return entries


def _nothing() -> TokenLogprobs:
    return TokenLogprobs([], [], [])
