"""`MediaPart` encodes the images and the like of a step, and puts them in the place of their placeholders."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.base.lru import LRU
from octavo.messages.media import EMBEDS, Features, MediaItem, Source
from octavo.messages.step import ModelRunnerOutput, NewRequest, SchedulerOutput
from octavo.runtime.batch import ForwardBatch, GivenEmbeds, MutualSpans
from octavo.runtime.distributed.group import ONE, Group
from octavo.runtime.kernels.attention import Ragged
from octavo.runtime.models.media import SIZES, MediaEncoder
from octavo.runtime.platforms.platform import Capture
from octavo.runtime.transfer import Array, send, to_device
from octavo.runtime.worker.adapters import AdaptersPart
from octavo.runtime.worker.encoder_graphs import EncoderGraphs
from octavo.runtime.worker.pending import PendingStep
from octavo.runtime.worker.prepare import Work, token_positions
from octavo.runtime.worker.request_state import RequestState
from octavo.runtime.worker.step_part import StepPart


class _Placed(NamedTuple):
    """An item of a request. places: [N] int64, ascending, the positions that get its N embeddings"""

    item: MediaItem
    places: Array


class _Span(NamedTuple):
    """The part of an item that a step computes. owner: the request's place in the step; rows: in the batch

    first, last: of its embeddings; key: of the encoder's output, with adapter's slot
    """

    key: bytes
    slot: int
    item: MediaItem
    owner: int
    rows: Array
    first: int
    last: int


class MediaPart(StepPart):
    """Keeps encoders' outputs by content, so that equal items of any requests are encoded once.

    What the cache has lost meanwhile is encoded again. All items of a step that are missing are one batch.
    """

    def __init__(
        self,
        encoder: Callable[[], MediaEncoder],
        state: RequestState,
        max_bytes: int,
        *,
        embeds: bool,
        ranks: Group = ONE,
        capture: Capture | None = None,
    ) -> None:
        """embeds: this stage is the first of the model; later ones need positions at most

        ranks: those that have the whole encoder each, and share the items; capture: see EncoderGraphs
        """
        super().__init__()
        self._ranks, self._graphs = ranks, EncoderGraphs(encoder, capture)
        self._encoder, self._state, self._embeds = encoder, state, embeds
        self._device = state.token_ids.device
        self._ends = np.zeros(state.spare_row + 1, np.int64)
        """By row: the position behind its last item."""
        self._spans: list[_Span] = []
        self._patches: dict[int, Array] = {}
        """By row: time, row and column of each token up to the end of the last item, [3, end]."""
        self._is_inside = False
        """Some token of the step stands before the end of its request's last item."""
        if encoder().has_patch_positions:
            state.position_offsets = np.zeros(state.spare_row + 1, np.int64)
        self.adapters: AdaptersPart | None = None
        """Which requests have adapters that change the encoder."""
        self.cache: LRU[bytes, Tensor] = LRU(max_bytes)
        self._num_encoded = 0
        """By the step."""

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
        if (offsets := self._state.position_offsets) is not None:
            offsets[row] = 0
            if request.spec.media:
                self._patches[row], offsets[row] = self._lay_out(request)

    def release(self) -> None:
        """See StepPart: what the encoder made goes, too."""
        self.cache.clear()
        self._graphs.clear()

    def remove(self, row: int) -> None:
        super().remove(row)
        self._ends[row] = 0
        self._patches.pop(row, None)

    @property
    def is_idle(self) -> bool:
        """See StepPart: steps behind all items are replayed."""
        return not self._spans and not (self._patches and self._is_inside)

    def begin(self, work: Work) -> None:
        self._spans = list(self._find_spans(work)) if self._wanted and self._embeds else []
        self._is_inside = bool((work.computed < self._ends[work.rows]).any())

    def before(self, work: Work, batch: ForwardBatch) -> None:
        if self._patches and self._is_inside:
            batch.patch_positions = to_device(self._patch_positions(work), self._device)
        if not self._spans:
            return
        outputs = self._encode({span.key: (span.item, span.slot) for span in self._spans})
        rows = to_device(np.concatenate([span.rows for span in self._spans]), self._device)
        values = torch.cat([outputs[span.key][span.first : span.last] for span in self._spans])
        size = values.shape[1] // (1 + self._encoder().num_deep_layers)
        batch.give_embeds(GivenEmbeds(rows, values[:, :size]))
        if size < values.shape[1]:
            batch.deep_embeds = GivenEmbeds(rows, values[:, size:])
        batch.mutual = self._mutual(work)

    def follow(self, step: SchedulerOutput, work: Work, hidden: Tensor | None, outcome: PendingStep) -> None:
        """See StepPart: the engine counts what was encoded."""
        if self._num_encoded:
            outcome.closers.append(partial(_tell, self._num_encoded))
            self._num_encoded = 0

    def _mutual(self, work: Work) -> MutualSpans | None:
        """Return the runs of placeholders that see each other."""
        spans = [span for span in self._spans if span.item.sees_itself]
        if not spans:
            return None
        found = [(span.owner, run) for span in spans for run in _runs(span.rows)]
        owners, runs = np.array([owner for owner, _ in found]), [run for _, run in found]
        ends = np.array([run[-1] + 1 for run in runs]) + (work.computed - work.starts[:-1])[owners]
        bounds = np.cumsum([0, *map(len, runs)])
        rows, owned, lengths, cu = send([np.concatenate(runs), owners, ends, bounds], self._device)
        ragged = Ragged(cu_q_lens=cu.int(), kv_lens=lengths.int(), longest_q=max(map(len, runs)))
        return MutualSpans(rows, owned, ragged)

    def _lay_out(self, request: NewRequest) -> tuple[Array, int]:
        """Return the positions of a prompt up to the end of its last item, and what the rest adds to its own.

        Text counts on behind the largest position of a run of placeholders (Qwen2-VL, section 2.1).
        """
        ids, media = np.asarray(request.token_ids), request.spec.media
        places, start = np.zeros((3, media[-1].end), np.int64), 0
        offset = 0
        for item in media:
            runs = self._encoder().patch_positions({n: _view(f) for n, f in item.features.items()})
            is_patch = ids[item.start : item.end] == item.placeholder_id
            firsts = [item.start + int(run[0]) for run in _runs(np.flatnonzero(is_patch))]
            for first, run in zip(firsts, runs, strict=True):
                places[:, start:first] = np.arange(start, first) + offset
                start = first + run.shape[1]
                places[:, first:start] = run + first + offset
                offset += int(run.max()) + 1 - run.shape[1]
        places[:, start:] = np.arange(start, places.shape[1]) + offset
        return places, offset

    def _patch_positions(self, work: Work) -> Array:
        """Return time, row and column of each token of the step, [3, T]."""
        positions = np.repeat(self._state.rope_positions(*token_positions(work))[None], 3, axis=0)
        for index in np.flatnonzero(work.computed < self._ends[work.rows]).tolist():
            table, first = self._patches[int(work.rows[index])], int(work.computed[index])
            part = table[:, first : int(work.ends[index])]
            start = int(work.starts[index])
            positions[:, start : start + part.shape[1]] = part
        return positions

    def _find_spans(self, work: Work) -> Iterator[_Span]:
        for index in np.flatnonzero(work.computed < self._ends[work.rows]).tolist():
            computed, end, row = int(work.computed[index]), int(work.ends[index]), int(work.rows[index])
            slot, change = (0, b"") if self.adapters is None else self.adapters.encoding(row)
            for item, places in self._wanted.get(row, ()):
                first, last = np.searchsorted(places, (computed, end)).tolist()
                if first < last:
                    rows = places[first:last] + (int(work.starts[index]) - computed)
                    yield _Span(item.key + change, slot, item, index, rows, first, last)

    def _encode(self, items: Mapping[bytes, tuple[MediaItem | Source, int]]) -> dict[bytes, Tensor]:
        """Return the outputs of all items, from the cache or a run of the encoder for each slot."""
        outputs = {key: found for key in items if (found := self.cache.get(key)) is not None}
        missing = {key: given for key, given in items.items() if key not in outputs}
        for slot in dict.fromkeys(slot for _, slot in missing.values()):
            with nullcontext() if self.adapters is None else self.adapters.only(slot):
                own = {key: item for key, (item, its_slot) in missing.items() if its_slot == slot}
                outputs |= self._encode_alike(own, captures=slot == 0)
        return outputs

    def _encode_alike(self, items: dict[bytes, MediaItem | Source], *, captures: bool) -> dict[bytes, Tensor]:
        features = [
            {name: _send_features(name, given, self._device) for name, given in item.features.items()}
            for item in items.values()
        ]
        encoded = [inputs for inputs in features if EMBEDS not in inputs]
        made = iter(self._shared(encoded, captures=captures) if encoded else ())
        self._num_encoded += len(encoded)
        outputs = {}
        for key, inputs in zip(items, features, strict=True):
            outputs[key] = output = inputs[EMBEDS] if EMBEDS in inputs else next(made)
            self.cache.put(key, output, output.nbytes)
        return outputs

    def _shared(self, items: list[dict[str, Tensor]], *, captures: bool) -> list[Tensor]:
        """Encode every item on one rank, and give the outputs to all."""
        encode = partial(self._graphs.encode, captures=captures)
        rank, size = self._ranks.rank, self._ranks.size
        if size == 1 or len(items) < size:
            return encode(items)
        made = encode(items[rank::size])
        counts = torch.zeros(len(items), dtype=torch.int64, device=self._device)
        counts[rank::size] = torch.tensor([len(output) for output in made], device=self._device)
        lengths = self._ranks.all_reduce_by_nccl(counts).tolist()
        every = made[0].new_zeros(sum(lengths), made[0].shape[1])
        for part, output in zip(torch.split(every, lengths)[rank::size], made, strict=True):
            part.copy_(output)
        return list(torch.split(self._ranks.all_reduce(every), lengths))


def _tell(num_encoded: int, result: ModelRunnerOutput) -> None:
    result.num_encoded = num_encoded


def _runs(numbers: Array) -> list[Array]:
    """Cut ascending numbers where one is left out."""
    return np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)


def _send_features(name: str, features: Features, device: torch.device) -> Tensor:
    """Return the array on the device; of a GPU, by one copy to memory that it reads."""
    if device.type == "cpu" or name in SIZES:
        return torch.from_numpy(read_features(features))
    pinned = torch.empty(features.shape, dtype=getattr(torch, features.dtype), pin_memory=True)
    pinned.numpy()[...] = _view(features)
    return pinned.to(device, non_blocking=True)


def read_features(features: Features) -> Array:
    """Return the array, whose memory is its own."""
    return _view(features).copy()


def _view(features: Features) -> Array:
    """Return the array, to be read only."""
    return np.frombuffer(features.data, features.dtype).reshape(features.shape)
