"""An `Arena` is memory for the weights of one model. On a CPU it lies in large pages.

Every token reads all weights. With pages of 4 KiB looking up where they are takes a quarter of that time.
"""

import math
import mmap

import torch
from torch import Tensor

from octavo.base.pages import zero_pages

_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 64


class Arena:
    """Lays small matrices side by side: a large page holds several. Memory goes with its tensors."""

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a contiguous tensor, not yet written. On other devices than the CPU, torch allocates it."""
        count = math.prod(shape)
        if device.type != "cpu" or not count:
            return torch.empty(shape, dtype=dtype, device=device)
        pages, offset = self._take(count * dtype.itemsize)
        return torch.frombuffer(pages, dtype=dtype, count=count, offset=offset).view(shape)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy."""
        return self.empty(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)

    def _take(self, num_bytes: int) -> tuple[mmap.mmap, int]:
        if num_bytes >= _CHUNK_BYTES:
            return zero_pages(num_bytes), 0
        if self._chunk is None or self._used + num_bytes > _CHUNK_BYTES:
            self._chunk, self._used = zero_pages(_CHUNK_BYTES), 0
        offset = self._used
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return self._chunk, offset
