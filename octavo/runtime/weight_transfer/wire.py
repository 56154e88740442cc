"""What a trainer and an engine agree on: how tensors are described, what travels together, who meets where.

Tensors travel in buffers of bytes, each tensor at a multiple of 16 bytes; a buffer holds as many as make it
larger than the agreed size. The verbs and the fields of their bodies are vLLM's.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import Store

from octavo.base.errors import OctavoError, RequestError
from octavo.base.link import Place

BUFFER_BYTES = 256 << 20
TIMEOUT_S = 300.0
_ALIGNMENT = 16
_POLL_S = 0.0005
_FOREVER = timedelta(days=30)
"""For the libraries: time is kept here, because NCCL ends the process when its own is over."""


class TensorMeta(NamedTuple):
    """A tensor of a checkpoint, without its numbers."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Return the bytes that it takes in a buffer."""
        size = prod(self.shape) * self.dtype.itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT


def describe(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the fields of an update that tell which tensors come, in which order."""
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def read_description(update_info: Mapping[str, Any]) -> list[TensorMeta]:
    """Return what `describe` told. Raises RequestError."""
    names, dtypes, shapes = (update_info.get(key) for key in ("names", "dtype_names", "shapes"))
    if not isinstance(names, list) or not isinstance(dtypes, list) or not isinstance(shapes, list):
        raise RequestError("update_info needs the lists names, dtype_names and shapes.", "update_info")
    for key, given in (("dtype_names", dtypes), ("shapes", shapes)):
        if len(given) != len(names):
            raise RequestError(
                f"`{key}` should be of the same size as `names`: got {len(given)} and {len(names)}", key
            )
    found = [getattr(torch, name, None) if isinstance(name, str) else None for name in dtypes]
    if wrong := [
        name for name, dtype in zip(dtypes, found, strict=True) if not isinstance(dtype, torch.dtype)
    ]:
        raise RequestError(f"dtype_names: {wrong[0]!r:.50} is no type of torch's.", "dtype_names")
    for shape in shapes:
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise RequestError(f"shapes: {shape!r:.50} is not a list of sizes.", "shapes")
    rows = zip(names, found, shapes, strict=True)
    return [TensorMeta(str(name), cast(torch.dtype, dtype), tuple(shape)) for name, dtype, shape in rows]


def buffers(metas: list[TensorMeta], most_bytes: int) -> Iterator[list[TensorMeta]]:
    """Yield what travels in each buffer: tensors until there are more than `most_bytes`."""
    filling: list[TensorMeta] = []
    for meta in metas:
        filling.append(meta)
        if sum(entry.num_bytes for entry in filling) > most_bytes:
            yield filling
            filling = []
    if filling:
        yield filling


def empty_buffer(metas: list[TensorMeta], device: torch.device) -> Tensor:
    """Return room for these tensors: [bytes] uint8."""
    return torch.empty(sum(meta.num_bytes for meta in metas), dtype=torch.uint8, device=device)


def views(buffer: Tensor, metas: list[TensorMeta]) -> Iterator[tuple[TensorMeta, Tensor]]:
    """Yield each tensor's place in a buffer."""
    start = 0
    for meta in metas:
        size = prod(meta.shape) * meta.dtype.itemsize
        yield meta, buffer[start : start + size].view(meta.dtype).view(meta.shape)
        start += meta.num_bytes


class TransferGroup:
    """The trainer, which is rank 0, and the ranks of the engine: NCCL on GPUs, gloo on CPUs."""

    def __init__(
        self, address: str, port: int, world_size: int, device: torch.device, first_rank: int = 0
    ) -> None:
        """Meet the others. Raises OctavoError when not all come in time.

        first_rank: the lowest of the engine's, whose ranks take one after the other; 0 = the trainer
        """
        self._device = device
        try:
            timeout = timedelta(seconds=TIMEOUT_S)
            store: Store = distributed.TCPStore(  # type: ignore[attr-defined]  # it is public
                address, port, is_master=not first_rank, timeout=timeout, wait_for_workers=False
            )
            rank = first_rank + store.add(f"from {first_rank}", 1) - 1 if first_rank else 0
            if not rank < world_size:
                raise OctavoError(f"There are more ranks than world_size={world_size} says.")
            self._group = _make_group(store, rank, world_size, device, address, port)
            self._store = store
        except (RuntimeError, ValueError) as error:
            raise OctavoError(f"{address}:{port}: the ranks did not meet: {error}") from error

    def broadcast(self, buffer: Tensor, has_failed: Callable[[], bool] = lambda: False) -> None:
        """Send the trainer's buffer to all, or receive it. Raises OctavoError when it does not come in time.

        has_failed: asked while nothing comes
        """
        try:
            work = self._group.broadcast(buffer, 0)
            began_s = time.monotonic()
            while not work.is_completed():
                if has_failed() or time.monotonic() - began_s > TIMEOUT_S:
                    self._group.abort()
                    raise OctavoError("The transfer of weights stands still; it has been given up.")
                time.sleep(_POLL_S)
            work.wait()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            raise OctavoError(f"The transfer of weights failed: {error}") from error


def _make_group(store: Store, rank: int, size: int, device: torch.device, address: str, port: int) -> Any:
    """Return a group beside torch's own, which the ranks of a replica may use for themselves."""
    if device.type == "cuda":
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = _FOREVER
        return distributed.ProcessGroupNCCL(store, rank, size, options)
    gloo: Any = distributed.ProcessGroupGloo  # its options have no stubs
    own = gloo._Options()
    own._timeout = timedelta(seconds=TIMEOUT_S)
    own._devices = [gloo.create_device(hostname=Place(address, port, "", 0.0).resolved().own_address())]
    return gloo(store, rank, size, own)
