"""`CUDAGraphs`: steps of a few shapes over memory that stays put, captured once and then replayed.

A replayed step is one launch instead of hundreds. The host hands over places, rows and lengths; all else
is read on the device, from the tables that hold it by row: tokens, blocks, sampling parameters. Its numbers
and its tokens go through memory that host and device share (`PinnedRing`): no copy is launched beside it.
A step is padded to the next shape with copies of the spare row, which attend to one slot of the null block,
store nothing (slot -1) and append their token to the spare row, and with tokens that belong to no row.

Called by the model runner. A shape of decoding is captured when it comes up, others when they come up again.
Capturing costs the host about as much as giving the step out. So `warm_up` does it for usual shapes before
there are requests, and `after_eager` for more of them while a long prompt keeps the device busy.
"""

import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from octavo.runtime.batch import MAX_CAPTURED_TOKENS, ForwardBatch, group_tables
from octavo.runtime.distributed.context import ALONE, ParallelContext
from octavo.runtime.kernels.steps import StepKernels
from octavo.runtime.lora.sites import AdapterSlots
from octavo.runtime.models.interface import Model
from octavo.runtime.platforms.platform import Capture
from octavo.runtime.sampling.output import PendingSamples
from octavo.runtime.sampling.sampler import Kind, Sampler
from octavo.runtime.transfer import Array, to_device
from octavo.runtime.worker.handover import Handover
from octavo.runtime.worker.kv_tensors import KVTensors
from octavo.runtime.worker.packed_inputs import PackedInputs, Packing
from octavo.runtime.worker.pinned_ring import PinnedRing, RingResults
from octavo.runtime.worker.prepare import Work, have_common_start, locate
from octavo.runtime.worker.replayer import Replay, Replayer
from octavo.runtime.worker.request_state import RequestState

_FEWEST_TOKENS = 64  # more than there are chunks: as many tokens as rows would be a decoding step
_CHUNKS = (8, 32)
_BYTES_TIMES_TOKENS = 5e12  # where computing on a large GPU takes as long as launching: nothing is won beyond
_SHARE_OF_SECOND = 1 / 1.4e15  # of a step per byte of weights and token: what the host may spend behind it
_MAX_GRAPHS = 400
_MOST_USUAL = 256


class Shape(NamedTuple):
    """singles: rows of one token each, which come first; chunks: rows behind them, with `tokens` in all."""

    singles: int
    chunks: int = 0
    tokens: int = 0
    common_start: bool = False
    """As in ForwardBatch."""
    is_changed: bool = False
    """As in Work; what is captured without adapters knows nothing of them."""

    @property
    def num_rows(self) -> int:
        """Of both kinds."""
        return self.singles + self.chunks

    @property
    def num_tokens(self) -> int:
        """Of both kinds."""
        return self.singles + self.tokens


