"""What the platforms report of the machine."""

from pathlib import Path

import pytest
import torch

from octavo.base import free_memory
from octavo.base.errors import ConfigError
from octavo.runtime.platforms.platform import get_platform

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, Path]:
    """A /proc with 8 GiB available, and an empty cgroup tree."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    cgroups.mkdir()
    (proc / "meminfo").write_text("MemTotal: 16777216 kB\nMemAvailable:    8388608 kB\n")
    return proc, cgroups


def write_cgroup(folder: Path, limit: str, used: int, cached: int, v1: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    limit_name, usage_name = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes") if v1 else ("memory.max", "memory.current")
    )
    (folder / limit_name).write_text(f"{limit}\n")
    (folder / usage_name).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\n")


def test_machine_memory(machine: tuple[Path, Path]) -> None:
    assert free_memory._machine_bytes(machine[0]) == 8 * GIB


def test_tightest_cgroup_above_the_process_counts(machine: tuple[Path, Path]) -> None:
    proc, root = machine
    (proc / "self/cgroup").write_text("0::/box/inner\n")
    write_cgroup(root / "box/inner", "max", 1, 0)
    write_cgroup(root / "box", str(4 * GIB), 3 * GIB, GIB // 2)
    assert free_memory._cgroup_bytes(proc, root) == 3 * GIB // 2


def test_cgroup_version_1(machine: tuple[Path, Path]) -> None:
    proc, root = machine
    (proc / "self/cgroup").write_text("5:cpu:/x\n4:hugetlb,memory:/box\n")
    write_cgroup(root / "memory/box", str(GIB), GIB // 4, 0, v1=True)
    assert free_memory._cgroup_bytes(proc, root) == 3 * GIB // 4


def test_no_limit(machine: tuple[Path, Path]) -> None:
    proc, root = machine
    (proc / "self/cgroup").write_text("0::/\n")
    assert free_memory._cgroup_bytes(proc, root) > 1 << 50


def test_cpu_here() -> None:
    threads = torch.get_num_threads()
    try:
        platform = get_platform("cpu", 3)
        assert torch.get_num_threads() == (3 if platform.kernels.name == "ref" else 1)
    finally:
        torch.set_num_threads(threads)
    assert 0 < platform.available_memory_bytes(0.5) < 1 << 50
    assert platform.compute_dtype(torch.bfloat16) == torch.float32
    assert platform.device == torch.device("cpu")


def test_unknown_and_absent_devices() -> None:
    with pytest.raises(ConfigError, match="abacus"):
        get_platform("abacus", 1)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="use device='cpu'"):
            get_platform("cuda", 1)


@pytest.mark.gpu
def test_cuda_here() -> None:
    platform = get_platform("cuda:0", 1)
    assert platform.compute_dtype(torch.bfloat16) == torch.bfloat16
    total = torch.cuda.get_device_properties(0).total_memory
    assert 0 < platform.available_memory_bytes(0.9) <= 0.9 * total
    assert platform.available_memory_bytes(1e-6) < 0, "what is in use counts"
    assert platform.peak_bytes(lambda: torch.zeros(1 << 20, device="cuda").add(1)) == 8 << 20
