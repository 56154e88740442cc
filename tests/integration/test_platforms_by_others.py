"""A device that another package brings by an entry point: the example in numpy; the suite for platforms."""

import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from octavo.base.devices import DEVICES
from octavo.base.errors import ConfigError
from octavo.config import EngineArgs, resolve
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.platforms import conformance
from octavo.runtime.platforms.platform import Platform

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "examples" / "numpy_device"
QUESTION = "The capital of France is"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The environment in which the example package is installed, as pip would do it."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = tmp_path_factory.mktemp("site") / "octavo_numpy-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    paths = ROOT, PACKAGE, info.parent
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}


def octavo(environment, *arguments):
    command = [sys.executable, "-m", "octavo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=280)


def test_the_suite_passes(installed):
    ended = octavo(installed, "platform-check", "numpy")
    lines = ended.stdout.splitlines()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert lines[0] == "ok  NumpyPlatform on torch's cpu: numpy"
    assert {"ok  attention with a window", "ok  block_matmul of Q4_1", "ok  a model, seeded"} <= set(lines)
    assert len(lines) > 30


@pytest.mark.slow
def test_the_default_model_answers_as_on_the_cpu(installed, smollm2_path):
    def answer(device):
        arguments = "--max-tokens", "6", "--activations", "float32", "--max-num-batched-tokens", "64"
        ended = octavo(installed, "generate", "--device", device, *arguments, QUESTION)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    said = answer("numpy")
    assert len(said) > 5
    assert said == answer("cpu")


def test_without_the_package_there_is_no_such_device():
    with pytest.raises(ConfigError, match="device='numpy' is not one of auto, cpu, cuda, mps, rocm, xpu"):
        resolve(EngineArgs(model="some/model", device="numpy"))


class WrongPlatform(Platform):
    """Norms by half of epsilon's place, and a memory that shrinks the more of it one may take."""

    def __init__(self, number, threads, snapshot):
        table = ref_table()
        norm = table.norms.rms_norm
        broken = replace(table.norms, rms_norm=lambda x, weight, eps: norm(x, weight, eps + 0.1))
        super().__init__(torch.device("cpu"), replace(table, norms=broken))

    def available_memory_bytes(self, share):
        return int(1000 / share)

    def compute_dtype(self, dtype):
        return torch.float32


def test_the_suite_finds_what_is_wrong(monkeypatch):
    monkeypatch.setitem(DEVICES._targets, "wrong", f"{__name__}:WrongPlatform")
    findings = {subject: problem for subject, problem in conformance.check("wrong", 1) if problem}
    assert findings.keys() == {"memory", "rms_norm"}
    assert "of the largest value" in findings["rms_norm"]


def test_a_platform_that_cannot_be_imported_is_one_error(monkeypatch):
    monkeypatch.setattr(DEVICES, "_installed", {"lost": "no.such:Platform"})
    with pytest.raises(ConfigError, match=r"device 'lost': 'no.such:Platform' cannot be loaded"):
        DEVICES.load("lost")
