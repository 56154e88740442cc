"""Compiling side by side what a first run would compile one after the other.

Called by the CUDA platform before anything is computed. Some work is gone through without the kernels that
are not compiled yet: they are noted instead of launched, with what Triton would compile them for. So the
code that launches a kernel is all that says how it is compiled. Then threads compile what was noted, which
is mostly done outside of Python, or find it in Triton's folder, and load it into the device.

Noting begins where threads do not compile yet: they would take turns with it for Python's lock, at every
operation of torch.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from triton import AsyncCompileMode
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager, triton_key

from octavo.base.cores import usable_cores
from octavo.base.log import get_logger

logger = get_logger(__name__)
Locks = dict[Any, threading.Lock]
_one_at_a_time = threading.Lock()


def make_ready() -> None:
    """Do what Triton does before its first kernel: build a small C module, and read itself for a checksum.

    That takes 0.4 s, or 1 s with an empty folder, mostly outside of Python: a thread can do it beside others.
    """
    with _one_at_a_time:
        driver.active.get_current_target()
        triton_key()


def compile_ahead(work: Callable[[], None], device: torch.device, *, is_alone: bool = True) -> bool:
    """Compile for `device` and load what `work` launches. Raises what `work` raises.

    Returns True if all of it was in Triton's folder: then the work has been done. Else it has been, but for
    these launches: what they should have written is not written, so it must not matter. Of ranks, which wait
    for each other's kernels, none launches what others may not. A kernel that cannot be compiled here is
    compiled where it is launched, and fails there.
    """
    make_ready()
    with _Notes(launches_kept=is_alone) as notes:
        work()
    if is_alone and not notes.kernels:
        return True
    num_threads = max(1, min(usable_cores(), len(notes.kernels)))
    began = time.perf_counter()
    with ThreadPoolExecutor(num_threads, "compile", torch.cuda.set_device, (device,)) as threads:
        list(threads.map(_try, notes.kernels))
    took_s = time.perf_counter() - began
    logger.debug("%d threads compiled or found %d kernels in %.2f s", num_threads, len(notes.kernels), took_s)
    return False


def _is_kept(key: str) -> bool:
    """Return True if Triton's folder has the kernel of a key."""
    folder = Path(get_cache_manager(sha256(key.encode()).hexdigest()).cache_dir)
    return any(folder.glob("__grp__*"))


class _Noted:
    """Stands in Triton's table of kernels until there is one; a launch asks it for that, or for its parts."""

    def __init__(
        self, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None], locks: Locks
    ) -> None:
        self.is_skipped_by: int | None = threading.get_ident()
        self._compile, self._finalize = compile_fn, finalize_fn
        self._locks = locks
        self._lock = threading.Lock()
        self._kernel: Any = None

    def result(self) -> Any:
        """Return the kernel, made by whoever comes first; or none to launch, where work is gone through."""
        if self.is_skipped_by == threading.get_ident():
            return _NOTHING
        with self._lock:
            if self._kernel is None:
                self._kernel = self._make()
        return self._kernel

    def __getattr__(self, name: str) -> Any:
        """Answer what a launch wants of the kernel, from Triton 3.7 on."""
        return getattr(self.result(), name)

    def _make(self) -> Any:
        kernel = self._compile()
        # Kernels of one function mostly have the same launcher: one calls the C compiler, others find it.
        with self._locks.setdefault(kernel.src.fn, threading.Lock()):
            kernel.run  # noqa: B018  # a property that loads
        self._finalize(kernel)
        return kernel


def _try(kernel: _Noted) -> None:
    try:
        kernel.result()
    except Exception:
        logger.debug("A kernel cannot be compiled ahead.", exc_info=True)


class _Notes(AsyncCompileMode):  # type: ignore[misc]  # Triton has no types
    """While it is entered, this thread launches no kernel that is not there yet.

    launches_kept: those of Triton's folder are, up to the first that is not
    """

    def __init__(self, *, launches_kept: bool) -> None:
        super().__init__(None)
        self.kernels: list[_Noted] = []
        self._launches_kept = launches_kept
        self._locks: Locks = {}

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
        """Take a kernel that Triton asks for; it puts what `finalize_fn` gets into its table."""
        if self._launches_kept and not self.kernels and _is_kept(key):
            found = compile_fn()
            finalize_fn(found)
            return found
        kernel = _Noted(compile_fn, finalize_fn, self._locks)
        self.kernels.append(kernel)
        finalize_fn(kernel)
        return kernel

    def __exit__(self, *error: Any) -> None:
        for kernel in self.kernels:
            kernel.is_skipped_by = None
        super().__exit__(*error)


class _Nothing:
    """What a launch reads of a kernel, and a launch that does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *arguments: Any) -> None:
        """Return nothing, as none is asked for."""

    def run(self, *arguments: Any) -> None:
        """Launch nothing."""


_NOTHING = _Nothing()
