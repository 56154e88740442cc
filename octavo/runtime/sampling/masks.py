"""`RowMasks`: which tokens some rows of a step may choose, as the engine sent it.

Made by the model runner, applied by the sampler before its processors. Unlike theirs, this state belongs to
the step and not to a row.
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
    words:   [masks, words] int32, bit i of word w = token 32 w + i
    """

    rows: Array
    numbers: Array
    words: Array

    @classmethod
    def read(cls, masks: TokenMasks | None, samples: Array) -> "RowMasks | None":
        """Return the masks of a step; None if nobody is bound.

        samples: [S] int64, ascending: the place in the step of each row of the logits
        """
        if masks is None or not masks.indexes:
            return None
        numbers = np.array(masks.numbers)
        words = np.frombuffer(bytearray(masks.bits), np.int32).reshape(numbers.max() + 1, -1)
        return cls(np.flatnonzero(np.isin(samples, masks.indexes)), numbers, words)

    def at(self, places: Array) -> "RowMasks | None":
        """Return the masks of some rows of the logits, ascending, numbered by their place in `places`."""
        is_here = np.isin(self.rows, places)
        if not is_here.any():
            return None
        return RowMasks(np.searchsorted(places, self.rows[is_here]), self.numbers[is_here], self.words)

    def apply(self, logits: torch.Tensor, forbid: Forbid) -> None:
        """Make all other tokens of these rows of `logits`, [rows, vocab_size], impossible."""
        rows, numbers = send([self.rows, self.numbers], logits.device)
        forbid(logits, rows, numbers, to_device(self.words, logits.device))
