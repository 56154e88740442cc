"""`CUDAGraphs`: steps of a few shapes over memory that stays put, captured once and then replayed.

A replayed step is one launch instead of hundreds. The host hands over places, rows and lengths; all else
is read on the device, from the tables that hold it by row: tokens, blocks, sampling parameters. Its numbers
and its tokens go through memory that host and device share (`PinnedRing`): no copy is launched beside it.
A step is padded to the next shape with copies of the spare row, which attend to one slot of the null block,
store nothing (slot -1) and append their token to the spare row, and with tokens that belong to no row.

Called by the model runner. A shape of decoding is captured when it comes up, others when they come up again.
Capturing costs the host about as much as giving the step out. So `warm_up` does it for a few shapes before
there are requests, `use_pause` for others, and `after_eager` for more while a long prompt takes the device.
"""

import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch

from octavo.runtime.batch import MAX_CAPTURED_TOKENS, ForwardBatch, group_tables
from octavo.runtime.distributed.context import ALONE, ParallelContext
from octavo.runtime.heads.token import choose_early
from octavo.runtime.kernels.steps import StepKernels
from octavo.runtime.lora.sites import AdapterSlots, Reach
from octavo.runtime.models.interface import Model
from octavo.runtime.platforms.platform import Capture
from octavo.runtime.sampling.masks import RowMasks
from octavo.runtime.sampling.output import PendingSamples
from octavo.runtime.sampling.sampler import Kind, Masked, Sampler
from octavo.runtime.transfer import Array, to_device
from octavo.runtime.worker import step_shapes
from octavo.runtime.worker.chained_steps import Chained, ChainedSteps, End
from octavo.runtime.worker.handover import Handover
from octavo.runtime.worker.kv_tensors import KVTensors
from octavo.runtime.worker.packed_inputs import PackedInputs, Packing
from octavo.runtime.worker.pinned_ring import PinnedRing, RingResults
from octavo.runtime.worker.prepare import Work, have_common_start, locate
from octavo.runtime.worker.replayer import Replay, Replayer, Unmasked
from octavo.runtime.worker.request_state import RequestState
from octavo.runtime.worker.step_shapes import CHUNKS, Shape

_BYTES_TIMES_TOKENS = 5e12  # where computing on a large GPU takes as long as launching: nothing is won beyond
_SHARE_OF_SECOND = 1 / 1.4e15  # of a step per byte of weights and token: what the host may spend behind it
_MAX_GRAPHS = 400

Key = tuple[Shape, End]
Parts = tuple[Callable[[], None], ...]


