"""Repetition, frequency and presence penalties.

The last of the sampler's processors. Only tokens that occur in a request can change, so the work of a step
goes with the length of the requests, not with the vocabulary.
Source: vLLM's formulas; repetition as in Keskar et al., "CTRL", 2019.
"""

import numpy as np
import torch

from octavo.messages.sampling import SamplingParams
from octavo.messages.step import NewRequest
from octavo.runtime.sampling.processors import Processor
from octavo.runtime.sampling.rows import Batch, RowNumbers, TokenTable, grown, in_vocabulary
from octavo.runtime.transfer import to_device

_IN_PROMPT = 1 << 30  # added to the count of a token that the repetition penalty has to see in the prompt


class Penalties(Processor):
    """Counts output tokens by row, on the device, for requests that have a penalty.

    A logit's change depends on its token's count alone, so it does no harm that the lists of occurring tokens
    hold some twice and end with filler.
    """

    def __init__(self, vocab_size: int, num_rows: int, device: torch.device) -> None:
        super().__init__(vocab_size, num_rows, device)
        self._occurring = TokenTable(num_rows, device)
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)  # by table row
        self._strengths = RowNumbers(num_rows, 3, np.float32, device)  # repetition, frequency, presence

    def is_active(self, params: SamplingParams) -> bool:
        """Return True if any of the three is not neutral."""
        neutral = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        return neutral != (1.0, 0.0, 0.0)

    def add(self, row: int, request: NewRequest) -> None:
        """Count the outputs so far, and mark the prompt where it matters."""
        params = request.sampling
        prompt, outputs = np.split(np.array(request.token_ids, dtype=np.int64), [request.num_prompt_tokens])
        if request.spec.embeds is not None:
            prompt = prompt[:0]  # these ids only hold the places of embeddings
        repeats = in_vocabulary(prompt, self.vocab_size) if params.repetition_penalty != 1.0 else prompt[:0]
        table_row = self._occurring.add(row, np.concatenate([repeats, outputs]))
        if table_row >= len(self._counts):
            self._counts = grown(self._counts, len(self._occurring.ids), self.vocab_size)
        counts = np.bincount(outputs, minlength=self.vocab_size).astype(np.int32)
        counts[repeats] += _IN_PROMPT
        self._counts[table_row] = to_device(counts, self.device)
        self._strengths.put(row, params.repetition_penalty, params.frequency_penalty, params.presence_penalty)

    def remove(self, row: int) -> None:
        """Give the row back; the next owner overwrites all of it."""
        self._occurring.remove(row)

    def apply(self, logits: torch.Tensor, batch: Batch) -> None:
        """Penalise the tokens that occur."""
        logit_rows = to_device(batch.logit_rows, self.device)[:, None]
        table_rows = self._occurring.table_rows(batch.rows)[:, None]
        longest = int(self._occurring.lengths[batch.rows].max())
        ids = self._occurring.ids[table_rows[:, 0], :longest]  # [n, longest]
        marks = self._counts[table_rows, ids]  # 0 for filler
        counts = marks % _IN_PROMPT
        rows = to_device(batch.rows, self.device)
        repetition, frequency, presence = self._strengths.on_device()[rows, :, None].unbind(dim=1)
        values = logits[logit_rows, ids]
        repeated = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(marks > 0, repeated, values) - frequency * counts - presence * (counts > 0)
        logits[logit_rows, ids] = values

    def observe(self, batch: Batch, token_ids: torch.Tensor) -> None:
        """Count what was chosen."""
        self._occurring.append(batch.rows, token_ids)
        self._counts[self._occurring.table_rows(batch.rows), token_ids] += 1
