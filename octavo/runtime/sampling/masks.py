"""`MaskTable` and `RowMasks`: which tokens some rows of a step may choose, as the engine sent it.

Masks stay on the device as long as the engine counts on them: requests, and steps, have many in common. The
sampler owns the table, and applies masks before its processors. Unlike theirs, this state belongs to the step
and not to a row.
"""

from dataclasses import dataclass

import numpy as np
import torch

from octavo.messages.step import TokenMasks
from octavo.runtime.kernels.sampling import Forbid
from octavo.runtime.transfer import Array, send, to_device


@dataclass(slots=True)
class RowMasks:
    """Allowed tokens.

    rows:    [m] int64, rows of the logits
    numbers: [m] int64, the mask of each
    words:   [masks, words] int32 on the device, bit i of word w = token 32 w + i
    """

    rows: Array
    numbers: Array
    words: torch.Tensor

    def at(self, places: Array) -> "RowMasks | None":
        """Return the masks of some rows of the logits, ascending, numbered by their place in `places`."""
        is_here = np.isin(self.rows, places)
        if not is_here.any():
            return None
        return RowMasks(np.searchsorted(places, self.rows[is_here]), self.numbers[is_here], self.words)

    def apply(self, logits: torch.Tensor, forbid: Forbid) -> None:
        """Make all other tokens of these rows of `logits`, [rows, vocab_size], impossible."""
        rows, numbers = send([self.rows, self.numbers], logits.device)
        forbid(logits, rows, numbers, self.words)


class MaskTable:
    """Keeps masks where the engine says, so that it need not send them again."""

    def __init__(self, vocab_size: int, num_masks: int, device: torch.device) -> None:
        self._shape, self._device = (num_masks, -(-vocab_size // 32)), device
        self._words: torch.Tensor | None = None

    @property
    def words(self) -> torch.Tensor:
        """Return [masks, words] int32; always the same memory, taken when somebody first asks for it."""
        if self._words is None:
            self._words = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        return self._words

    def read(self, masks: TokenMasks | None, samples: Array) -> RowMasks | None:
        """Keep what is new, and return the masks of a step; None if nobody is bound.

        samples: [S] int64, ascending: the place in the step of each row of the logits
        """
        if masks is None or not masks.numbers:
            return None
        words = self.words
        if masks.bits:
            bits = np.frombuffer(bytearray(masks.bits), np.int32).reshape(-1, self._shape[1])
            new = to_device(bits, self._device)
            if masks.kept_at is None:
                words = new
            else:
                words.index_copy_(0, to_device(np.array(masks.kept_at), self._device), new)
        return RowMasks(np.flatnonzero(np.isin(samples, masks.indexes)), np.array(masks.numbers), words)
