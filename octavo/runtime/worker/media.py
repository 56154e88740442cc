"""`MediaPart` encodes the images and the like of a step, and puts them in the place of their placeholders."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.base.lru import LRU
from octavo.messages.media import EMBEDS, Features, MediaItem
from octavo.messages.step import NewRequest
from octavo.runtime.batch import ForwardBatch, GivenEmbeds
from octavo.runtime.models.media import MediaEncoder
from octavo.runtime.transfer import Array, to_device
from octavo.runtime.worker.prepare import Work
from octavo.runtime.worker.step_part import StepPart


class _Placed(NamedTuple):
    """An item of a request. places: [N] int64, ascending, the positions that get its N embeddings"""

    item: MediaItem
    places: Array


class _Span(NamedTuple):
    """The part of an item that a step computes. rows: in the batch; first, last: of its embeddings"""

    item: MediaItem
    rows: Array
    first: int
    last: int


class MediaPart(StepPart):
    """Keeps encoders' outputs by content, so that equal items of any requests are encoded once.

    What the cache has lost meanwhile is encoded again. All items of a step that are missing are one batch.
    """

    def __init__(
        self, encoder: Callable[[], MediaEncoder], device: torch.device, num_rows: int, max_bytes: int
    ) -> None:
        super().__init__()
        self._encoder, self._device = encoder, device
        self._ends = np.zeros(num_rows + 1, np.int64)
        """By row: the position behind its last item."""
        self._spans: list[_Span] = []
        self.cache: LRU[bytes, Tensor] = LRU(max_bytes)
        self.batches: list[int] = []
        """Numbers of items encoded together, since `take_batches`."""

    def read(self, request: NewRequest) -> list[_Placed] | None:
        media = request.spec.media
        if not media:
            return None
        ids = np.asarray(request.token_ids)
        return [
            _Placed(item, item.start + np.flatnonzero(ids[item.start : item.end] == item.placeholder_id))
            for item in media
        ]

    def add(self, row: int, request: NewRequest) -> None:
        super().add(row, request)
        self._ends[row] = request.spec.media[-1].end if request.spec.media else 0

    def remove(self, row: int) -> None:
        super().remove(row)
        self._ends[row] = 0

    @property
    def is_idle(self) -> bool:
        """See StepPart: steps behind all items are replayed."""
        return not self._spans

    def begin(self, work: Work) -> None:
        self._spans = list(self._find_spans(work)) if self._wanted else []

    def before(self, work: Work, batch: ForwardBatch) -> None:
        if not self._spans:
            return
        outputs = self._encode({span.item.key: span.item for span in self._spans})
        rows = to_device(np.concatenate([span.rows for span in self._spans]), self._device)
        values = [outputs[span.item.key][span.first : span.last] for span in self._spans]
        batch.give_embeds(GivenEmbeds(rows, torch.cat(values)))

    def _find_spans(self, work: Work) -> Iterator[_Span]:
        for index in np.flatnonzero(work.computed < self._ends[work.rows]).tolist():
            computed, end = int(work.computed[index]), int(work.ends[index])
            for item, places in self._wanted.get(int(work.rows[index]), ()):
                first, last = np.searchsorted(places, (computed, end)).tolist()
                if first < last:
                    rows = places[first:last] + (int(work.starts[index]) - computed)
                    yield _Span(item, rows, first, last)

    def _encode(self, items: dict[bytes, MediaItem]) -> dict[bytes, Tensor]:
        """Return the outputs of all items, from the cache or one run of the encoder."""
        outputs = {key: found for key in items if (found := self.cache.get(key)) is not None}
        missing = [item for key, item in items.items() if key not in outputs]
        features = [
            {name: to_device(read_features(given), self._device) for name, given in item.features.items()}
            for item in missing
        ]
        encoded = [inputs for inputs in features if EMBEDS not in inputs]
        made = iter(self._encoder().encode(encoded) if encoded else ())
        if encoded:
            self.batches.append(len(encoded))
        for item, inputs in zip(missing, features, strict=True):
            output = inputs[EMBEDS] if EMBEDS in inputs else next(made)
            outputs[item.key] = output
            self.cache.put(item.key, output, output.nbytes)
        return outputs


def read_features(features: Features) -> Array:
    """Return the array, whose memory is its own."""
    return np.frombuffer(bytearray(features.data), features.dtype).reshape(features.shape)