class CUDAGraphs(Replayer):
    """Captures and replays steps up to an end: tokens of a kind; or, for None, the last hidden states."""

    def __init__(
        self,
        model: Model,
        cache: KVTensors,
        state: RequestState,
        sampler: Sampler | None,
        ends: StepKernels,
        capture: Capture,
        *,
        batch_invariant: bool = False,
        parallel: ParallelContext = ALONE,
    ) -> None:
        """sampler: None in stages before the last. All ranks compute steps of the same shapes."""
        super().__init__(model, cache, state, batch_invariant=batch_invariant)
        self.sizes = step_sizes(state.spare_row)
        self._sampler = sampler
        self._adapters: AdapterSlots | None = model.adapters and model.adapters.sites.slots
        self._ends, self._capture = ends, capture
        device, self._is_alone = state.token_ids.device, parallel.world.size == 1
        most_tokens = min(MAX_CAPTURED_TOKENS, int(_BYTES_TIMES_TOKENS / model.weight_bytes))
        self._most_tokens = parallel.world.least(most_tokens, device)
        most_rows = max(self.sizes[-1], *_singles_of(self.sizes[-1])) + _CHUNKS[-1]
        self._num_groups, _, num_columns = state.block_tables.shape
        most = Shape(most_rows - _CHUNKS[-1], _CHUNKS[-1], MAX_CAPTURED_TOKENS, is_changed=True)
        self._packings: dict[Shape, Packing] = {}
        self._inputs = torch.zeros(self._packing(most).size, dtype=torch.int64, device=device)
        self._token_ids = torch.zeros(most.num_tokens, dtype=torch.int64, device=device)
        self._tables = state.block_tables.new_zeros(self._num_groups * most_rows * num_columns)
        self._ring = PinnedRing(len(self._inputs), most_rows, device)
        self._hidden: torch.Tensor | None = None
        self._handover = Handover(model, parallel.pp, most.num_tokens, device)
        self._captured: dict[tuple[Shape, Kind | None], Callable[[], None]] = {}
        self._seen: set[tuple[Shape, Kind | None]] = set()

    @torch.inference_mode()
    def try_out(self) -> None:
        """Compute steps of nothing, launch by launch: then kernels are loaded, with what they need."""
        nothing = np.empty(0, np.int64)
        work = Work(nothing, nothing, nothing, np.zeros(1, np.int64), nothing, nothing)
        for shape, end in self._first_steps():
            self._ring.restart()
            self._stage(work, shape, nothing)
            self._compute(shape, end)
            self._ring.end(nothing)

    def _first_steps(self) -> list[tuple[Shape, Kind | None]]:
        """List steps of all ways to sample, of prompts, and of greedy decoding in sizes with own kernels.

        Prompts are alone or beside decoding. The kernels that take long to compile come first.
        """
        drawn = [(Shape(1), Kind.TRUNCATED), (Shape(1), Kind.WHOLE)]
        beside = (0, _singles_of(self.sizes[-1])[-1])
        prompts = [Shape(singles, _CHUNKS[0], _FEWEST_TOKENS) for singles in beside]
        greedy = [*prompts, *map(Shape, first_sizes(self.sizes))]
        if self._adapters is not None:
            greedy += [shape._replace(is_changed=True) for shape in greedy]
        if self._sampler is None:
            return [(shape, None) for shape in greedy]
        return [*drawn, *((shape, Kind.GREEDY) for shape in greedy)]

    @torch.inference_mode()
    def warm_up(self) -> None:
        """See Replayer.warm_up: greedy decoding steps, the largest first: they share memory best so."""
        self.try_out()
        usual = self.sizes[: bisect_left(self.sizes, _MOST_USUAL) + 1]
        for size in (*first_sizes(self.sizes), *usual):
            for is_changed in (False,) if self._adapters is None else (False, True):
                self._ensure(Shape(size, is_changed=is_changed), Kind.GREEDY if self._sampler else None)

    @torch.inference_mode()
    def after_eager(self, work: Work, end: Kind | None) -> None:
        """See Replayer.after_eager: capture what the step's requests will need next.

        Spends half of the time that the device needs for the step at least; the larger sizes come first.
        Ranks, whose clocks differ, leave it until the sizes come up.
        """
        until = time.perf_counter() + int(work.starts[-1]) * self.model.weight_bytes * _SHARE_OF_SECOND
        most = bisect_left(self.sizes, self._state.num_requests)
        for size in reversed(self.sizes[: most + 1]):
            if not self._is_alone or time.perf_counter() > until:
                break
            self._ensure(Shape(size, is_changed=work.is_changed), end)

    def find(self, work: Work, end: Kind | None) -> Replay | None:
        shape = self._shape_of(work)
        if shape is None:
            return None
        return (
            partial(self._hidden_states, work, shape)
            if end is None
            else partial(self._sample, work, shape, end)
        )

    def _shape_of(self, work: Work) -> Shape | None:
        """Return the shape that a step is padded to; None if there is none that pays."""
        singles = work.num_singles
        chunks, tokens = len(work.rows) - singles, int(work.starts[-1]) - singles
        if singles > self.sizes[-1]:
            return None
        if not chunks:
            size = self.sizes[bisect_left(self.sizes, singles)]
            common_start = have_common_start(work, self._state)
            return Shape(size, common_start=common_start, is_changed=work.is_changed)
        tokens = _padded_tokens(tokens)
        if tokens > self._most_tokens or chunks > _CHUNKS[-1]:
            return None
        widths = _singles_of(self.sizes[-1])
        padded = widths[bisect_left(widths, singles)], _CHUNKS[bisect_left(_CHUNKS, chunks)]
        return Shape(*padded, tokens, is_changed=work.is_changed)

    def _sample(self, work: Work, shape: Shape, kind: Kind) -> PendingSamples:
        """Compute a step of plain requests, and append what they sample to the state on the device."""
        order = self._order(work, shape)
        assert self._sampler is not None
        self._sampler.refresh()
        results = self._give_out(work, shape, order, kind)
        self._state.num_tokens[work.rows[work.samples]] += 1
        return PendingSamples(results)

    def _hidden_states(self, work: Work, shape: Shape) -> torch.Tensor:
        """Compute a step up to the last hidden states of the requests that sample: [S, hidden_size]."""
        order = self._order(work, shape)
        self._give_out(work, shape, order, None)
        if self._sampler is None:
            return self._handover.leaving
        assert self._hidden is not None
        return self._hidden[to_device(order[work.samples], self._hidden.device)]

    def _give_out(self, work: Work, shape: Shape, order: Array, end: Kind | None) -> RingResults:
        own = self._stage(work, shape, order)
        self._handover.receive(own)
        self._run(shape, end)
        self._handover.send(own)
        return self._ring.end(order[work.samples])

    def _order(self, work: Work, shape: Shape) -> Array:
        """Return the row that computes each request, [R] int64. Of single rows the longest come first."""
        singles = work.num_singles
        order = np.arange(len(work.rows))
        if shape.chunks:
            order[singles:] += shape.singles - singles
        if not shape.common_start:  # whose neighbours stay together
            order[(-work.computed[:singles]).argsort(kind="stable")] = np.arange(singles)
        return order

    def _stage(self, work: Work, shape: Shape, order: Array) -> Array:
        """Hand the step's inputs over. Returns the places of its tokens, [T]."""
        packing = self._packing(shape)
        inputs = packing.split(self._ring.give(packing.size))
        state, singles, sampling = self._state, work.num_singles, work.samples
        own, num_padding = order, shape.singles - singles
        if shape.chunks:
            own = np.concatenate([order[:singles], np.arange(singles, work.starts[-1]) + num_padding])
        inputs.places[:] = inputs.targets[:] = state.spare_place
        inputs.cache_slots[:] = -1
        inputs.places[own], inputs.positions[own], inputs.cache_slots[:, own] = locate(work, state)
        inputs.rows[:] = state.spare_row
        inputs.rows[order] = work.rows
        inputs.output_positions[order] = work.ends - state.num_prompt_tokens[work.rows]
        inputs.targets[order[sampling]] = state.places(work.rows[sampling], work.ends[sampling])
        inputs.kv_lens[:] = 1
        inputs.kv_lens[order] = work.ends
        inputs.adapters[:] = 0
        if work.is_changed and self._adapters is not None:
            inputs.adapters[own] = self._adapters.tokens
        inputs.bounds[: shape.singles + 1] = np.arange(shape.singles + 1)
        if shape.chunks:
            inputs.bounds[shape.singles + 1 :] = work.starts[-1] + num_padding
            inputs.bounds[order[singles:] + 1] = work.starts[singles + 1 :] + num_padding
        return own

    def _run(self, shape: Shape, end: Kind | None) -> None:
        key = shape, end
        if shape.chunks == 0 or key in self._seen:
            self._ensure(shape, end)
        else:
            self._seen.add(key)
        self._captured.get(key, partial(self._compute, shape, end))()

    def _ensure(self, shape: Shape, end: Kind | None) -> None:
        """Capture it, if that is not done and there is room."""
        key = shape, end
        if key not in self._captured and len(self._captured) < _MAX_GRAPHS:
            self._captured[key] = self._capture(partial(self._compute, shape, end))

    def _compute(self, shape: Shape, end: Kind | None) -> None:
        packing, state = self._packing(shape), self._state
        numbers = self._inputs[: packing.size]
        inputs = packing.split(numbers)
        ids, tables = self._token_ids[: shape.num_tokens], self._tables_of(shape)
        kept_ids = state.token_ids.view(-1)
        self._ends.begin(self._ring.shared, numbers, kept_ids, state.block_tables, ids, tables)
        adapters = self._adapters
        with (
            adapters.recording(is_changed=shape.is_changed, slots=inputs.adapters)
            if adapters
            else nullcontext()
        ):
            hidden = self.model.forward(self._batch(inputs, shape))
            if self._sampler is None:
                self._handover.keep(hidden)
                return
            if shape.chunks:
                hidden = hidden[inputs.bounds[1:] - 1]
            if end is None:
                self._keep(hidden)
                return
            choice = self.model.greedy(hidden) if end is Kind.GREEDY else None
            logits = None if choice else self.model.logits(hidden)
        if logits is not None:
            choice = self._sampler.choose(logits, inputs.rows, inputs.output_positions, end)
        assert choice is not None
        vocab_size = self._sampler.vocab_size
        self._ends.end(self._ring.shared, *choice, inputs.targets, kept_ids, vocab_size)

    def _batch(self, inputs: PackedInputs[torch.Tensor], shape: Shape) -> ForwardBatch:
        ids, tables = self._token_ids[: shape.num_tokens], self._tables_of(shape)
        return ForwardBatch(
            input_ids=ids,
            positions=inputs.positions,
            cu_q_lens=inputs.bounds,
            kv_lens=inputs.kv_lens,
            kv_caches=self._cache.by_layer,
            groups=group_tables(tables, inputs.cache_slots),
            group_of_layer=self._cache.group_of_layer,
            num_singles=shape.singles,
            common_start=shape.common_start,
            entered=self._handover.entered(shape.num_tokens),
            source_lens=self._state.source_lens[inputs.rows] if self._state.reads_sources else None,
        )

    def _tables_of(self, shape: Shape) -> torch.Tensor:
        """Return the block tables of the step's rows, [groups, rows, max_blocks]."""
        groups, _, columns = self._state.block_tables.shape
        return self._tables[: groups * shape.num_rows * columns].view(groups, shape.num_rows, columns)

    def _packing(self, shape: Shape) -> Packing:
        if shape not in self._packings:
            self._packings[shape] = Packing(
                shape.num_tokens, shape.num_rows, self._num_groups, is_changed=shape.is_changed
            )
        return self._packings[shape]

    def _keep(self, hidden: torch.Tensor) -> None:
        if self._hidden is None:
            self._hidden = hidden.new_zeros(self._ring.shared.max_logits.shape[1], hidden.shape[1])
        self._hidden[: len(hidden)] = hidden


def step_sizes(most: int) -> list[int]:
    """List the sizes that decoding steps of up to `most` requests are padded to: 1, 2, 4, 8, 16, 24 …

    From 384 on multiples of 24, away from cuBLAS's worst holes (448 rows of an 8B take 40 % more than 456).
    """
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size += size if size < 8 else 8 if size < 384 else max(24, size // 512 * 16)
    return [*sizes, most]


def first_sizes(sizes: list[int]) -> list[int]:
    """Return the sizes that between them use every kernel, the largest first: they share memory best so.

    Kernels change where a size passes 2^k or 3 * 2^k requests.
    """
    return sorted({size for size in sizes if size // (size & -size) in (1, 3)} | {sizes[-1]}, reverse=True)


def _singles_of(most: int) -> list[int]:
    """List what single rows beside chunks are padded to: few, as each comes with many numbers of tokens."""
    return [0, *(8 << i for i in range(max(1, (most - 1).bit_length() - 2)))]


def _padded_tokens(number: int) -> int:
    """Return the next number of tokens of chunks, at most a quarter more from 128 on."""
    unit = max(_FEWEST_TOKENS, 1 << max(0, number.bit_length() - 3))
    return -(-number // unit) * unit
