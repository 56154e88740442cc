"""What the server takes of the machine: a process that works and a process that holds memory are seen."""

import os
import subprocess
import sys
import time

import pytest

from octavo.metrics import machine, nvml
from octavo.metrics.machine import Machine
from octavo.metrics.names import METRICS, PREFIX

_BUSY = (
    "import sys; block = bytearray(64 << 20); sys.stdout.write('up\\n'); sys.stdout.flush()\nwhile True: pass"
)


def values(snapshot, name):
    return {tuple(m.labels.items()): m.value for m in snapshot if m.name == PREFIX + name}


def test_children_count(monkeypatch):
    monkeypatch.setattr(machine, "_SHORTEST_S", 0.0)
    monkeypatch.setattr(machine, "read_gpus", list)
    seen = Machine(os.getpid(), engine="0")
    before = values(seen.snapshot(), "memory_used_bytes")[(("engine", "0"),)]
    with subprocess.Popen([sys.executable, "-c", _BUSY], stdout=subprocess.PIPE) as child:
        try:
            child.stdout.readline()
            seen.snapshot()
            time.sleep(0.6)
            snapshot = seen.snapshot()
        finally:
            child.kill()
    [used] = values(snapshot, "memory_used_bytes").values()
    [total] = values(snapshot, "memory_total_bytes").values()
    [cores] = values(snapshot, "cpu_utilization").values()
    assert before + (64 << 20) < used < total
    assert 0.1 < cores < 4


def test_gpus_have_their_place(monkeypatch):
    monkeypatch.setattr(machine, "read_gpus", lambda: [nvml.GpuUse(0.5, 10, 80), nvml.GpuUse(0.0, 1, 80)])
    snapshot = Machine(os.getpid()).snapshot()
    assert values(snapshot, "gpu_utilization") == {(("gpu", "0"),): 0.5, (("gpu", "1"),): 0.0}
    assert values(snapshot, "gpu_memory_used_bytes")[(("gpu", "0"),)] == 10
    assert all(metric.name.removeprefix(PREFIX) in METRICS for metric in snapshot)


@pytest.mark.gpu
def test_the_driver_tells_what_torch_sees():
    torch = pytest.importorskip("torch")
    held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    gpus = nvml.read_gpus()
    _, total = torch.cuda.mem_get_info()
    assert any(gpu.used_bytes >= held.numel() and abs(gpu.total_bytes - total) < total / 10 for gpu in gpus)
    assert all(0 <= gpu.utilization <= 1 for gpu in gpus)
