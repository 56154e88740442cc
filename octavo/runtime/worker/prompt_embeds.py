"""`PromptEmbedsPart` puts embeddings that come with requests in the place of those of their tokens."""

import numpy as np
import torch

from octavo.messages.step import NewRequest
from octavo.runtime.batch import ForwardBatch, GivenEmbeds
from octavo.runtime.transfer import to_device
from octavo.runtime.worker.prepare import Work
from octavo.runtime.worker.step_part import StepPart


class PromptEmbedsPart(StepPart):
    """Keeps them on the device until their requests leave: [rows, embedding_size] float32 each."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def read(self, request: NewRequest) -> torch.Tensor | None:
        if (embeds := request.spec.embeds) is None:
            return None
        values = np.frombuffer(bytearray(embeds.data), np.float32).reshape(-1, embeds.width)
        return to_device(values, self._device)

    def before(self, work: Work, batch: ForwardBatch) -> None:
        """Give the batch the part of them that this step computes."""
        rows, values = [], []
        for index, row in enumerate(work.rows.tolist()):
            if (embeds := self._wanted.get(row)) is not None:
                start, end = work.starts[index : index + 2].tolist()
                part = embeds[work.computed[index] :][: end - start]
                rows.append(torch.arange(start, start + len(part), device=embeds.device))
                values.append(part)
        if rows:
            batch.give_embeds(GivenEmbeds(torch.cat(rows), torch.cat(values)))
