"""Devices that compute by torch's own operations: Intel GPUs (xpu) and Apple's (mps). Untested there.

The reference kernels serve them, in torch; so does any device whose torch backend has the usual module
(`torch.xpu`, `torch.mps`). Steps are not captured.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from octavo.base.errors import ConfigError
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.kernels.sampling import SamplingKernels
from octavo.runtime.platforms.platform import Platform


class TorchPlatform(Platform):
    """Describes one device of torch's backend `kind`."""

    kind: ClassVar[str]

    def __init__(self, number: int, threads: int, snapshot: Path | None = None) -> None:
        """Make the device current. Raises ConfigError when torch has no such device."""
        self._module: Any = getattr(torch, self.kind, None)
        count = 0 if self._module is None or not self._module.is_available() else self._module.device_count()
        if number >= count:
            raise ConfigError(
                f"device='{self.kind}:{number}': torch {torch.__version__} sees {count} such devices here; "
                "use device='cpu', or a torch that is made for it."
            )
        torch.set_num_threads(threads)
        super().__init__(torch.device(self.kind, number), ref_table())

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype


class XPUPlatform(TorchPlatform):
    """Describes one Intel GPU."""

    kind = "xpu"

    def available_memory_bytes(self, share: float) -> int:
        """Return what is missing to `share` of the device, counting all memory in use now, by any process."""
        self._module.empty_cache()
        free, total = self._module.mem_get_info(self.device)
        used: int = total - free
        return int(total * share) - used


class MPSPlatform(TorchPlatform):
    """Describes Apple's GPU, which shares the machine's memory and has no float64: the CPU chooses tokens."""

    kind = "mps"

    def __init__(self, number: int, threads: int, snapshot: Path | None = None) -> None:
        super().__init__(number, threads, snapshot)
        self.kernels = replace(self.kernels, sampling=sampling_on_host(self.kernels.sampling))

    def available_memory_bytes(self, share: float) -> int:
        """Return what is missing to `share` of what Metal recommends as the most."""
        self._module.empty_cache()
        used: int = self._module.driver_allocated_memory()
        return int(share * self._module.recommended_max_memory()) - used


def sampling_on_host(kernels: SamplingKernels) -> SamplingKernels:
    """Return kernels whose float64 is computed in host memory, and float32 on the device."""
    return replace(
        kernels,
        choose=_on_host(kernels.choose),
        row_limits=_on_host(kernels.row_limits),
        score=_on_host(kernels.score),
        limits_dtype=np.float32,
    )


_BELOW_ONE = 1 - 2.0**-24
"""The largest float32 that noise, in [0, 1), may be rounded to."""


def _on_host(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        device = next(leaf.device for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor))
        made = kernel(*tree_map_only(Tensor, lambda tensor: _widened(tensor.cpu()), arguments))
        return tree_map_only(Tensor, lambda tensor: _narrowed(tensor).to(device), made)

    return run


def _widened(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype == torch.float32 else tensor


def _narrowed(tensor: Tensor) -> Tensor:
    if tensor.dtype != torch.float64:
        return tensor
    narrow = tensor.float()
    return torch.where((narrow == 1) & (tensor < 1), _BELOW_ONE, narrow)
