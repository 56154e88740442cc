"""`HostCopy`: a GPU's weights in host memory while the engine sleeps; it wakes up without reading files.

The tensors stay as they are. Only the memory behind them goes, and comes back elsewhere with the same bytes:
who knows addresses (captured steps) must be made anew. Weights do not change once they are loaded, so they
are copied once, into page-locked memory that is kept for the next sleep. vLLM's sleep level 1 does the same.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from octavo.base.free_memory import free_bytes
from octavo.runtime.loader.snapshot import loaded_tensors
from octavo.runtime.speculative.drafter import Drafter

_CHUNK_BYTES = 256 << 20
"""A power of two: torch rounds page-locked memory up to one."""
_SPARE_BYTES = 1 << 30
_THREADS = 8
"""Locking pages takes longer than copying."""


class HostCopy:
    """The weights of a model and its drafter. One device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.forget()

    def forget(self) -> None:
        """Let go of the weights: there will be others."""
        self._storages: list[tuple[torch.UntypedStorage, int]] = []
        """With their bytes."""
        self._chunks: list[Tensor] = []
        self.is_away = False
        """The device has no memory for the weights."""

    def give_up(self, model: nn.Module, drafter: Drafter | None) -> bool:
        """Free the device's memory; False, and nothing has changed, if the host has no room for a copy."""
        if not self._chunks and not self._copy(model, getattr(drafter, "model", None)):
            return False
        for storage, _ in self._storages:
            storage.resize_(0)
        self.is_away = True
        return True

    def bring_back(self) -> None:
        """Take memory for the weights again, and fill it."""
        for storage, size in self._storages:
            storage.resize_(size)
        for here, there in self._pieces():
            here.copy_(there, non_blocking=True)
        self._wait()
        self.is_away = False

    def _copy(self, *models: nn.Module | None) -> bool:
        found = (tensor for model in models if model is not None for tensor in loaded_tensors(model))
        storages = [tensor.untyped_storage() for tensor in found if tensor.device.type == self._device.type]
        known = {storage.data_ptr(): (storage, storage.nbytes()) for storage in storages if storage.nbytes()}
        num_bytes = sum(size for _, size in known.values())
        if num_bytes + _SPARE_BYTES > free_bytes():
            return False
        try:
            with ThreadPoolExecutor(_THREADS) as pool:
                chunks = list(pool.map(self._page_locked, range(-(-num_bytes // _CHUNK_BYTES))))
        except RuntimeError:  # of CUDA: there are limits beside memory
            return False
        self._storages, self._chunks = list(known.values()), chunks
        for here, there in self._pieces():
            there.copy_(here, non_blocking=True)
        self._wait()
        return True

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parts of the device's memory, each with its place in the chunks: [bytes] uint8."""
        place = 0
        for storage, size in self._storages:
            whole = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage, 0, (size,), (1,))
            start = 0
            while start < size:
                chunk, offset = divmod(place, _CHUNK_BYTES)
                length = min(size - start, _CHUNK_BYTES - offset)
                yield whole.narrow(0, start, length), self._chunks[chunk].narrow(0, offset, length)
                start, place = start + length, place + length

    def _page_locked(self, _: int) -> Tensor:
        return torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
