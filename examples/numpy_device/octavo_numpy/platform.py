"""The platform: where tensors live, how much memory there is, which kernels compute."""

from dataclasses import replace
from pathlib import Path

import torch

from octavo.base.free_memory import free_bytes
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.kernels.table import KernelTable
from octavo.runtime.platforms.platform import Platform
from octavo_numpy import kernels

_MOST_CACHE_BYTES = 1 << 30


class NumpyPlatform(Platform):
    """Tensors live in host memory, as torch's; numpy reads and writes the same bytes."""

    def __init__(self, number: int, threads: int, snapshot: Path | None = None) -> None:
        torch.set_num_threads(threads)
        super().__init__(torch.device("cpu"), numpy_table())

    def available_memory_bytes(self, share: float) -> int:
        return min(int(share * free_bytes()), _MOST_CACHE_BYTES)

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32


def numpy_table() -> KernelTable:
    """numpy's products, norms, activations and attention; the rest stays the reference's, in torch."""
    table = ref_table()
    return replace(
        table,
        name="numpy",
        attention=replace(table.attention, paged_attention=kernels.paged_attention),
        norms=replace(table.norms, rms_norm=kernels.rms_norm, add_norm=kernels.add_norm, sandwich_norm=None),
        activate=kernels.activate,
        linear=replace(
            table.linear,
            matmul=kernels.matmul,
            gated_matmul=kernels.gated_matmul,
            block_matmul=kernels.block_matmul,
            arrange=kernels.unpacked,
        ),
    )
