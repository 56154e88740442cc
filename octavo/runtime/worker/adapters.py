"""`AdaptersPart` gives the tokens of a step the adapters of their requests."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from octavo.base.errors import RequestError
from octavo.base.log import get_logger
from octavo.messages.adapters import AdapterRef
from octavo.messages.step import NewRequest
from octavo.runtime.distributed.context import ParallelContext
from octavo.runtime.lora.pool import AdapterPool
from octavo.runtime.lora.reader import Adapter
from octavo.runtime.lora.sites import EMBEDDING, Sites
from octavo.runtime.worker.prepare import Work
from octavo.runtime.worker.step_part import FalliblePart

logger = get_logger(__name__)


class AdaptersPart(FalliblePart):
    """Keeps the adapters in use in slots, and those of ended requests until others need the place."""

    def __init__(
        self, pool: AdapterPool[AdapterRef, Adapter], sites: Sites, parallel: ParallelContext, num_rows: int
    ) -> None:
        super().__init__()
        self.pool, self._sites, self._parallel = pool, sites, parallel
        self._slot_of_row = np.zeros(num_rows + 1, np.int32)
        self._start_of_row = np.zeros(num_rows + 1, np.int64)
        """Position of the first token that the adapter changes."""
        self._free = list(range(sites.slots.num_slots - 1, 0, -1))
        self._in_slots: OrderedDict[bytes, int] = OrderedDict()
        """Slots by the key of their adapter, the least recently given first."""
        self._users = np.zeros(sites.slots.num_slots, np.int64)
        self._adapters: dict[int, Adapter] = {}

    def read(self, request: NewRequest) -> int | None:
        """See FalliblePart: the slot of its adapter; one that cannot be had ends the request."""
        if (ref := request.spec.adapter) is None:
            return None
        try:
            return self._slot_for(ref)
        except (RequestError, OSError, RuntimeError) as error:
            logger.warning("Adapter %s cannot be used: %s", ref.name, error)
            self.fail(request, f"Loading lora {ref.name} failed: {error}")
            return None if self._parallel.answers else self._broken_slot(ref)

    def add(self, row: int, request: NewRequest) -> None:
        super().add(row, request)
        if (slot := self._wanted.get(row)) is not None:
            self._slot_of_row[row] = slot
            self._start_of_row[row] = request.spec.adapter.start if request.spec.adapter else 0
            self._users[slot] += 1

    def remove(self, row: int) -> None:
        if (slot := self._wanted.get(row)) is not None:
            self._slot_of_row[row] = self._start_of_row[row] = 0
            self._users[slot] -= 1
        super().remove(row)

    @property
    def is_idle(self) -> bool:
        return not self.has_failed

    def begin(self, work: Work) -> None:
        slots, starts = self._slot_of_row[work.rows], self._start_of_row[work.rows]
        lengths = work.ends - work.computed
        tokens = slots.repeat(lengths)
        if (starts > work.computed).any():
            positions = np.arange(work.starts[-1]) + (work.computed - work.starts[:-1]).repeat(lengths)
            tokens[positions < starts.repeat(lengths)] = 0
        self._sites.slots.begin(tokens, slots[work.samples])
        work.reach = self._sites.slots.reach

    def fix(self, row: int | None) -> None:
        """Let products be of the request of `row` alone, until None."""
        self._sites.slots.fix(None if row is None else self.slot_of(row))

    def slot_of(self, row: int) -> int:
        """Return the slot of the request of `row`; 0 = none."""
        return int(self._slot_of_row[row])

    def encoding(self, row: int, *, reads_words: bool = False) -> tuple[int, bytes]:
        """Return slot and key of the adapter of `row` if it changes what an encoder computes, else (0, b"").

        reads_words: an encoder that looks up the model's token embeddings
        """
        slot, sites = self.slot_of(row), self._sites
        is_changed = bool(sites.encoder.slots.reaches[slot])
        if reads_words:
            table = sites.at(EMBEDDING).table
            is_changed |= slot in table.kept or slot in table.wholes
        return (slot, next(key for key, s in self._in_slots.items() if s == slot)) if is_changed else (0, b"")

    @contextmanager
    def only(self, slot: int) -> Iterator[None]:
        """Let all products in here, those of encoders too, be of this slot alone."""
        both = self._sites.slots, self._sites.encoder.slots
        for slots in both:
            slots.fix(slot)
        try:
            yield
        finally:
            for slots in both:
                slots.fix(None)

    def equip(self, sites: Sites) -> None:
        """Change the model that these sites are of, as the one before."""
        self._sites = sites
        for slot, adapter in self._adapters.items():
            sites.put(slot, adapter.changes, adapter.wholes)

    def _slot_for(self, ref: AdapterRef) -> int:
        key = ref.key
        if (slot := self._in_slots.get(key)) is not None:
            self._in_slots.move_to_end(key)
            return slot
        adapter = self.pool.get(ref)
        self._subtract_base(adapter)
        self._find_factors(adapter)
        return self._fill_slot(key, adapter)

    def _broken_slot(self, ref: AdapterRef) -> int:
        """Return a slot that makes a request's numbers NaN: so the rank that answers ends it."""
        key = b"broken" + ref.key
        if (slot := self._in_slots.get(key)) is None:
            slot = self._fill_slot(key, Adapter(self._sites.broken()))
        return slot

    def _fill_slot(self, key: bytes, adapter: Adapter) -> int:
        adapter = adapter.on(self._sites.slots.device)
        if not self._free:
            idle = next(name for name, slot in self._in_slots.items() if not self._users[slot])
            self._free.append(self._in_slots.pop(idle))
        slot = self._free.pop()
        self._in_slots[key], self._adapters[slot] = slot, adapter
        self._sites.put(slot, adapter.changes, adapter.wholes)
        return slot

    def _subtract_base(self, adapter: Adapter) -> None:
        """Make differences of rows and biases that replace the base's, once."""
        while adapter.biases:
            name, own = adapter.biases.popitem()
            change, base = adapter.changes[name], self._sites.biases[name].float().to(own.device)
            bias = torch.where(own.isnan(), 0.0, own - base)
            bias = bias if change.bias is None else bias + change.bias
            adapter.changes[name] = change._replace(bias=self._sites.kept(bias))
        while adapter.replaced:
            name, places = adapter.replaced.popitem()
            change, method, is_own = adapter.changes[name], self._sites.at(name).method, places >= 0
            is_up = name == EMBEDDING
            assert method is not None
            rows = (change.up if is_up else change.down).to(torch.float32, copy=True)
            rows[is_own] -= method.gather(places[is_own].to(self._sites.slots.device)).to(rows)
            rows = self._sites.kept(rows.to(self._sites.dtype))
            adapter.changes[name] = change._replace(up=rows) if is_up else change._replace(down=rows)

    def _find_factors(self, adapter: Adapter) -> None:
        """Divide DoRA's magnitudes by the norms of the changed matrices' rows, once (arXiv:2402.09353)."""
        for name in sorted(adapter.magnitudes):  # the ranks together, whatever order files are read in
            site, magnitude = self._sites.at(name), adapter.magnitudes[name]
            squares = site.row_norms(adapter.changes[name].on(self._sites.slots.device))
            (shard, *_), axis = site.layout.shards, site.layout.split_axis
            if axis == 1 and shard.size < shard.full:
                squares = self._parallel.all_reduce(squares)
            squares = squares.to(magnitude.device)
            factors = torch.where(magnitude == 0, 1.0, magnitude / squares.sqrt()).contiguous()
            adapter.changes[name] = adapter.changes[name]._replace(factors=self._sites.kept(factors))
            del adapter.magnitudes[name]
