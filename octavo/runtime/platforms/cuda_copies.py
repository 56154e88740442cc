"""A `CUDACopyLane` copies from page-locked host memory on a stream of its own.

Made by the platform, used by loader/host_weights.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.base.errors import ConfigError
from octavo.base.log import get_logger
from octavo.runtime.platforms.platform import CopyLane

_log = get_logger(__name__)


class CUDACopyLane(CopyLane):
    """Orders copies against the current stream by events, which a CUDA graph keeps as edges."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._memory: list[Tensor] = []
        weakref.finalize(self, _unlock, self._memory)

    def host_memory(self, num_bytes: int) -> Tensor:
        """Lock memory in place: torch's own page-locked memory comes in powers of two."""
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        error = _runtime().cudaHostRegister(memory.data_ptr(), num_bytes, 0)
        if int(error) != 0:
            _log.error("cudaHostRegister: %s", error)
            raise ConfigError(
                f"The driver cannot lock {num_bytes / 2**30:.3g} GiB of host memory for weights. Lower "
                "cpu_offload_gb (or offload_num_in_group), or raise the limits of this process (ulimit -l)."
            )
        self._memory.append(memory)
        return memory

    def copy(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """See CopyLane."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        arrival = self._stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(arrival)


def _unlock(memory: list[Tensor]) -> None:
    while memory:
        _runtime().cudaHostUnregister(memory.pop().data_ptr())


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
