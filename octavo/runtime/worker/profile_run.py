"""The profile run computes the largest steps on nothing: it measures their memory, and loads their kernels.

Called by the worker between loading and planning the cache. Keys and values are stored nowhere; what is read
instead of them is one block of zeros.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import torch

from octavo.config.engine import EngineConfig
from octavo.messages.kv import CachePlan, KVCacheGroup
from octavo.messages.request import RequestSpec
from octavo.messages.sampling import SamplingParams
from octavo.messages.step import NewRequest
from octavo.runtime.batch import ForwardBatch, GroupTables
from octavo.runtime.lora.sites import Reach
from octavo.runtime.models.interface import Model
from octavo.runtime.platforms.platform import Platform
from octavo.runtime.sampling.sampler import Sampler
from octavo.runtime.speculative.drafter import Drafter
from octavo.runtime.worker.encoder_graphs import encode_sample
from octavo.runtime.worker.kv_tensors import KVTensors, group_layers, of_stage

_PRIME = 7919
_HARD_TO_SAMPLE = SamplingParams(temperature=1.0, top_k=2, top_p=0.5, min_p=0.1)


class Workspace(NamedTuple):
    """Counts the bytes that steps need beside weights and cache."""

    largest_step: int
    cuda_graphs: int
    """Which keep memory of their own."""
    tables: int
    """Of the batch: what requests have said so far."""
    adapters: int
    """In the slots of a GPU."""
    media: int = 0
    """What an encoder made of images, in a GPU's memory, and its graphs."""


def cache_groups(model: Model, drafter: Drafter | None, block_size: int) -> list[KVCacheGroup]:
    """Return the groups of the cache with this stage's layers; in the last, the drafter's too."""
    drafts = drafter.kv_specs if drafter else model.draft_kv_specs
    specs = [*(model.kv_specs or [layer.kv_spec for layer in model.cache_layers]), *drafts]
    own = model.own_kv_specs
    if own and model.has_logits:
        own = range(own.start, len(specs))
    return of_stage(group_layers(specs, block_size), own)


def measure(model: Model, config: EngineConfig, platform: Platform) -> Workspace:
    """Compute the largest step, and the largest that is only decoding."""
    requests, tokens = config.scheduler.max_num_rows, config.scheduler.max_num_batched_tokens
    each = min(-(-tokens // requests), config.model.max_model_len)
    largest = platform.peak_bytes(lambda: _run_largest(model, config, platform, requests, each))
    decoding = platform.peak_bytes(lambda: _run_largest(model, config, platform, requests, 1))
    token_ids = 8 * (requests + 1) * (config.model.max_model_len + 1)
    sites = None if model.adapters is None or config.parallel.device == "cpu" else model.adapters.sites
    graphs = 0 if config.parallel.enforce_eager else decoding
    media, encoder = 0, model.media_encoder
    if encoder is not None and config.parallel.device != "cpu":
        media = int(config.media.mm_encoder_cache_gb * 2**30)
        encoding = platform.peak_bytes(lambda: encode_sample(encoder, platform.device))
        largest, media = max(largest, encoding), media + (encoding if graphs else 0)
    return Workspace(largest, graphs, token_ids, 0 if sites is None else sites.num_bytes, media)


@torch.inference_mode()
def _run_largest(model: Model, config: EngineConfig, platform: Platform, requests: int, each: int) -> None:
    """Compute `each` tokens of `requests` requests, and sample in the way that needs most memory."""
    with _adapted(model, requests * each):
        hidden = model.forward(_batch(model, config, platform.device, requests, each))
    if config.pooling is not None or not model.has_logits:
        return
    logits = model.logits(hidden[each - 1 :: each])
    if logits.is_meta:
        return  # there is nothing to choose from
    kernels = platform.kernels.sampling
    sampler = Sampler(config.checkpoint.vocab_size, requests, platform.device, kernels)
    for row in range(requests):
        sampler.add(row, NewRequest("", [0], 1, RequestSpec(_HARD_TO_SAMPLE, seed=0)))
    sampler.sample(logits, np.arange(requests), np.zeros(requests, np.int64)).to_host()


def _adapted(model: Model, num_tokens: int) -> AbstractContextManager[None]:
    """Let all products of a step be changed, by adapters of which there are none yet."""
    if model.adapters is None:
        return nullcontext()
    adapters = model.adapters.sites.slots
    slots = torch.zeros(num_tokens, dtype=torch.int32, device=adapters.device)
    context: AbstractContextManager[None] = adapters.recording(Reach.EXPERTS, slots)
    return context


def one_prompt(model: Model, config: EngineConfig, device: torch.device, num_tokens: int) -> ForwardBatch:
    """Return a prompt of at most so many tokens from all over the vocabulary, with a cache of its own."""
    num_tokens = min(num_tokens, config.scheduler.max_num_batched_tokens, config.model.max_model_len)
    batch = _batch(model, config, device, 1, num_tokens, num_blocks=num_tokens)
    batch.input_ids = torch.arange(num_tokens, device=device) * _PRIME % config.checkpoint.vocab_size
    for tables in batch.groups:
        width = min(tables.block_tables.shape[1], num_tokens)
        tables.block_tables[0, :width] = torch.arange(width)
        tables.slots.copy_(batch.positions)
    return batch


def _batch(
    model: Model, config: EngineConfig, device: torch.device, requests: int, each: int, num_blocks: int = 1
) -> ForwardBatch:
    block_size = config.cache.block_size
    max_blocks = -(-(config.model.max_model_len + 1) // block_size)  # as wide as the tables of real steps
    tables = torch.zeros((requests, max_blocks), dtype=torch.int32, device=device)
    positions = torch.arange(each, device=device).repeat(requests)
    groups = group_layers([layer.kv_spec for layer in model.cache_layers], block_size)
    cache = KVTensors(CachePlan(groups, num_blocks, block_size), device)
    return ForwardBatch(
        input_ids=torch.zeros_like(positions),
        positions=positions,
        cu_q_lens=torch.arange(requests + 1, dtype=torch.int32, device=device) * each,
        kv_lens=torch.full((requests,), each, dtype=torch.int32, device=device),
        kv_caches=cache.by_layer,
        groups=[GroupTables(tables, slots=torch.full_like(positions, -1))] * len(groups),
        group_of_layer=cache.group_of_layer,
        longest_q=each,
        source_lens=torch.ones(requests, dtype=torch.int32, device=device),
    )
