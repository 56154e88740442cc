"""Triton kernels serve an NVIDIA GPU; the references in torch do where Triton is not installed."""

import importlib.util
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.base import env
from octavo.base.cards import Card, nvidia_card
from octavo.base.errors import ConfigError
from octavo.base.log import get_logger
from octavo.config.checkpoint import GPU_KERNELS
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.kernels.table import KernelTable
from octavo.runtime.platforms.platform import Capture, CopyLane, Platform

logger = get_logger(__name__)


class CUDAPlatform(Platform):
    """Describes one GPU."""

    def __init__(self, number: int, threads: int, snapshot: Path | None = None) -> None:
        """Make GPU `number` current. Raises ConfigError when torch sees no such GPU, or an older kind."""
        if snapshot is not None:
            env.keep_gpu_kernels(snapshot / GPU_KERNELS)
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if number >= count:
            raise ConfigError(
                f"device='cuda:{number}': torch sees {count} GPUs here; use device='cpu', or a CUDA torch."
            )
        if _has_triton():
            threading.Thread(target=_make_triton_ready, daemon=True).start()
        torch.set_num_threads(threads)
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
        self.card = self._find_card(device)
        super().__init__(device, self._kernels())

    def _find_card(self, device: torch.device) -> Card:
        return nvidia_card(*torch.cuda.get_device_capability(device))

    def _kernels(self) -> KernelTable:
        if not _has_triton():
            logger.warning("The package triton is missing: slow torch code takes the place of GPU kernels.")
            return ref_table()
        from octavo.runtime.kernels.triton.table import cuda_table

        return cuda_table()

    def available_memory_bytes(self, share: float) -> int:
        """Return what is missing to `share` of the GPU, counting all memory in use now, by any process."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total * share) - (total - free)

    @property
    def machine(self) -> str:
        return f"{torch.cuda.get_device_name(self.device)}, kernels {self.kernels.name}"

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """Run the work and measure. Raises ConfigError if the GPU is too small even for that."""
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        try:
            work()
        except torch.OutOfMemoryError as error:
            logger.info("%s", error)
            free, total = torch.cuda.mem_get_info(self.device)
            raise ConfigError(
                f"The largest step does not fit into the GPU beside the weights: {free / 2**30:.3g} of "
                f"{total / 2**30:.3g} GiB are free. Lower max_num_batched_tokens or max_num_seqs."
            ) from error
        kept = torch.cuda.memory_allocated(self.device)  # by libraries, from their first use on
        return torch.cuda.max_memory_allocated(self.device) - max(before, kept)

    def compile_ahead(self, work: Callable[[], None], *, is_alone: bool) -> bool:
        """See Platform.compile_ahead; Triton's. What fails here, fails or succeeds where it is needed."""
        if not _has_triton():
            return False
        try:
            from octavo.runtime.kernels.triton.precompile import compile_ahead

            return compile_ahead(work, self.device, is_alone=is_alone)
        except Exception:
            logger.debug("Kernels are compiled one by one.", exc_info=True)
            return False

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type itself. Raises ConfigError for bfloat16 on a GPU without."""
        if dtype == torch.bfloat16 and not self.card.has_bfloat16:
            raise ConfigError(f"{self.machine} has no bfloat16: use dtype='float16'.")
        return dtype

    def copy_lane(self) -> CopyLane:
        return CUDACopyLane(self.device)

    def graph_capture(self) -> Capture:
        """Return a capture whose graphs share one pool of memory: they never run at the same time."""
        return _GraphCapture().capture


class _GraphCapture:
    """Captures on a stream of its own. The pool lives as long as its graphs."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """See platform.Capture. `torch.cuda.graph` would collect garbage and empty the cache each time."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _make_triton_ready() -> None:
    """Load Triton on a thread, while the context and the weights are made."""
    try:
        from octavo.runtime.kernels.triton.precompile import make_ready

        make_ready()
    except Exception:
        logger.debug("Triton is not ready.", exc_info=True)


class CUDACopyLane(CopyLane):
    """Copies from page-locked host memory on a stream of its own.

    Events order the copies against the current stream, which a CUDA graph keeps as edges.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._memory: list[Tensor] = []
        weakref.finalize(self, _unlock, self._memory)

    def host_memory(self, num_bytes: int) -> Tensor:
        """Lock memory in place: torch's own page-locked memory comes in powers of two."""
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        error = _runtime().cudaHostRegister(memory.data_ptr(), num_bytes, 0)
        if int(error) != 0:
            logger.error("cudaHostRegister: %s", error)
            raise ConfigError(
                f"The driver cannot lock {num_bytes / 2**30:.3g} GiB of host memory for weights. Lower "
                "cpu_offload_gb (or offload_num_in_group), or raise the limits of this process (ulimit -l)."
            )
        self._memory.append(memory)
        return memory

    def copy(self, target: Tensor, source: Tensor) -> Callable[[], None]:
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
