"""Keys and values of layers whose tokens all see each other: they last while a layer attends.

Such layers keep nothing between steps, and take turns in one piece of memory. It has the form of the paged
cache, so the kernels for that serve both kinds of attention.
"""

import torch
from torch import Tensor

from octavo.messages.kv import KVCacheSpec
from octavo.runtime.batch import ForwardBatch, StepTables
from octavo.runtime.kernels.cache_layout import CacheLayout

BLOCK = 64


def step_cache(batch: ForwardBatch, spec: KVCacheSpec) -> tuple[Tensor, StepTables]:
    """Return the step's memory as a layer's cache, and the places of its tokens, which layers share."""
    if (tables := batch.step_tables) is None:
        tables = batch.step_tables = lay_out(batch)
    layout = CacheLayout(spec, BLOCK)
    size = tables.num_blocks * layout.block_bytes
    if tables.memory is None or len(tables.memory) < size:
        tables.memory = torch.empty(size, dtype=torch.uint8, device=batch.positions.device)
    return layout.view(tables.memory[:size].view(tables.num_blocks, -1)), tables


def lay_out(batch: ForwardBatch) -> StepTables:
    """Give each request blocks of its own, one after the other; without waiting for the device."""
    device, num_tokens = batch.positions.device, len(batch.positions)
    num_blocks = (batch.kv_lens + (BLOCK - 1)) // BLOCK
    first = num_blocks.cumsum(0) - num_blocks
    columns = torch.arange(-(-batch.longest_q // BLOCK), device=device)
    starts = (first * BLOCK).repeat_interleave(batch.kv_lens.long(), output_size=num_tokens)
    most = num_tokens // BLOCK + len(batch.kv_lens)
    return StepTables((first[:, None] + columns).int(), starts + batch.positions, most)
