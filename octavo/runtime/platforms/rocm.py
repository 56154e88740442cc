"""AMD's GPUs: torch's HIP builds answer by the names of CUDA, and Triton compiles the same kernels for them.

Never run on such a GPU: tests compile every kernel for gfx90a, gfx942 and gfx1100 (docs/platforms.md).
"""

from dataclasses import replace
from pathlib import Path

import torch

from octavo.base.cards import Card, amd_card
from octavo.base.errors import ConfigError
from octavo.runtime.kernels.table import KernelTable
from octavo.runtime.platforms.cuda import CUDAPlatform


class ROCmPlatform(CUDAPlatform):
    """Describes one GPU. Graphs, memory and copies are torch's, as on NVIDIA's."""

    def __init__(self, number: int, threads: int, snapshot: Path | None = None) -> None:
        """Make GPU `number` current. Raises ConfigError without a torch for ROCm that sees it."""
        if torch.version.hip is None or number >= torch.cuda.device_count():
            raise ConfigError(
                f"device='rocm:{number}': torch {torch.__version__} sees no such GPU; use device='cpu', or a "
                "torch for ROCm."
            )
        super().__init__(number, threads, snapshot)

    def _find_card(self, device: torch.device) -> Card:
        return amd_card(torch.cuda.get_device_properties(device).gcnArchName)

    def _kernels(self) -> KernelTable:
        """Return the same kernels; sums over ranks are RCCL's: ours speak NVIDIA's assembler."""
        return replace(super()._kernels(), peers=None)
