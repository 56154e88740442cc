"""Logprobs of prompt tokens, collected chunk by chunk for the requests that ask for them."""

import torch

from octavo.messages.request import TokenLogprobs
from octavo.messages.step import NewRequest, SchedulerOutput
from octavo.runtime.models.interface import Model
from octavo.runtime.sampling.logprobs import score_tokens
from octavo.runtime.worker.prepare import PreparedStep
from octavo.runtime.worker.request_state import RequestState

_ROWS_AT_ONCE = 256  # bounds the memory of a long chunk: rows x vocabulary x 4 bytes


class PromptScores:
    """Remembers which slots want prompt logprobs, and how many."""

    def __init__(self, logprobs_mode: str) -> None:
        self._mode = logprobs_mode
        self._wanted: dict[int, int] = {}

    def add(self, slot: int, request: NewRequest) -> None:
        """Called for every request that enters."""
        if request.sampling.prompt_logprobs is not None:
            self._wanted[slot] = request.sampling.prompt_logprobs

    def remove(self, slot: int) -> None:
        """Called for every request that leaves."""
        self._wanted.pop(slot, None)

    def collect(
        self,
        step: SchedulerOutput,
        prepared: PreparedStep,
        state: RequestState,
        hidden: torch.Tensor,
        model: Model,
    ) -> dict[str, list[TokenLogprobs]]:
        """Score, for each such request, the prompt tokens that follow those computed in this step.

        Entry i belongs to prompt position computed + 1 + i. hidden: [T, hidden_size]
        """
        scores: dict[str, list[TokenLogprobs]] = {}
        if not self._wanted:
            return scores
        for index, slot in enumerate(prepared.slots.tolist()):
            if slot not in self._wanted:
                continue
            first = step.num_computed_tokens[index]
            last = min(first + step.num_scheduled_tokens[index], int(state.num_prompt_tokens[slot]) - 1)
            rows = hidden[prepared.starts[index] :][: last - first]
            targets = state.token_ids[slot, first + 1 : last + 1]
            entries = scores[step.request_ids[index]] = []
            for start in range(0, last - first, _ROWS_AT_ONCE):
                part = slice(start, start + _ROWS_AT_ONCE)
                entries += score_tokens(
                    model.logits(rows[part]), targets[part], self._wanted[slot], self._mode
                )
        return scores
