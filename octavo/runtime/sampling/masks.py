"""`RowMasks`: which tokens some rows of a step may choose, as the engine sent it.

Made by the model runner, applied by the sampler before its processors. Unlike theirs, this state belongs to
the step and not to a row.
"""

from dataclasses import dataclass

import numpy as np
import torch

from octavo.messages.step import TokenMasks
from octavo.runtime.sampling.processors import NEVER
from octavo.runtime.transfer import Array, to_device


@dataclass(slots=True)
class RowMasks:
    """Allowed tokens.

    rows: [m] int64, rows of the logits
    bits: [m, bytes] uint8, bit i of byte b = token 8 b + i
    """

    rows: Array
    bits: Array

    @classmethod
    def read(cls, masks: TokenMasks | None, samples: Array) -> "RowMasks | None":
        """Return the masks of a step; None if nobody is bound.

        samples: [S] int64, ascending: the place in the step of each row of the logits
        """
        if masks is None or not masks.indexes:
            return None
        bits = np.frombuffer(masks.bits, np.uint8).reshape(len(masks.indexes), -1)
        return cls(np.searchsorted(samples, masks.indexes), bits)

    def apply(self, logits: torch.Tensor) -> None:
        """Make all other tokens of these rows of `logits`, [rows, vocab_size], impossible."""
        vocab_size = logits.shape[1]
        if logits.device.type == "cpu":
            zeros_and_ones = np.unpackbits(~self.bits, axis=1, count=vocab_size, bitorder="little")
            forbidden = torch.from_numpy(zeros_and_ones).view(torch.bool)
        else:
            bits = to_device(~self.bits, logits.device)
            places = torch.arange(8, dtype=torch.uint8, device=logits.device)
            forbidden = (bits[:, :, None] >> places).bitwise_and_(1).flatten(1)[:, :vocab_size].bool()
        if len(self.rows) == len(logits):
            logits.masked_fill_(forbidden, NEVER)
        else:
            rows = to_device(self.rows, logits.device)
            logits[rows] = logits[rows].masked_fill_(forbidden, NEVER)
