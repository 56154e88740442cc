"""`RoutedExpertsPart` tells which experts took each token, for engines that are asked for it.

Routers write the ids of a step into memory that stays put, so replayed steps leave theirs, too. Behind each
step they come to the host, where they are kept by cache slot: whoever finds a prefix in the cache finds its
ids. What happens to the slots happens here in the same order, once the step's results are read.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from octavo.base.errors import ConfigError, Unsupported
from octavo.config.engine import EngineConfig
from octavo.messages.kv import CachePlan
from octavo.messages.request import RoutedTokens
from octavo.messages.step import ModelRunnerOutput, NewRequest, Place, SchedulerOutput, Tier
from octavo.runtime.batch import MAX_CAPTURED_TOKENS, ForwardBatch
from octavo.runtime.layers.experts import Experts
from octavo.runtime.models.interface import Model
from octavo.runtime.models.weights import layer_of
from octavo.runtime.transfer import Array, to_device
from octavo.runtime.worker.kv_tensors import KVTensors
from octavo.runtime.worker.pending import PendingStep
from octavo.runtime.worker.prepare import Work, token_positions
from octavo.runtime.worker.request_state import RequestState
from octavo.runtime.worker.step_part import StepPart

_SPARE_TOKENS = 512  # that recorded steps and drafts add


class RoutedExpertsPart(StepPart):
    """Keeps [blocks, slots, layers, k] ids on the host; layers without experts have zeros."""

    def __init__(self, model: Model, state: RequestState, plan: CachePlan, most_tokens: int) -> None:
        """Raises ConfigError for a model without experts, Unsupported where slots do not tell the ids."""
        super().__init__()
        self._state, self._device = state, state.token_ids.device
        self._most_tokens = max(most_tokens, MAX_CAPTURED_TOKENS) + _SPARE_TOKENS
        self._group, self._size = _whole_group(plan)
        self._fresh: set[int] = set()
        self._events: list[Callable[[], None]] = []
        self._layers = 0
        self.equip(model)
        shape = self._size, self._layers, self._routes.shape[2]
        self._kept = {
            Tier.POOL: np.zeros((plan.num_blocks, *shape), self._dtype),
            Tier.HOST: np.zeros((plan.num_host_blocks, *shape), self._dtype),
        }

    def equip(self, model: Model) -> None:
        """Let the routers of a model write here."""
        found = {layer_of(f"{name}."): x for name, x in model.named_modules() if isinstance(x, Experts)}
        self._numbers = sorted(number for number in found if number is not None)
        if not self._numbers:
            raise ConfigError("enable_return_routed_experts: this model has no experts of octavo's own.")
        self._layers = len(model.get_submodule("layers")._modules)
        top_k = max(layer.top_k for layer in found.values())
        wide = max(layer.num_experts for layer in found.values()) > 256
        self._dtype = np.dtype(np.uint16 if wide else np.uint8)
        size = len(self._numbers), self._most_tokens, top_k
        self._routes = torch.zeros(size, dtype=torch.int32, device=self._device)
        for routes, number in zip(self._routes, self._numbers, strict=True):
            found[number].routes = routes

    def read(self, request: NewRequest) -> None:
        """Every request is told; see `add`."""

    def add(self, row: int, request: NewRequest) -> None:
        self._fresh.add(row)

    def note_copies(self, copies: list[tuple[Place, Place]]) -> None:
        """Let contents of blocks move as the cache moves them."""
        self._events.append(partial(self._move, copies))

    def before(self, work: Work, batch: ForwardBatch) -> None:
        """Have the last layer compute all tokens, too."""
        batch.wanted = None

    def follow(
        self, step: SchedulerOutput, work: Work, hidden: torch.Tensor | None, outcome: PendingStep
    ) -> None:
        """Take the ids of the step, and tell its requests theirs once they are here."""
        rows, positions = token_positions(work)
        slots = self._slots(rows, positions)
        asked = []
        for index, row in enumerate(work.rows.tolist()):
            first, end = int(work.computed[index]), int(work.ends[index])
            if row in self._fresh:
                first = 0
                self._fresh.discard(row)
            where = self._slots(np.full(end - first, row), np.arange(first, end))
            asked.append((outcome.request_ids[work.owners[index]], first, where))
        event = partial(self._write, slots, self._take(work, len(slots)))
        self._events.append(event)
        outcome.closers.append(partial(self._tell, event, asked))

    def _slots(self, rows: Array, positions: Array) -> Array:
        slots: Array = self._state.cache_slots(rows, positions)[self._group]
        return slots

    def _take(self, work: Work, count: int) -> Callable[[], Array]:
        """Return what gives the ids of the step's tokens, [T, layers with experts, k], once they are here."""
        if self._device.type == "cpu":
            taken = self._routes[:, :count].numpy().astype(self._dtype).swapaxes(0, 1)
            return lambda: taken
        places = np.arange(count) if work.places is None else work.places
        ids = self._routes[:, to_device(places, self._device)].transpose(0, 1).to(torch.int16)
        here = torch.empty(ids.shape, dtype=torch.int16, pin_memory=True)
        here.copy_(ids, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()

        def wait() -> Array:
            done.synchronize()
            return here.numpy().astype(self._dtype)

        return wait

    def _write(self, slots: Array, taken: Callable[[], Array]) -> None:
        blocks, offsets = np.divmod(slots, self._size)
        ids = np.zeros((len(slots), *self._kept[Tier.POOL].shape[2:]), self._dtype)
        ids[:, self._numbers] = taken()
        self._kept[Tier.POOL][blocks, offsets] = ids

    def _move(self, copies: list[tuple[Place, Place]]) -> None:
        for source, target in copies:
            self._kept[target.tier][target.number] = self._kept[source.tier][source.number]

    def _tell(
        self, last: Callable[[], None], asked: list[tuple[str, int, Array]], result: ModelRunnerOutput
    ) -> None:
        """Bring the slots up to this step; then read those of its requests."""
        while self._events:
            event = self._events.pop(0)
            event()
            if event is last:
                break
        kept = self._kept[Tier.POOL]
        _, _, layers, top_k = kept.shape
        for name, first, slots in asked:
            blocks, offsets = np.divmod(slots, self._size)
            told = RoutedTokens(first, kept[blocks, offsets].tobytes(), layers, top_k, self._dtype.itemsize)
            result.routes.setdefault(name, []).append(told)


def attach(
    model: Model, state: RequestState, cache: KVTensors, plan: CachePlan, config: EngineConfig
) -> RoutedExpertsPart | None:
    """Return the part, if there is to be one; it follows the cache. Raises ConfigError, Unsupported."""
    if not config.model.enable_return_routed_experts:
        return None
    part = RoutedExpertsPart(model, state, plan, config.scheduler.max_num_batched_tokens)
    cache.followers.append(part.note_copies)
    return part


def _whole_group(plan: CachePlan) -> tuple[int, int]:
    """Return a cache group with all tokens of a request, and its slots per block. Raises Unsupported."""
    if plan.store is not None:
        raise Unsupported("enable_return_routed_experts: blocks of other engines come without their experts.")
    for number, (group, size) in enumerate(zip(plan.groups, plan.block_sizes, strict=True)):
        if not group.spec.sliding_window:
            return number, size
    raise Unsupported("enable_return_routed_experts needs a layer that sees the whole context.")
