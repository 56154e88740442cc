"""`read_gpus`: how busy and how full the NVIDIA GPUs of this machine are, by the driver's own library.

Called by `machine`, and when types are chosen. A few plain functions of libnvidia-ml by ctypes; without a
driver there are no GPUs.
"""

import ctypes
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple


class GpuUse(NamedTuple):
    """One GPU now."""

    utilization: float
    """Share of the last moments in which a kernel ran, 0 … 1."""
    used_bytes: int
    total_bytes: int


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def read_gpus() -> list[GpuUse]:
    """All GPUs in the driver's order; one that cannot tell is left out."""
    return [use for driver, device in _devices() if (use := _read(driver, device)) is not None]


def highest_capability() -> tuple[int, int] | None:
    """Return the compute capability of the GPU that CUDA numbers first; None where none can tell."""
    major, minor, found = ctypes.c_int(), ctypes.c_int(), []
    for driver, device in _devices():
        if driver.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)) == 0:
            found.append((major.value, minor.value))
    return max(found, default=None)


def _devices() -> Iterator[tuple[ctypes.CDLL, ctypes.c_void_p]]:
    """Yield each GPU, with the library to ask."""
    driver, count = library(), ctypes.c_uint()
    if driver is not None and not (driver.nvmlInit_v2() or driver.nvmlDeviceGetCount_v2(ctypes.byref(count))):
        for index in range(count.value):
            device = ctypes.c_void_p()
            if driver.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0:
                yield driver, device


def _read(driver: ctypes.CDLL, device: ctypes.c_void_p) -> GpuUse | None:
    rates, memory = _Utilization(), _Memory()
    failed = driver.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
    if failed or driver.nvmlDeviceGetUtilizationRates(device, ctypes.byref(rates)):
        return None
    return GpuUse(rates.gpu / 100, memory.used, memory.total)


@cache
def library() -> ctypes.CDLL | None:
    """Loaded once, and for the life of the process: at once where much else will be (`preload`)."""
    try:
        return ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
