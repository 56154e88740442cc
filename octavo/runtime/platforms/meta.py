"""The meta device has tensors with shapes and types, without bytes. It serves to plan memory.

Made by worker/memory_forecast. What a step takes is counted as torch's operations make and drop tensors.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from octavo.runtime import late_modules
from octavo.runtime.dispatch_mode import DispatchMode
from octavo.runtime.kernels.shapes import shape_table
from octavo.runtime.platforms.platform import Platform


class MetaPlatform(Platform):
    """Describes torch's device "meta"."""

    def __init__(self, compute_dtype: torch.dtype) -> None:
        """Stand in for a device. compute_dtype: of activations"""
        late_modules.run_late_modules()  # some are kernels of this device
        super().__init__(torch.device("meta"), shape_table(compute_dtype))
        self._compute_dtype = compute_dtype

    def available_memory_bytes(self, share: float) -> int:
        """Return 0: the device does not exist."""
        return 0

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """Run the work on tensors without bytes, and count what it would take."""
        count = _Count()
        with count:
            work()
        return count.peak

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._compute_dtype


class _Count(DispatchMode):
    """Counts the bytes of living tensors, of those made while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._living: Any = WeakIdKeyDictionary()
        """Bytes by storage: several tensors may look at one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor) and value.is_meta:
                storage = value.untyped_storage()
                self._living[storage] = storage.nbytes()
        self.peak = max(self.peak, sum(self._living.values()))
        return result
