"""A `Platform` is one kind of device; worker, layers and attention back ends ask it once, at construction.

A platform says what is there and which kernels serve it; it never holds weights or cache.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import torch

from octavo.base.devices import DEVICES, kind_of, number_of
from octavo.runtime.kernels.table import KernelTable

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Captures work that launches the same kernels on the same memory every time; returns what replays it.

The work is called once: its launches are kept, not computed. Kernels must have been loaded before, by the
same work or by work of another size.
"""


class CopyLane(ABC):
    """Copies from the host beside the device's work. It owns the host's memory that it copies from."""

    @abstractmethod
    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Return [num_bytes] uint8 on the host, kept as long as this object. Raises ConfigError."""

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        """Copy once the device has done what it was given so far; waits for nothing.

        Returns what makes the device's later work wait for the copy. May be captured together with the work.
        """


class Platform(ABC):
    """Describes a device with its kernels.

    is_batch_invariant: the numbers of a row do not depend on how many rows are computed with it
    """

    is_batch_invariant: ClassVar[bool] = False

    def __init__(self, device: torch.device, kernels: KernelTable) -> None:
        self.device = device
        self.kernels = kernels

    @property
    def machine(self) -> str:
        """Return what weights in memory are laid out for, for people."""
        return self.kernels.name

    @abstractmethod
    def available_memory_bytes(self, share: float) -> int:
        """Return the memory that this process may still take, now, if `share` of it may be used."""

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """Return the most memory that `work` takes on top of what is taken.

        0, without working, where none is kept back for it: the operating system lends it.
        """
        return 0

    def compile_ahead(self, work: Callable[[], None], *, is_alone: bool) -> bool:
        """Make ready, all at once, the kernels that `work` uses; where kernels are compiled as they come up.

        Returns True if the work has been done. Else it may have been, without some of its kernels: nothing
        may depend on what it computes. is_alone: no other rank takes part in it
        """
        return False

    def graph_capture(self) -> Capture | None:
        """Return a new way to capture work, whose graphs share memory; None on a device without graphs."""
        return None

    def copy_lane(self) -> CopyLane | None:
        """Return a new one; None where the device computes with the host's memory."""
        return None

    @abstractmethod
    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type of activations when weights and cache are kept in `dtype`."""


def get_platform(device: str, threads: int, snapshot: Path | None = None) -> Platform:
    """Return the platform of `device` ("cpu", "cuda", "cuda:1"). Raises ConfigError if there is none.

    threads: of CPU kernels in this process; snapshot: may have kernels
    """
    make: Callable[[int, int, Path | None], Platform] = DEVICES.load(kind_of(device))
    return make(number_of(device), threads, snapshot)
