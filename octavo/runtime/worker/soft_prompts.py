"""`SoftPromptsPart` puts what was learned in the place of a prompt's virtual tokens."""

from collections.abc import Callable
from functools import partial

import torch

from octavo.base.errors import RequestError
from octavo.base.lru import LRU
from octavo.config.engine import EngineConfig
from octavo.messages.adapters import SoftPromptRef
from octavo.messages.step import NewRequest
from octavo.runtime.attention.shared_context import own_slots
from octavo.runtime.batch import ForwardBatch, GivenEmbeds
from octavo.runtime.distributed.context import ParallelContext
from octavo.runtime.kernels.attention import HeadInputs, StoreKV
from octavo.runtime.loader.loader import dtype_of
from octavo.runtime.lora.pool import AdapterPool
from octavo.runtime.lora.soft_prompts import SoftPrompt, SoftPromptReader
from octavo.runtime.models.interface import Model
from octavo.runtime.platforms.platform import Platform
from octavo.runtime.worker.prepare import Work
from octavo.runtime.worker.step_part import FalliblePart

_ON_DEVICE = 64
"""Soft prompts that are kept there for the requests to come."""


class SoftPromptsPart(FalliblePart):
    """Takes part in the steps that compute virtual tokens.

    Embeddings are computed with. Keys and values are stored before the model runs, and nothing that it
    computes for their tokens is kept.
    """

    def __init__(
        self,
        pool: AdapterPool[SoftPromptRef, SoftPrompt],
        store_kv: StoreKV,
        device: torch.device,
        own_slots: Callable[[int, torch.Tensor, int], torch.Tensor],
        broken_width: int = 0,
    ) -> None:
        """own_slots: where this rank keeps the tokens of slots, by the layer and the size of its blocks

        broken_width: embedding_size on ranks whose reads may fail alone, which NaN tells the one that answers
        """
        super().__init__()
        self._broken_width, self._own_slots = broken_width, own_slots
        self.pool, self._store_kv, self._device = pool, store_kv, device
        self._kept: LRU[bytes, SoftPrompt] = LRU(_ON_DEVICE)
        self._due: list[tuple[int, SoftPrompt]] = []
        """Requests of this step, by their place, and their prompts."""

    def read(self, request: NewRequest) -> SoftPrompt | None:
        if (ref := request.spec.soft_prompt) is None:
            return None
        if (kept := self._kept.get(ref.key)) is not None:
            return kept
        try:
            prompt = self.pool.get(ref).on(self._device)
        except (RequestError, OSError, RuntimeError) as error:
            self.fail(request, f"Loading prompt adapter {ref.name} failed: {error}")
            if not self._broken_width:
                return None
            return SoftPrompt(
                torch.full((ref.num_tokens, self._broken_width), torch.nan, device=self._device)
            )
        self._kept.put(ref.key, prompt, 1)
        return prompt

    @property
    def is_idle(self) -> bool:
        return not (self._due or self.has_failed)

    def begin(self, work: Work) -> None:
        self._due = []
        for index, row in enumerate(work.rows.tolist() if self._wanted else ()):
            prompt = self._wanted.get(row)
            if prompt is not None and work.computed[index] < _length(prompt):
                self._due.append((index, prompt))

    def before(self, work: Work, batch: ForwardBatch) -> None:
        """Give the batch the part of them that this step computes."""
        rows, values, stored = [], [], []
        for index, prompt in self._due:
            first, start = int(work.computed[index]), int(work.starts[index])
            count = min(int(work.ends[index]), _length(prompt)) - first
            places = torch.arange(start, start + count, device=self._device)
            if prompt.embeds is not None:
                rows.append(places)
                values.append(prompt.embeds[first : first + count])
            else:
                self._store(prompt, first, places, batch)
                stored.append(places)
        if rows:
            given = batch.given_embeds
            others = ([], []) if given is None else ([given.rows], [given.values])
            batch.given_embeds = GivenEmbeds(torch.cat([*others[0], *rows]), torch.cat([*others[1], *values]))
        for places in stored:
            for group in batch.groups:
                group.slots[places] = -1

    def _store(self, prompt: SoftPrompt, first: int, places: torch.Tensor, batch: ForwardBatch) -> None:
        """Store the keys and values of virtual tokens from `first` on, whose places in the step these are."""
        for layer, heads in enumerate(prompt.heads or ()):
            keys, values = heads[:, first : first + len(places)].unbind()
            cache = batch.kv_caches[layer]
            slots = self._own_slots(layer, batch.tables(layer).slots[places], cache.shape[2])
            self._store_kv(HeadInputs(keys.clone(), keys.clone(), values), cache, slots)


def _length(prompt: SoftPrompt) -> int:
    if prompt.embeds is not None:
        return len(prompt.embeds)
    assert prompt.heads
    return prompt.heads[0].shape[1]


def make_soft_prompts(
    config: EngineConfig, model: Model, platform: Platform, parallel: ParallelContext
) -> SoftPromptsPart | None:
    """Return what gives requests their learned prompts, if there may be some."""
    if not config.lora.enable_prompt_adapter or config.pooling is not None:
        return None
    width = config.checkpoint.embedding_size
    specs = model.kv_specs or [layer.kv_spec for layer in model.cache_layers]
    dtype = platform.compute_dtype(dtype_of(config.model.dtype))
    reader = SoftPromptReader(width, specs, model.own_kv_specs, dtype, parallel.tp)
    pool = AdapterPool(SoftPromptRef, reader.read, config.lora.max_prompt_adapters)
    divided = partial(own_slots, parallel.dcp, config.parallel.cp_kv_cache_interleave_size)
    layers = [layer.kv_spec for layer in model.cache_layers]

    def own(layer: int, slots: torch.Tensor, block_size: int) -> torch.Tensor:
        return slots if layers[layer].sliding_window else divided(slots, block_size)

    given = pool, platform.kernels.attention.store_kv, platform.device, own
    return SoftPromptsPart(*given, 0 if parallel.answers else width)
