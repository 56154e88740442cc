"""`cpu_features`: the instruction sets of this CPU, in the words of Linux, also where there is no /proc."""

import ctypes
import platform
import sys
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc/cpuinfo")
_AT_HWCAP, _AT_HWCAP2 = 16, 26
_HWCAP = {1: "asimd", 8: "atomics", 10: "asimdhp", 12: "asimdrdm", 20: "asimddp", 22: "sve"}
_HWCAP2 = {1: "sve2", 13: "i8mm", 14: "bf16"}
"""Bits of AArch64, of linux/arch/arm64/include/uapi/asm/hwcap.h."""
_SYSCTL = {
    "AdvSIMD": "asimd",
    "arm.FEAT_LSE": "atomics",
    "arm.FEAT_FP16": "asimdhp",
    "arm.FEAT_RDM": "asimdrdm",
    "arm.FEAT_DotProd": "asimddp",
    "arm.FEAT_I8MM": "i8mm",
    "arm.FEAT_BF16": "bf16",
}
"""Apple's names, behind hw.optional."""


def cpu_features() -> str:
    """Return the machine and its features. ARM is asked by HWCAP: under an emulator /proc is the host's."""
    machine = platform.machine()
    if machine in ("aarch64", "arm64"):
        names = _of_sysctl() if sys.platform == "darwin" else _of_hwcap()
        return f"{machine} {' '.join(names)}"
    with suppress(OSError):
        lines = _PROC.read_text(encoding="utf-8", errors="replace").splitlines()
        return f"{machine} {next((line for line in lines if line.startswith('flags')), '')}"
    return f"{machine} {platform.node()}"  # what is compiled for this CPU is no other's


def _of_hwcap() -> list[str]:
    ask = ctypes.CDLL(None).getauxval
    ask.restype, ask.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    words = ((_AT_HWCAP, _HWCAP), (_AT_HWCAP2, _HWCAP2))
    return [name for word, bits in words for bit, name in bits.items() if ask(word) >> bit & 1]


def _of_sysctl() -> list[str]:
    """Return what the system says that it has, and 1 is its answer."""
    ask, found = ctypes.CDLL(None).sysctlbyname, []
    for key, name in _SYSCTL.items():
        value, size = ctypes.c_int64(0), ctypes.c_size_t(8)
        to = ctypes.byref(value), ctypes.byref(size)
        if ask(f"hw.optional.{key}".encode(), *to, None, ctypes.c_size_t(0)) == 0 and value.value == 1:
            found.append(name)
    return found
