"""A CPU computes in float32, by compiled kernels where a compiler exists; cgroups bound its memory."""

import ctypes
from pathlib import Path

import torch

from octavo.base.free_memory import free_bytes
from octavo.runtime.kernels.build import chosen_level
from octavo.runtime.kernels.cpu.table import cpu_table
from octavo.runtime.platforms.platform import Platform

__all__ = ["CPUPlatform", "free_bytes"]


class CPUPlatform(Platform):
    """Describes this process's share of the machine."""

    is_batch_invariant = True

    def __init__(self, number: int, threads: int, snapshot: Path | None = None) -> None:
        """Give our kernels `threads` threads, and torch one; or torch all, where it computes in their place.

        Threads of torch (OpenMP's) spin for milliseconds behind every operation that they shared, however
        small, on the cores that our kernels want next: a decoding step took half as long again.
        """
        super().__init__(torch.device("cpu"), cpu_table(threads, snapshot))
        torch.set_num_threads(threads if self.kernels.name == "ref" else 1)
        # glibc keeps what a step frees for the next: to map it anew takes a sixth of the time of long steps.
        if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
            mallopt(-3, 1 << 25)  # M_MMAP_THRESHOLD: most bytes of an allocation that is kept
            mallopt(-1, 1 << 28)  # M_TRIM_THRESHOLD: most bytes in all

    @property
    def machine(self) -> str:
        level, _ = chosen_level()
        return f"a CPU with {level}" if self.kernels.name == "cpu" else "a CPU without compiled kernels"

    def available_memory_bytes(self, share: float) -> int:
        return int(share * free_bytes())

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return float32 always: 16-bit weights are widened inside the kernels."""
        return torch.float32