class CUDAGraphs(Replayer):
    """Captures and replays steps up to an end: tokens of a kind; or, for None, the last hidden states."""

    samples = True

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
        self.sizes = step_shapes.step_sizes(state.spare_row)
        self._sampler = sampler
        self._adapters: AdapterSlots | None = model.adapters and model.adapters.sites.slots
        self._ends, self._capture, self._exchange = ends, capture, parallel.exchange
        device, self._is_alone = state.token_ids.device, parallel.is_alone
        most_tokens = min(MAX_CAPTURED_TOKENS, int(_BYTES_TIMES_TOKENS / model.weight_bytes))
        self._most_tokens = parallel.world.least(most_tokens, device)
        most_rows = max(self.sizes[-1], *step_shapes.singles_of(self.sizes[-1])) + CHUNKS[-1]
        self._num_groups, _, num_columns = state.block_tables.shape
        most = Shape(most_rows - CHUNKS[-1], CHUNKS[-1], MAX_CAPTURED_TOKENS, reach=Reach.PRODUCTS)
        most = most._replace(num_chained=most.singles)
        self._packings: dict[Shape, Packing] = {}
        self._inputs = torch.zeros(self._packing(most).size, dtype=torch.int64, device=device)
        self._token_ids = torch.zeros(most.num_tokens, dtype=torch.int64, device=device)
        self._tables = state.block_tables.new_zeros(self._num_groups * most_rows * num_columns)
        self._ring = PinnedRing(len(self._inputs), most_rows, device)
        self._hidden: torch.Tensor | None = None
        self._handover = Handover(model, parallel.pp, most.num_tokens, device)
        self._logits: torch.Tensor | None = None
        """Of a step that waits for masks, until its tokens are chosen."""
        self._chains, self._has_chained = ChainedSteps(state, sampler, ends.chain), False
        self._captured: dict[Key, Parts] = {}
        self._seen: set[Key] = set()
        self._waiting: list[Key] = []

    @torch.inference_mode()
    def try_out(self) -> None:
        """Compute steps of nothing, launch by launch: then kernels are loaded, with what they need."""
        nothing = np.empty(0, np.int64)
        work = Work(nothing, nothing, nothing, np.zeros(1, np.int64), nothing, nothing)
        with self.model.shortened():
            for shape, end in self._first_steps():
                self._ring.restart()
                self._stage(work, shape, nothing)
                for part in self._parts(shape, end):
                    part()
                self._ring.end(nothing)

    def _first_steps(self) -> list[Key]:
        """List steps of all ways to sample; the kernels that take long to compile come first."""
        drawn: list[Key] = [(Shape(1), Masked(Kind.TRUNCATED)), (Shape(1), Kind.WHOLE)]
        greedy = step_shapes.trial_shapes(self.sizes)
        if self._adapters is not None:
            greedy += [shape._replace(reach=Reach.PRODUCTS) for shape in greedy]
        if self._sampler is None:
            return [(shape, None) for shape in greedy]
        return [*drawn, *((shape, Kind.GREEDY) for shape in greedy)]

    @torch.inference_mode()
    def warm_up(self, *, has_tried: bool = False) -> None:
        """See Replayer.warm_up: greedy decoding. A rank that is alone leaves most of it to pauses."""
        if not has_tried:
            self.try_out()
        reaches = tuple(Reach)[: 1 if self._adapters is None else Reach.EXPERTS]
        sizes, kind = step_shapes.usual_sizes(self.sizes), Kind.GREEDY if self._sampler else None
        self._waiting = [(Shape(size, reach=reach), kind) for size in sizes for reach in reaches]
        for _ in range(step_shapes.AT_ONCE * len(reaches) if self._is_alone else len(self._waiting)):
            self.use_pause()

    @torch.inference_mode()
    def use_pause(self) -> bool:
        """See Replayer.use_pause."""
        if self._waiting:
            self._ensure(*self._waiting.pop(0))
        return bool(self._waiting)

    def can_chain(self, num_rows: int) -> bool:
        """See Replayer; rows that read sources do not move, and stages do not know how far."""
        return self._handover.is_alone and not self._state.reads_sources and num_rows < self.sizes[-1]

    def _size_of(self, num_rows: int) -> int:
        return self.sizes[bisect_left(self.sizes, num_rows)]

    @torch.inference_mode()
    def after_eager(self, work: Work, end: End) -> None:
        """See Replayer.after_eager: capture what the step's requests will need next.

        Spends half of the time that the device needs for the step at least; the larger sizes come first.
        Ranks, whose clocks differ, leave it until the sizes come up.
        """
        until = time.perf_counter() + int(work.starts[-1]) * self.model.weight_bytes * _SHARE_OF_SECOND
        most = bisect_left(self.sizes, self._state.num_requests)
        for size in reversed(self.sizes[: most + 1]):
            if not self._is_alone or time.perf_counter() > until:
                break
            self._ensure(Shape(size, reach=work.reach), end)

    def find(self, work: Work, end: End) -> Replay | None:
        if isinstance(end, Chained):
            return partial(self._chain, work, end)
        shape = self._shape_of(work)
        if shape is None:
            return None
        if end is None:
            return partial(self._hidden_states, work, shape)
        if isinstance(end, Masked):
            return partial(self._until_masks, work, shape, end)
        return partial(self._sample, work, shape, end)

    def _shape_of(self, work: Work) -> Shape | None:
        """Return the shape that a step is padded to; None if there is none that pays."""
        singles = work.num_singles
        chunks, tokens = len(work.rows) - singles, int(work.starts[-1]) - singles
        if singles > self.sizes[-1] or (self._exchange and not self._exchange.is_captured):
            return None
        if not chunks:
            size = self._exchange.num_tokens if self._exchange else self._size_of(singles)
            common_start = have_common_start(work, self._state)
            return Shape(size, common_start=common_start, reach=work.reach)
        tokens = step_shapes.padded_tokens(tokens)
        if tokens > self._most_tokens or chunks > CHUNKS[-1]:
            return None
        widths = step_shapes.singles_of(self.sizes[-1])
        padded = widths[bisect_left(widths, singles)], CHUNKS[bisect_left(CHUNKS, chunks)]
        return Shape(*padded, tokens, reach=work.reach)

    def _sample(self, work: Work, shape: Shape, kind: Kind) -> PendingSamples:
        """Compute a step of plain requests, and append what they sample to the state on the device."""
        order = self._order(work, shape)
        assert self._sampler is not None
        self._sampler.refresh()
        results = self._give_out(work, shape, order, kind)
        self._state.num_tokens[work.rows[work.samples]] += 1
        return PendingSamples(results)

    def _chain(self, work: Work, end: Chained) -> PendingSamples:
        """Compute a step that verifies drafts, and guess what follows; what came true stays on the device."""
        assert self._sampler is not None and work.chained is not None
        num_rows, num_requests = len(work.rows), len(work.chained.heads)
        num_chained = self._size_of(num_requests)
        size = self._size_of(num_rows + (num_chained > num_requests))  # those that pad have a spare row
        shape, order = Shape(size, num_chained=num_chained), np.arange(num_rows)
        self._sampler.refresh()
        key, clock = (shape, end), self._chains.clock
        took_s = clock.took_s(key) if self.guess else 0.0
        self._launch(work, shape, order, end if took_s is None else end.in_one())
        results = self._ring.end(order)
        took_s = clock.measure(key, partial(self._run, *key, 1)) if took_s is None else took_s
        self._state.num_tokens[work.rows] = work.ends + 1  # of those that verify drafts, the host learns it
        return PendingSamples(results, tells_drafts=True, draft_s=took_s)

    def _until_masks(self, work: Work, shape: Shape, end: Masked) -> Unmasked:
        """Compute a step of plain requests up to the logits: the rest is given out with their masks."""
        order = self._order(work, shape)
        assert self._sampler is not None
        self._sampler.refresh()
        self._launch(work, shape, order, end)
        self._state.num_tokens[work.rows[work.samples]] += 1
        return Unmasked(partial(self._choose, (shape, end), order[work.samples]))

    def _choose(self, key: Key, rows: Array, masks: RowMasks | None) -> PendingSamples:
        """Choose the tokens of the step launched last. rows: [S], where it has those of the masks"""
        bound, numbers = (rows[:0], rows[:0]) if masks is None else (rows[masks.rows], masks.numbers)
        self._ring.give_masks(bound, numbers)
        self._run(*key, part=1)
        return PendingSamples(self._ring.end(rows))

    def _hidden_states(self, work: Work, shape: Shape) -> torch.Tensor:
        """Compute a step up to the last hidden states of the requests that sample: [S, hidden_size]."""
        order = self._order(work, shape)
        self._give_out(work, shape, order, None)
        if self._sampler is None:
            return self._handover.leaving
        assert self._hidden is not None
        return self._hidden[to_device(order[work.samples], self._hidden.device)]

    def _give_out(self, work: Work, shape: Shape, order: Array, end: Kind | None) -> RingResults:
        self._handover.send(self._launch(work, shape, order, end))
        return self._ring.end(order[work.samples])

    def _launch(self, work: Work, shape: Shape, order: Array, end: End) -> Array:
        own = self._stage(work, shape, order)
        self._handover.receive(own)
        is_first = shape.chunks > 0 or (shape.num_chained > 0 and not self._has_chained)
        if not is_first or (shape, end) in self._seen:
            self._ensure(shape, end)
        else:
            self._seen.add((shape, end))
            self._has_chained |= shape.num_chained > 0
        self._run(shape, end)
        return own

    def _order(self, work: Work, shape: Shape) -> Array:
        """Return the row that computes each request, [R] int64. Of single rows the longest come first."""
        singles = work.num_singles
        order = np.arange(len(work.rows))
        if shape.chunks:
            order[singles:] += shape.singles - singles
        if not shape.common_start and (np.diff(work.owners) > 0).all():  # neighbours, or drafts
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
        work.places = own
        inputs.places[:] = inputs.targets[:] = state.spare_place
        inputs.cache_slots[:] = -1
        inputs.places[own], inputs.positions[own], inputs.cache_slots[:, own] = locate(work, state)
        inputs.rows[:] = state.spare_row
        inputs.rows[order] = work.rows
        inputs.output_positions[order] = work.ends + state.shift - state.num_prompt_tokens[work.rows]
        inputs.targets[order[sampling]] = state.places(work.rows[sampling], work.ends[sampling])
        inputs.kv_lens[:] = 1
        inputs.kv_lens[order] = work.ends
        if work.chained is not None:
            self._chains.stage(inputs, work.chained)
        inputs.adapters[:] = 0
        if work.reach and self._adapters is not None:
            inputs.adapters[own] = self._adapters.tokens
        inputs.bounds[: shape.singles + 1] = np.arange(shape.singles + 1)
        if shape.chunks:
            inputs.bounds[shape.singles + 1 :] = work.starts[-1] + num_padding
            inputs.bounds[order[singles:] + 1] = work.starts[singles + 1 :] + num_padding
        return own

    def _run(self, shape: Shape, end: End, part: int = 0) -> None:
        (self._captured.get((shape, end)) or self._parts(shape, end))[part]()

    def _parts(self, shape: Shape, end: End) -> Parts:
        """Return what computes a step; and in a second part, what chooses its tokens or guesses others."""
        compute = partial(self._compute, shape, end)
        if isinstance(end, Chained) and self.guess and not end.at_once:
            return compute, partial(self._chains.guess, self.guess)
        if not isinstance(end, Masked):
            return (compute,)
        assert self._sampler is not None
        return compute, partial(self._end_masked, shape, end.kind, self._sampler.masks.words)

    def _ensure(self, shape: Shape, end: End) -> None:
        """Capture it, if that is not done and there is room."""
        key = shape, end
        if key not in self._captured and len(self._captured) < _MAX_GRAPHS:
            # The logits, of which a second part knows the address, are held until it is captured.
            self._captured[key] = tuple([self._capture(part) for part in self._parts(shape, end)])
            self._logits = None

    def _compute(self, shape: Shape, end: End) -> None:
        packing, state = self._packing(shape), self._state
        numbers = self._inputs[: packing.size]
        inputs = packing.split(numbers)
        ids, tables = self._token_ids[: shape.num_tokens], self._tables_of(shape)
        kept_ids = state.token_ids.view(-1)
        self._ends.begin(self._ring.shared, numbers, kept_ids, state.block_tables, ids, tables)
        if shape.num_chained:
            self._chains.begin(inputs, ids, tables)
        adapters = self._adapters
        with adapters.recording(shape.reach, inputs.adapters) if adapters else nullcontext():
            batch = self._batch(inputs, shape)
            hidden = self.model.forward(batch)
            if self._sampler is None:
                self._handover.keep(hidden)
                return
            if shape.chunks:
                last = inputs.bounds[1:] - 1
                hidden = hidden[last]
                if adapters:
                    adapters.narrow(last)
            if end is None:
                self._keep(hidden)
                return
            kind = end.kind if isinstance(end, Chained) else end
            find = partial(self._sampler.draws, inputs.rows, inputs.output_positions)
            choice = choose_early(kind, self.model, hidden, find)
            logits = None if choice else self.model.logits(hidden)
        if isinstance(end, Masked):
            self._logits = logits
            return
        if logits is not None:
            assert isinstance(kind, Kind)
            choice = self._sampler.choose(logits, inputs.rows, inputs.output_positions, kind)
        assert choice is not None
        self._end(inputs, *choice)
        if isinstance(end, Chained):
            self._chains.end(inputs, batch, hidden, choice[1], end, self.guess)

    def _end_masked(self, shape: Shape, kind: Kind, words: torch.Tensor) -> None:
        """Choose among the logits that `_compute` left; the host has given the numbers of the masks."""
        assert self._sampler is not None and self._logits is not None
        packing = self._packing(shape)
        inputs = packing.split(self._inputs[: packing.size])
        self._ends.mask(self._ring.shared, self._logits, words)
        self._end(inputs, *self._sampler.choose(self._logits, inputs.rows, inputs.output_positions, kind))

    def _end(self, inputs: PackedInputs[torch.Tensor], ids: torch.Tensor, max_logits: torch.Tensor) -> None:
        assert self._sampler is not None
        kept_ids, size = self._state.token_ids.view(-1), self._sampler.vocab_size
        self._ends.end(self._ring.shared, ids, max_logits, inputs.targets, kept_ids, size, inputs.drafts)

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
            sizes = shape.num_tokens, shape.num_rows, self._num_groups
            is_changed, num_chained = shape.reach > Reach.NOTHING, shape.num_chained
            self._packings[shape] = Packing(*sizes, is_changed=is_changed, num_chained=num_chained)
        return self._packings[shape]

    def _keep(self, hidden: torch.Tensor) -> None:
        if self._hidden is None:
            self._hidden = hidden.new_zeros(self._ring.shared.max_logits.shape[1], hidden.shape[1])
        self._hidden[: len(hidden)] = hidden
