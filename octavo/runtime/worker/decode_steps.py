"""`DecodeSteps`: steps in which every request computes one token, in a few sizes, over memory that stays put.

So a device can record such a step once and repeat it: one launch instead of hundreds. The host hands over
slots and positions; everything else is read on the device, from the tables that hold it by slot: tokens,
blocks, sampling parameters. A step is padded to the next size with rows of the spare slot, which attend to one
slot of the null block, store nothing (slot -1), and append their token to the spare slot.

Called by the model runner. Sizes are recorded when they first come up, behind the step itself, which is
computed launch by launch; `warm_up` does so before there are requests.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from enum import Enum, auto
from functools import partial

import numpy as np
import torch

from octavo.runtime.batch import ForwardBatch, GroupTables
from octavo.runtime.models.interface import Model
from octavo.runtime.platforms.platform import Record
from octavo.runtime.sampling.sampler import Sampler
from octavo.runtime.sampling.slots import staged
from octavo.runtime.worker.kv_tensors import KVTensors
from octavo.runtime.worker.prepare import Work, cache_slots
from octavo.runtime.worker.request_state import RequestState


class _End(Enum):
    """How far a step goes."""

    HIDDEN = auto()
    """To the hidden states: something must be done that is not recorded."""
    LIKELIEST = auto()
    DRAWN = auto()


class DecodeSteps:
    """Runs, records and repeats decoding steps."""

    def __init__(
        self, model: Model, cache: KVTensors, state: RequestState, sampler: Sampler, record: Record
    ) -> None:
        self.sizes = step_sizes(state.spare_slot)
        self._model, self._cache, self._state, self._sampler = model, cache, state, sampler
        self._record = record
        device = state.token_ids.device
        self._inputs = torch.zeros(3 * self.sizes[-1], dtype=torch.int64, device=device)
        self._codes = torch.zeros(self.sizes[-1], dtype=torch.int64, device=device)
        self._cu_q_lens = torch.arange(self.sizes[-1] + 1, dtype=torch.int32, device=device)
        self._hidden: torch.Tensor | None = None
        self._recorded: dict[tuple[int, _End], Callable[[], None]] = {}

    @torch.inference_mode()
    def warm_up(self, sizes: Iterable[int]) -> None:
        """Record greedy steps of these sizes."""
        nothing = np.empty(0, np.int64)
        for size in sizes:
            self._stage(Work(nothing, nothing, np.zeros(1, np.int64), nothing), size)
            self._run(size, _End.LIKELIEST)

    def sample(self, work: Work) -> torch.Tensor:
        """Compute a step of plain requests, and append what they sample to the state on the device.

        Returns codes as in SamplerOutput, [R], until the next step overwrites them.
        """
        self._sampler.refresh()
        end = _End.DRAWN if self._sampler.draws(work.slots) else _End.LIKELIEST
        self._run(self._stage(work), end)
        self._state.num_tokens[work.slots] += 1
        return self._codes[: len(work.slots)]

    def forward(self, work: Work) -> torch.Tensor:
        """Compute a step up to the hidden states, [R, hidden_size], until the next step overwrites them."""
        self._run(self._stage(work), _End.HIDDEN)
        assert self._hidden is not None
        return self._hidden[: len(work.slots)]

    def _stage(self, work: Work, size: int = 0) -> int:
        """Hand the step's numbers over; returns the size to run."""
        count = len(work.slots)
        size = size or self.sizes[bisect_left(self.sizes, count)]
        inputs = np.zeros((3, size), np.int64)
        inputs[0] = self._state.spare_slot
        inputs[0, :count] = work.slots
        inputs[1, :count] = work.computed
        inputs[2, :count] = work.computed + 1 - self._state.num_prompt_tokens[work.slots]
        target = self._inputs[: inputs.size]
        target.copy_(staged(inputs.reshape(-1), target.device), non_blocking=True)
        return size

    def _run(self, size: int, end: _End) -> None:
        repeat = self._recorded.get((size, end))
        if repeat is not None:
            repeat()
            return
        compute = partial(self._compute, size, end)
        compute()
        self._recorded[size, end] = self._record(compute)

    def _compute(self, size: int, end: _End) -> None:
        slots, positions, output_positions = self._inputs[: 3 * size].view(3, size)
        hidden = self._model.forward(self._batch(slots, positions))
        if end is _End.HIDDEN:
            self._keep(hidden)
            return
        codes = self._sampler.choose(
            self._model.logits(hidden), slots, output_positions, draws=end is _End.DRAWN
        )
        self._codes[:size] = codes
        self._state.token_ids[slots, positions + 1] = codes.clamp(min=0)

    def _batch(self, slots: torch.Tensor, positions: torch.Tensor) -> ForwardBatch:
        state, size = self._state, len(slots)
        is_real = slots != state.spare_slot
        return ForwardBatch(
            input_ids=state.token_ids[slots, positions],
            positions=positions,
            cu_q_lens=self._cu_q_lens[: size + 1],
            kv_lens=(positions + 1).int(),
            kv_caches=self._cache.by_layer,
            groups=[
                GroupTables(
                    table[slots],
                    cache_slots(table, slots, positions, state.block_size).where(is_real, -1),
                )
                for table in state.block_tables
            ],
            group_of_layer=self._cache.group_of_layer,
        )

    def _keep(self, hidden: torch.Tensor) -> None:
        if self._hidden is None:
            self._hidden = hidden.new_zeros(self.sizes[-1], hidden.shape[1])
        self._hidden[: len(hidden)] = hidden


def step_sizes(most: int) -> list[int]:
    """The sizes that steps of up to `most` requests are padded to: 1, 2, 4, 8, 16, 24 … 256, 272 … `most`."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size += max(size if size < 8 else 8, size // 128 * 8)
    return [*sizes, most]


def first_sizes(sizes: list[int]) -> list[int]:
    """Those worth recording before the first request, the largest first: they share memory best so."""
    return sorted({size for size in sizes if size.bit_count() == 1} | {sizes[-1]}, reverse=True)

