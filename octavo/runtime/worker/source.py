"""`SourcePart` has sources encoded, and their keys and values stored, in the step in which a request starts.

For requests that ask for it, it also tells how tokens of the prompt attend to the source.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from octavo.messages.media import Source
from octavo.messages.pooling import Pooled
from octavo.messages.step import NewRequest
from octavo.runtime.batch import ForwardBatch
from octavo.runtime.distributed.group import ONE, Group
from octavo.runtime.models.interface import Model
from octavo.runtime.transfer import to_device
from octavo.runtime.worker.media import MediaPart
from octavo.runtime.worker.pending import PendingStep
from octavo.runtime.worker.prepare import Work
from octavo.runtime.worker.request_state import RequestState


@dataclass(slots=True)
class _Aligned:
    """A request that wants attention. queries: by layer, [T, heads, head_dim] of the tokens so far"""

    request_id: str
    num_tokens: int
    queries: dict[int, list[Tensor]] = field(default_factory=dict)


class SourcePart(MediaPart):
    """Keeps encoders' outputs by content, as MediaPart does. Later steps of a request are replayed."""

    def __init__(
        self,
        model: Callable[[], Model],
        state: RequestState,
        max_bytes: int,
        alignment_heads: Sequence[tuple[int, int]] = (),
        tp: Group = ONE,
    ) -> None:
        """alignment_heads: (layer, head) whose attention is told; tp: the ranks that share the heads"""
        super().__init__(lambda: model().media_encoder, state, max_bytes, embeds=True)
        self._model, self._state, self._heads, self._tp = model, state, alignment_heads, tp
        self._aligned: dict[int, _Aligned] = {}
        self._queries: dict[int, Tensor] = {}
        """Of the step at hand, by layer id."""
        self._new: list[int] = []
        """Rows whose sources are not stored yet."""

    def read(self, request: NewRequest) -> Source | None:  # type: ignore[override]
        return request.spec.source

    def add(self, row: int, request: NewRequest) -> None:
        self.remove(row)
        if (source := self.read(request)) is not None:
            self._wanted[row] = source
            self._new.append(row)
            if request.sampling.returns_alignment:
                self._aligned[row] = _Aligned(request.request_id, len(request.token_ids))

    def remove(self, row: int) -> None:
        self._wanted.pop(row, None)
        self._aligned.pop(row, None)
        if row in self._new:
            self._new.remove(row)

    @property
    def is_idle(self) -> bool:
        """See StepPart: all steps but a request's first are replayed."""
        return not (self._new or self._aligned)

    def begin(self, work: Work) -> None:
        """See StepPart: there is nothing to note."""

    def before(self, work: Work, batch: ForwardBatch) -> None:
        """Encode the sources of new requests as one batch, and store what each layer reads of them."""
        if self._aligned:
            batch.source_queries = self._queries = {}
            batch.wanted = None
        if not self._new:
            return
        asked = {row: self._asked(row) for row in self._new}
        outputs = self._encode(dict(asked.values()))
        layers = self._model().cross_layers
        for row, (key, _) in asked.items():
            output = outputs[key]
            with self._only(row):
                for layer in layers:
                    slots = self._slots(batch.group_of_layer[layer.layer_id], row, len(output))
                    layer.keep(output, batch.kv_caches[layer.layer_id], slots)
        self._new.clear()

    def _asked(self, row: int) -> tuple[bytes, tuple[Source, int]]:
        """Return what `_encode` takes of a row: a key, with the source and the slot of an adapter."""
        source: Source = self._wanted[row]
        words = bool(source.token_ids)
        slot, change = self.adapters.encoding(row, reads_words=words) if self.adapters else (0, b"")
        return source.key + change, (source, slot)

    def _only(self, row: int) -> AbstractContextManager[None]:
        """Let products in here be of the row's request."""
        return self.adapters.only(self.adapters.slot_of(row)) if self.adapters else nullcontext()

    def after(self, work: Work, hidden: Tensor, model: Model, outcome: PendingStep) -> None:
        """Keep the queries of requests that want attention; tell it once their prompts are computed."""
        for index, row in enumerate(work.rows.tolist() if self._aligned else ()):
            if (wanted := self._aligned.get(row)) is None:
                continue
            start, end = work.starts[index : index + 2].tolist()
            for layer_id, queries in self._queries.items():
                wanted.queries.setdefault(layer_id, []).append(queries[start:end].clone())
            if int(work.ends[index]) == wanted.num_tokens:
                outcome.pooled[wanted.request_id] = self._attention(wanted, row)

    def _attention(self, wanted: _Aligned, row: int) -> Pooled:
        """Return the weights of the alignment heads, [heads, T, S] float32."""
        layers, found = self._model().cross_layers, []
        key, given = self._asked(row)
        encoded = self._encode({key: given})[key]
        with self._only(row):
            for number, head in self._heads:
                layer = layers[number]
                queries = torch.cat(wanted.queries[layer.layer_id]).float()
                own = head - self._tp.rank * queries.shape[1]
                if 0 <= own < queries.shape[1]:
                    found.append(layer.weights(queries[:, own], layer.keys(encoded)[:, own].float()))
                else:
                    found.append(queries.new_zeros(len(queries), len(encoded)))
        told = torch.stack(found)
        weights = (self._tp.all_reduce_by_nccl(told) if self._tp.size > 1 else told).cpu().numpy()
        return Pooled(weights.tobytes(), list(weights.shape))

    def _slots(self, group: int, row: int, count: int) -> torch.Tensor:
        """Return the cache slots of a row's source, [count] int64."""
        size = self._state.block_sizes[group]
        blocks, offsets = np.divmod(np.arange(count), size)
        slots = self._state.host_tables[group, row, blocks].astype(np.int64) * size + offsets
        return to_device(slots, self._device)
