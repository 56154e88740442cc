"""The product in Gluon, which Triton's interpreter cannot run: compiled here for Hopper, right on a GPU."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.triton_here import DEVICE, HAS_GPU  # skips where there is no Triton

# isort: split
import triton

from octavo.runtime.kernels.triton import launch, matmul
from octavo.runtime.kernels.triton.table import cuda_table

_COMPILE = """
import torch, triton
from octavo.runtime.kernels.triton import persistent
from tests.offline_triton import Offline

class Warmed:
    def __getitem__(self, grid):
        return lambda *given, **named: kernels.append(kernel.warmup(*given, grid=grid, **named))

triton.runtime.driver._active = Offline()
kernels, kernel, persistent._gates_kernel = [], persistent._gates_kernel, Warmed()
persistent.overlapped = lambda: {"PDL": True, "launch_pdl": True}
for rows, shape in (100, "m64n128k16"), (250, "m64n256k16"):
    persistent.persistent_gates(torch.empty(rows, 192).bfloat16(), torch.empty(512, 192).bfloat16())
    assert "wgmma.mma_async.sync.aligned." + shape in kernels[-1].asm["ptx"]
    assert kernels[-1].metadata.shared < 227 * 1024
"""


@pytest.mark.skipif(HAS_GPU, reason="Where there is a GPU, it runs.")
@pytest.mark.skipif(not triton.__version__.startswith(launch.GLUON_VERSIONS), reason="Gluon changes.")
def test_compiles_for_hopper():
    """In a process without the interpreter, which changes the language."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", _COMPILE]
    made = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert made.returncode == 0, made.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.skipif(not launch.has_gluon(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("num_rows", "n", "k"),
    [(256, 64 * 300, 256), (241, 520, 4096), (250, 64, 72), (89, 520, 4096), (128, 264, 72)],
)
def test_gates_of_many_rows(num_rows, n, k, dtype):
    """One to three tiles for each program, the last one not full; the same bits each time."""
    from octavo.runtime.kernels.triton import persistent

    torch.manual_seed(num_rows)
    x, weight = (torch.randn(rows, k, device=DEVICE, dtype=dtype) * 0.2 for rows in (num_rows, 2 * n))
    gates, values = (x.double() @ weight.double().t()).chunk(2, 1)
    exact = torch.nn.functional.silu(gates) * values
    made = persistent.persistent_gates(x, weight)
    assert made.dtype == dtype
    assert (made - exact).norm() < (4e-3 if dtype == torch.bfloat16 else 1e-3) * exact.norm()
    assert all(torch.equal(made, persistent.persistent_gates(x, weight)) for _ in range(20))


@pytest.mark.skipif(not triton.__version__.startswith(launch.GLUON_VERSIONS), reason="Gluon changes.")
@pytest.mark.parametrize("num_rows", [88, 128, 240, 256])
def test_rows_and_matrices_that_get_it(num_rows, monkeypatch):
    """An 8B's matrix at sizes where it pays; not one whose tiles leave a third of the device idle."""
    from octavo.runtime.kernels.triton import persistent

    rows = []
    monkeypatch.setattr(matmul, "has_gluon", lambda: True)
    monkeypatch.setattr(matmul, "activate", lambda product, activation, gated: product)
    monkeypatch.setattr(persistent, "persistent_gates", lambda x, weight: rows.append(len(x)))
    for outputs in 14336, 17408:
        weight = torch.empty(2 * outputs, 4096, device="meta", dtype=torch.bfloat16)
        cuda_table().linear.gated_matmul(weight[:num_rows], weight)
    assert rows == ([num_rows] if num_rows in (128, 256) else [])


def test_programs_wait_before_anything_can_be_seen_of_them():
    """The warp that fetches waits before it does, and without what it fetches no other gets to its end."""
    tree = ast.parse((Path(launch.__file__).parent / "persistent.py").read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}

    def lines(function: str, call: str) -> list[int]:
        nodes = (node for node in ast.walk(functions[function]) if isinstance(node, ast.Call))
        return [node.lineno for node in nodes if ast.unparse(node.func).startswith(call)]

    assert max(lines("_fetch", "gdc_wait")) < min(lines("_fetch", "tma."))
    assert max(lines("_gates_kernel", "gl.warp_specialize")) < min(lines("_gates_kernel", "gdc_launch"))
