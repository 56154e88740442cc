"""Kinds of devices by name: octavo's own platforms, and those of installed packages (docs/platforms.md)."""

from typing import Any

from octavo.base.registry import Registry

DEVICES: Registry[Any] = Registry(
    "device",
    {
        "cpu": "octavo.runtime.platforms.cpu:CPUPlatform",
        "cuda": "octavo.runtime.platforms.cuda:CUDAPlatform",
        "mps": "octavo.runtime.platforms.torch_device:MPSPlatform",
        "rocm": "octavo.runtime.platforms.rocm:ROCmPlatform",
        "xpu": "octavo.runtime.platforms.torch_device:XPUPlatform",
    },
    group="octavo.platforms",
)
"""Platforms by the value of `device`: see runtime/platforms/platform."""

_OWN_NAMES = {"rocm": "cuda", "cpu": "cpu", "cuda": "cuda", "mps": "mps", "xpu": "xpu"}


def kind_of(device: str) -> str:
    """Return the name of a device without its number: "cuda" of "cuda:1"."""
    return device.partition(":")[0]


def number_of(device: str) -> int:
    """Return a device's number, 0 where none is said."""
    return int(device.partition(":")[2] or 0)


def torch_name(device: str) -> str:
    """Return torch's name of a device: its ROCm builds say cuda, and other packages' devices may have any."""
    kind, colon, number = device.partition(":")
    own = _OWN_NAMES.get(kind, "cpu")
    return own if own == "cpu" else f"{own}{colon}{number}"
