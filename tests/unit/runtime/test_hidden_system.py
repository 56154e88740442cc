"""What octavo asks the system: the features of the CPU, and nothing that has to be in /proc."""

import ctypes
import platform
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from octavo.base import free_memory, limits
from octavo.runtime.kernels import cpu_features


def use_system(monkeypatch: pytest.MonkeyPatch, machine: str, system: str, **functions: object) -> None:
    """Be another machine, whose C library has these functions."""
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(**functions))


def auxiliary(words: dict[int, int]) -> Callable[[int], int]:
    def getauxval(word: int) -> int:
        return words[word]

    return getauxval


def test_arm_linux_is_asked_by_hwcap(monkeypatch: pytest.MonkeyPatch) -> None:
    words = {16: 1 << 1 | 1 << 8 | 1 << 10 | 1 << 12 | 1 << 20, 26: 1 << 13}
    use_system(monkeypatch, "aarch64", "linux", getauxval=auxiliary(words))
    assert cpu_features.cpu_features() == "aarch64 asimd atomics asimdhp asimdrdm asimddp i8mm"


def test_macos_is_asked_by_sysctl(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {b"hw.optional.AdvSIMD": 1, b"hw.optional.arm.FEAT_DotProd": 1, b"hw.optional.arm.FEAT_I8MM": 0}

    def sysctlbyname(name: bytes, value, size, _new: None, _size: ctypes.c_size_t) -> int:  # type: ignore[no-untyped-def]
        if name not in answers:
            return -1
        value._obj.value, size._obj.value = answers[name], 4
        return 0

    use_system(monkeypatch, "arm64", "darwin", sysctlbyname=sysctlbyname)
    assert cpu_features.cpu_features() == "arm64 asimd asimddp"


def test_without_proc_features_are_unknown_but_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(cpu_features, "_PROC", tmp_path / "cpuinfo")
    assert cpu_features.cpu_features() == f"x86_64 {platform.node()}"


def test_memory_is_known_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "_PROC", tmp_path)
    monkeypatch.setattr(free_memory, "_CGROUPS", tmp_path)
    assert 1 << 20 < free_memory.free_bytes() < 1 << 50
    monkeypatch.setattr(sys, "platform", "darwin")
    assert 1 << 20 < free_memory.free_bytes() < 1 << 50


@pytest.mark.parametrize(("system", "further", "bounded"), [("linux", False, True), ("darwin", False, False)])
def test_helpers_are_bounded_where_the_system_can(
    system: str, further: bool, bounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, _: asked.append(kind))
    limits.limit_memory(1 << 30, further=further)
    assert (resource.RLIMIT_AS in asked) == bounded


def test_what_a_process_has_is_unknown_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}
    monkeypatch.setattr(resource, "setrlimit", asked.__setitem__)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    limits.limit_memory(1 << 30, further=True)
    assert asked[resource.RLIMIT_AS][0] > 1 << 30
    asked.clear()
    monkeypatch.setattr(limits, "_SIZES", tmp_path / "statm")
    limits.limit_memory(1 << 30, further=True)
    assert resource.RLIMIT_AS not in asked
