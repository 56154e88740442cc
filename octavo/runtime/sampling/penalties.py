"""Repetition, frequency and presence penalties.

The last of the sampler's processors. Only tokens that occur in a request can change, so the work of a step
goes with the length of the requests, not with the vocabulary.
"""

import numpy as np
import torch

from octavo.messages.sampling import SamplingParams
from octavo.messages.step import NewRequest
from octavo.runtime.kernels.sampling import IN_PROMPT, TokenLists
from octavo.runtime.sampling.processors import KernelProcessor
from octavo.runtime.sampling.rows import Batch, RowNumbers, TokenTable, grown, in_vocabulary
from octavo.runtime.transfer import Array, send


class Penalties(KernelProcessor):
    """Counts output tokens by row, on the device, for requests that have a penalty."""

    def __init__(self, vocab_size: int, num_rows: int, device: torch.device) -> None:
        super().__init__(vocab_size, num_rows, device)
        self._last: TokenLists | None = None
        self._new: dict[int, tuple[Array, Array]] = {}
        """By row, of requests that the device does not know yet: tokens that occur, and their marks."""
        self._occurring = TokenTable(num_rows, device)
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)  # by table row
        self._strengths = RowNumbers(num_rows, 3, np.float32, device)  # repetition, frequency, presence

    def is_active(self, params: SamplingParams) -> bool:
        neutral = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        return neutral != (1.0, 0.0, 0.0)

    def add(self, row: int, request: NewRequest) -> None:
        """Count the outputs so far, and mark the prompt where it matters."""
        params = request.sampling
        prompt = np.array(request.prompt_ids, dtype=np.int64)
        outputs = np.array(request.token_ids[request.num_prompt_tokens :], dtype=np.int64)
        if request.spec.embeds is not None:
            prompt = prompt[:0]  # these ids only hold the places of embeddings
        repeats = in_vocabulary(prompt, self.vocab_size) if params.repetition_penalty != 1.0 else prompt[:0]
        chosen, times = np.unique(outputs, return_counts=True)
        tokens = np.union1d(chosen, repeats) if chosen.size else repeats
        marks = np.zeros(len(tokens), np.int64)
        marks[tokens.searchsorted(chosen)] = times
        marks[tokens.searchsorted(repeats)] += IN_PROMPT
        self._new[row] = tokens, marks
        self._occurring.claim(row, len(tokens))
        self._strengths.put(row, params.repetition_penalty, params.frequency_penalty, params.presence_penalty)

    def remove(self, row: int) -> None:
        """Give the row back; the next owner overwrites all of it."""
        self._new.pop(row, None)
        self._occurring.remove(row)

    def _enter_new(self) -> None:
        """Write the lists and marks of requests that have come, all at once."""
        table = self._occurring
        if len(table.ids) > len(self._counts):
            self._counts = grown(self._counts, len(table.ids), self.vocab_size)
        rows = table.row_of[list(self._new)]
        tokens, marks = (np.concatenate(parts) for parts in zip(*self._new.values(), strict=True))
        owners = rows.repeat([len(tokens) for tokens, _ in self._new.values()])
        columns = np.concatenate([np.arange(len(tokens)) for tokens, _ in self._new.values()])
        self._new.clear()
        places = owners * table.ids.shape[1] + columns, owners * self.vocab_size + tokens
        emptied, listed, marked, *values = send([rows, *places, tokens, marks], self.device)
        self._counts.index_fill_(0, emptied, 0)
        table.ids.view(-1)[listed] = values[0]
        self._counts.view(-1)[marked] = values[1].int()

    def apply(self, logits: torch.Tensor, batch: Batch) -> None:
        if self._new:
            self._enter_new()
        lengths = self._occurring.lengths[batch.rows]
        longest = int(lengths.max())
        self._occurring.reserve(longest + 1)
        numbers = [batch.logit_rows, batch.rows, self._occurring.row_of[batch.rows], lengths]
        logit_rows, rows, owners, on_device = send(numbers, self.device)
        lists = TokenLists(owners, on_device, self._occurring.ids, self._counts, longest)
        self.kernels.penalize(logits, logit_rows, lists, rows, self._strengths.on_device())
        self._last = lists

    def observe(self, batch: Batch, token_ids: torch.Tensor) -> None:
        """Count what was chosen by the rows that were penalised last."""
        assert self._last is not None
        self.kernels.count(self._last, token_ids)
        self._occurring.lengths[batch.rows] += 1
