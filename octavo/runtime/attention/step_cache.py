"""`StepCache` holds keys and values while a layer attends whose tokens all see each other.

Such layers keep nothing between steps, and take turns in one piece of memory. It has the form of the paged
cache, so the kernels for that serve both kinds of attention.
"""

import torch
from torch import Tensor

from octavo.messages.kv import KVCacheSpec
from octavo.runtime.batch import ForwardBatch, GroupTables
from octavo.runtime.kernels.cache_layout import CacheLayout

_BLOCK = 64


class StepCache:
    """Grows to the largest step."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def of_step(self, batch: ForwardBatch, spec: KVCacheSpec) -> tuple[Tensor, GroupTables]:
        """Return the memory as a layer's cache, and the places of the step's tokens, which layers share."""
        if batch.step_tables is None:
            batch.step_tables = _lay_out(batch)
        layout = CacheLayout(spec, _BLOCK)
        num_blocks = len(batch.positions) // _BLOCK + len(batch.kv_lens)
        size = num_blocks * layout.block_bytes
        if len(self._memory) < size:
            self._memory = torch.empty(size, dtype=torch.uint8, device=batch.positions.device)
        return layout.view(self._memory[:size].view(num_blocks, -1)), batch.step_tables


def _lay_out(batch: ForwardBatch) -> GroupTables:
    """Give each request blocks of its own, one after the other; without waiting for the device."""
    device = batch.positions.device
    num_blocks = (batch.kv_lens + (_BLOCK - 1)) // _BLOCK
    first = num_blocks.cumsum(0) - num_blocks
    columns = torch.arange(-(-batch.longest_q // _BLOCK), device=device)
    starts = (first * _BLOCK).repeat_interleave(batch.kv_lens.long(), output_size=len(batch.positions))
    return GroupTables((first[:, None] + columns).int(), starts + batch.positions)
