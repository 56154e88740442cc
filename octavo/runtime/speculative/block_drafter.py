"""`BlockDrafter` guesses all tokens behind a step at once, by masks that see each other: DFlash.

Each mask is a row of its own, which attends to all positions up to the end of its block: nothing but lengths
tells that it sees later ones, too.
"""

import numpy as np
from torch import Tensor

from octavo.runtime.models.dflash import DFlash
from octavo.runtime.sampling.sampler import Sampler
from octavo.runtime.speculative.drafter import Drafter, KVView, MakeReplayer, Turn, columns
from octavo.runtime.transfer import Array, to_device
from octavo.runtime.worker.chained_steps import Links
from octavo.runtime.worker.kv_tensors import KVTensors
from octavo.runtime.worker.prepare import Work, make_batch
from octavo.runtime.worker.request_state import RequestState


class BlockDrafter(Drafter):
    """Keeps in its layers what the model's states say of each token; masks are written over."""

    reads, chains, num_spare = "all", True, 1

    def __init__(self, model: DFlash) -> None:
        self.model = model
        self.kv_specs = [layer.kv_spec for layer in model.cache_layers]
        self.weight_bytes = model.weight_bytes
        if model.block_size > 1:
            self.most = model.block_size - 1

    def equip(self, cache: KVTensors, state: RequestState, sampler: Sampler, make: MakeReplayer) -> None:
        super().equip(cache, state, sampler, make)
        self._cache = KVView(cache, len(cache.group_of_layer) - len(self.kv_specs))

    def propose(self, turn: Turn) -> Tensor | None:
        """See Drafter."""
        everyone, lengths = np.arange(len(turn.rows)), turn.ends - turn.begins
        starts = np.append(0, lengths.cumsum())
        work = Work(turn.rows, turn.begins, turn.ends, starts, everyone, everyone)
        if starts[-1]:
            self.model.keep(
                self.model.combine(turn.kept_states), make_batch(work, self._state, self._cache)[0]
            )
        live = np.flatnonzero(turn.counts)
        if not live.size:
            return None
        rows, ends, counts = turn.rows[live], turn.ends[live], turn.counts[live]
        bounds = np.append(0, (counts + 1).cumsum())
        owners, each = np.arange(len(live)).repeat(counts + 1), np.arange(bounds[-1])
        numbers = each - bounds[owners]
        block_ends = (ends + counts + 1)[owners]
        work = Work(
            rows[owners], ends[owners] + numbers, block_ends, np.arange(len(each) + 1), each, each, len(each)
        )
        batch, _ = make_batch(work, self._state, self._cache)
        batch.input_ids[to_device(np.flatnonzero(numbers), batch.input_ids.device)] = self.model.mask_id
        batch.longest_q = 1
        hidden = self.model.forward(batch)
        found: list[tuple[Array, Tensor]] = []
        for number in range(int(counts.max())):
            some = np.flatnonzero(counts > number)
            logits = self.model.logits(hidden[to_device(bounds[some] + 1 + number, hidden.device)])
            found.append((live[some], self.choose(logits, rows[some], ends[some] + 1 + number)))
        return columns(found, len(turn.rows))

    def chain(self, links: Links) -> None:
        """See Drafter."""
        model, count = self.model, links.end.count
        model.keep(model.combine(links.hidden), links.whole(self._cache))
        if count:
            hidden = model.forward(links.block(self._cache, count, model.mask_id))
            columns = hidden.view(-1, count + 1, hidden.shape[1]).transpose(0, 1).contiguous()
            for number in range(count):
                links.choose(model.logits(columns[number + 1]), number, draws=self.draws)
