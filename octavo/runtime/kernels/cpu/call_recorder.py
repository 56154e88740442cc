"""Records what work asks of the compiled kernels, so that one call of C repeats all of it.

Part of the table of CPU kernels. While work is recorded nothing is computed: calls of the library are noted,
and new tensors come out of memory that all recordings share, because they never run at the same time. Sums,
products and ReLUs of rows that torch computes between the calls become calls, too, with the same results (but
for subnormal numbers, which are zero to the library). Work that computes more with torch is refused.
"""

import weakref
from bisect import insort
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from octavo.base.log import get_logger
from octavo.base.pages import zero_pages
from octavo.runtime.dispatch_mode import DispatchMode
from octavo.runtime.kernels.cpu.arguments import rows_of
from octavo.runtime.kernels.cpu.library import CallLog, Library

logger = get_logger(__name__)

_BYTES = 256 << 20
_ALIGNMENT = 64
T = TypeVar("T")
_ALLOCATIONS = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"}
_COMBINATIONS = {"aten::add": 0, "aten::mul": 1, "aten::relu": 2}
"""Those that octavo_combine makes, by its numbers."""


class CallRecorder:
    """Makes recordings that share memory. Only pages that are used take any."""

    def __init__(self, library: Library, threads: int) -> None:
        self._library, self._threads = library, threads
        self._memory = new_memory()

    def record(self, work: Callable[..., T], *lengths: tuple[int, int]) -> Callable[..., T] | None:
        """See steps.RecordCalls; a line in the log says why work is refused."""
        try:
            runs = [self._log(work, *values) for values in (zip(*lengths, strict=True) if lengths else [()])]
            log, made = runs[-1]
            places = log.places(runs[0][0], lengths) if lengths else []
            if places is None:
                raise Refused("kernels take numbers that are made of lengths")
        except Refused as reason:
            logger.info("Steps like this one are computed call by call: %s.", reason)
            return None
        words = np.frombuffer(log.words, np.int64)

        def replay(*values: int) -> T:
            for where, value in zip(places, values, strict=True):
                words[where] = value
            self._library.replay(log)
            return made

        return replay

    def _log(self, work: Callable[..., T], *values: int) -> tuple[CallLog, T]:
        log = self._library.call_log = CallLog()
        try:
            with _Recording(Arena(self._memory), self._combine):
                return log, work(*values)
        finally:
            self._library.call_log = None

    def _combine(self, made: Tensor, *arguments: float | None) -> None:
        self._library.octavo_combine(*arguments, *made.shape, made.data_ptr(), self._threads)


def new_memory() -> np.ndarray:
    """Return memory for an arena: of this process alone, and no more of it than is used."""
    return np.frombuffer(zero_pages(_BYTES), np.uint8)


class Refused(Exception):
    """Work computes outside the library, or needs more memory than there is."""


class Arena:
    """Memory for tensors, lowest place first. A piece is free again when no tensor sees it any more."""

    def __init__(self, memory: np.ndarray) -> None:
        self._memory = memory
        self._taken: list[tuple[int, int]] = []

    def like(self, tensor: Tensor) -> Tensor:
        """Return one of the same type and layout; `tensor` owns its storage. Raises Refused without room."""
        num_bytes = tensor.untyped_storage().nbytes()
        piece = self._take(num_bytes)
        flat = torch.from_numpy(piece).view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride())

    def _take(self, num_bytes: int) -> np.ndarray:
        size = -(-max(num_bytes, 1) // _ALIGNMENT) * _ALIGNMENT
        begin = 0
        for start, end in tuple(self._taken):  # a tensor may end on another thread meanwhile
            if start - begin >= size:
                break
            begin = end
        if begin + size > len(self._memory):
            raise Refused(f"more than {len(self._memory) >> 20} MiB of activations")
        taken = begin, begin + size
        insort(self._taken, taken)
        piece = self._memory[begin : begin + size]
        weakref.finalize(piece, self._taken.remove, taken)
        return piece


class _Recording(DispatchMode):
    """Lets work make views and empty tensors, combine rows, and nothing else."""

    def __init__(self, arena: Arena, combine: Callable[..., None]) -> None:
        """Take what notes a combination, a function of the library."""
        super().__init__()
        self._arena, self._combine = arena, combine

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        schema = func._schema
        if schema.name in _COMBINATIONS and not kwargs and (operands := _operands(schema.name, args)):
            self._combine(combined := self._arena.like(torch.empty(operands[0])), *operands[1])
            return combined
        made = func(*args, **(kwargs or {}))
        if schema.name in _ALLOCATIONS:
            return self._arena.like(made)
        seen = {_memory_of(arg) for arg in args if isinstance(arg, Tensor)}
        results = made if isinstance(made, tuple | list) else (made,)
        if schema.is_mutable or not all(isinstance(r, Tensor) and _memory_of(r) in seen for r in results):
            raise Refused(f"{schema.name} computes outside the library")
        return made


def _operands(name: str, args: tuple[Any, ...]) -> tuple[torch.Size, tuple[float | None, ...]] | None:
    """Return the shape of a sum or product of rows and rows, a vector or a number, or of a ReLU of rows, and
    what octavo_combine reads; None for others."""
    shapes = {arg.shape for arg in args if isinstance(arg, Tensor) and arg.dim() == 2}
    if len(shapes) != 1:
        return None
    (shape,), kind = shapes, _COMBINATIONS[name]
    x, other = _place(shape, args[0]), args[1] if len(args) > 1 else 0.0
    if x and kind and isinstance(other, int | float):
        return shape, (*x, None, 0, other, kind)
    rows = _place(shape, other)
    return (shape, (*x, *rows, 0.0, kind)) if x and rows else None


def _place(shape: torch.Size, part: Any) -> tuple[int, int] | None:
    """Return address and stride of rows of that shape, or of a vector that counts for all of them."""
    if not isinstance(part, Tensor) or part.dtype != torch.float32 or part.shape not in (shape, shape[1:]):
        return None
    return None if part.stride(-1) != 1 else rows_of(part) if part.dim() == 2 else (part.data_ptr(), 0)


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
