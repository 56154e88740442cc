"""vLLM's interface of logits processors, which counts requests by their index in the batch, and its adapter.

Classes written for vLLM's V1 `LogitsProcessor` derive from the one here instead (public as
octavo.logits_processor); `request_functions` wraps them. A processor sees a row of logits for every request
that it was told of; rows of requests that draw no token in this step are zeros, and whatever it makes of them
is dropped.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, TypeVar

import torch

from octavo.config.cache import CacheConfig
from octavo.config.engine import EngineConfig
from octavo.config.model import ModelConfig
from octavo.config.parallel import ParallelConfig
from octavo.config.scheduling import SchedulerConfig
from octavo.messages.sampling import SamplingParams
from octavo.messages.step import NewRequest
from octavo.runtime.sampling.processors import Processor
from octavo.runtime.sampling.rows import Batch

T = TypeVar("T")


class MoveDirectionality(Enum):
    """How a request moves from index a to index b."""

    UNIDIRECTIONAL = auto()
    """What was at b is gone."""
    SWAP = auto()
    """What was at b is at a now. octavo never does so."""


@dataclass(frozen=True, slots=True)
class BatchUpdate:
    """What has changed since the last step, in this order: removed, added, moved."""

    batch_size: int
    """Requests now; their indices are 0 … batch_size - 1."""
    removed: Sequence[int]
    added: Sequence[tuple[int, SamplingParams, list[int] | None, list[int]]]
    """(index, parameters, prompt, output); the output grows by itself. What had the index before is gone."""
    moved: Sequence[tuple[int, int, MoveDirectionality]]
    """(from, to, how)."""


class LogitsProcessor(ABC):
    """What users fill in. An exception in it ends the requests of the step."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError for a request that it cannot serve."""

    @abstractmethod
    def __init__(self, vllm_config: "Configs", device: torch.device, is_pin_memory: bool) -> None:
        """Set the processor up. is_pin_memory: whether copies to the device may be asynchronous."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Take in, before each step, what has changed; None: nothing but the outputs."""

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Change logits, [batch_size, vocab_size] float32, in place or not, and return them."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Return True if the greedy token stays the same. octavo applies the processor in any case."""


class Configs(NamedTuple):
    """The engine's configuration under vLLM's names for its parts."""

    model_config: ModelConfig
    cache_config: CacheConfig
    parallel_config: ParallelConfig
    scheduler_config: SchedulerConfig

    @classmethod
    def of(cls, config: EngineConfig) -> "Configs":
        """Return those of an engine."""
        return cls(config.model, config.cache, config.parallel, config.scheduler)


Make = Callable[[torch.device, bool], T]
"""(device, is_pin_memory) → a user's processor: its class, given the configuration."""


class BatchProcessor(Processor):
    """Gives every request an index, without gaps, and hands a user's processor the rows in that order."""

    def __init__(
        self, make: Make[LogitsProcessor], vocab_size: int, num_rows: int, device: torch.device
    ) -> None:
        super().__init__(vocab_size, num_rows, device)
        self._processor = make(device, False)
        self._rows: list[int | None] = []
        """By index; None: the request has gone, which the processor does not know yet."""
        self._indices: dict[int, int] = {}
        """By row."""
        self._new: dict[int, NewRequest] = {}
        """By row: requests that the processor does not know yet."""
        self._outputs: dict[int, list[int]] = {}
        """By row."""

    def is_active(self, params: SamplingParams) -> bool:
        """Return True: only the processor knows which requests are its own."""
        return True

    def add(self, row: int, request: NewRequest) -> None:
        self._new[row] = request
        self._outputs[row] = request.token_ids[request.num_prompt_tokens :]

    def remove(self, row: int) -> None:
        """Let it leave at the next step, if it was ever known."""
        if self._new.pop(row, None) is None:
            self._rows[self._indices.pop(row)] = None
        del self._outputs[row]

    def apply(self, logits: torch.Tensor, batch: Batch) -> None:
        """Tell what has changed, then let it work on the rows by index. Raises TypeError for a wrong one."""
        self._processor.update_state(self._update())
        logit_rows = torch.from_numpy(batch.logit_rows).to(self.device)
        indices = torch.tensor([self._indices[row] for row in batch.rows.tolist()], device=self.device)
        by_index = logits.new_zeros(len(self._rows), self.vocab_size)
        by_index[indices] = logits[logit_rows]
        changed = self._processor.apply(by_index)
        if not isinstance(changed, torch.Tensor) or changed.shape != by_index.shape:
            raise TypeError(f"apply must return logits of shape {tuple(by_index.shape)}")
        logits[logit_rows] = changed[indices]

    def observe(self, batch: Batch, token_ids: torch.Tensor) -> None:
        """Lengthen the outputs, which the processor holds too."""
        for row, token_id in zip(batch.rows.tolist(), token_ids.tolist(), strict=True):
            self._outputs[row].append(token_id)

    def _update(self) -> BatchUpdate | None:
        """Give new requests the indices of those that left; fill gaps that stay from the end."""
        gaps = [index for index, row in enumerate(self._rows) if row is None]
        if not gaps and not self._new:
            return None
        added = [self._enter(row, request, gaps) for row, request in self._new.items()]
        self._new.clear()
        moved = []
        for gap in gaps:
            while self._rows and self._rows[-1] is None:
                self._rows.pop()
            if gap >= len(self._rows):
                break
            last = self._rows.pop()
            assert last is not None
            moved.append((len(self._rows), gap, MoveDirectionality.UNIDIRECTIONAL))
            self._rows[gap] = last
            self._indices[last] = gap
        return BatchUpdate(len(self._rows), tuple(gaps), added, moved)

    def _enter(
        self, row: int, request: NewRequest, gaps: list[int]
    ) -> tuple[int, SamplingParams, list[int], list[int]]:
        index = gaps.pop(0) if gaps else len(self._rows)
        if index == len(self._rows):
            self._rows.append(row)
        else:
            self._rows[index] = row
        self._indices[row] = index
        return index, request.sampling, request.prompt_ids, self._outputs[row]


def process_dict_updates(
    entries: dict[int, T],
    update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], T | None],
) -> bool:
    """Bring `entries`, by index, up to date: vLLM's helper for processors that keep one thing per request.

    new_state: what to keep of a request, None = nothing. Returns whether anything changed.
    """
    if update is None:
        return False
    before = dict(entries)
    for index in update.removed:
        entries.pop(index, None)
    for index, params, prompt, output in update.added:
        entries.pop(index, None)
        if (state := new_state(params, prompt, output)) is not None:
            entries[index] = state
    for source, target, how in update.moved:
        moving, replaced = entries.pop(source, None), entries.pop(target, None)
        if moving is not None:
            entries[target] = moving
        if how is MoveDirectionality.SWAP and replaced is not None:
            entries[source] = replaced
    return entries != before
