"""Products in Gluon with arranged matrices, compiled here for Hopper: no interpreter runs them."""

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

from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.kernels.triton import launch
from octavo.runtime.kernels.triton.table import cuda_table
from tests.kernel_cases import make_blocks

pytestmark = pytest.mark.matrix(4)

_COMPILE = """
import torch, triton
from octavo.runtime.kernels.triton import register_unpack
from tests.offline_triton import Offline

class Warmed:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *given, **named: kernels.append(self.kernel.warmup(*given, grid=grid, **named))

class Counters:
    def on(self, device, number):
        return torch.zeros(number, dtype=torch.int32)

triton.runtime.driver._active = Offline()
kernels = []
register_unpack._few_rows_kernel = Warmed(register_unpack._few_rows_kernel)
register_unpack.few_rows_kernel = Warmed(register_unpack.few_rows_kernel)
register_unpack._many_rows_kernel = Warmed(register_unpack._many_rows_kernel)
register_unpack.overlapped = lambda: {"PDL": True, "launch_pdl": True}
cases = ("A4", 64, 288, 3), ("A4", 32, 320, 200), ("A8", 32, 576, 30), ("AF8", 64, 544, 9)
cases += ("E4", 32, 320, 3), ("E4", 32, 320, 200), ("A4", 64, 288, 9)
for name, group, row, rows in cases:
    x, out = torch.empty(rows, 2048).bfloat16(), torch.empty(rows, 512).bfloat16()
    kind = {"KIND": name, "GROUP": group, "K": 2048, "ROW": row}
    blocks = torch.empty(512, 4 * row, dtype=torch.uint8)
    assert register_unpack.can_multiply(x, name, 2048)
    register_unpack.product(Counters(), x, blocks, kind, None, out)
    few, ptx = rows <= 16, kernels[-1].asm["ptx"]
    assert ("mma.sync.aligned.m16n8k16" if few else "wgmma.mma_async.sync.aligned.m64") in ptx
    assert kernels[-1].metadata.shared < (8192 if few else 227 * 1024)
"""
MANY = [(name, rows, n, k) for name in ("Q4_K", "U4_64", "Q8_0", "F8_64", "NV4_64")
        for rows in (1, 8, 9, 17, 64, 130) for n, k in ((70, 256), (512, 2048))]  # fmt: skip
LONG = [("U4_64", 3, 512, 14336), ("Q4_K", 2, 300, 5376), ("Q4_0", 5, 70, 2816), ("Q4_0", 500, 4096, 14336)]
"""Parts that programs share, and that do not come out even."""


@pytest.mark.slow
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
@pytest.mark.parametrize(("name", "rows", "n", "k"), [*MANY, *LONG])
def test_products(name, rows, n, k):
    """Within the roundings of bfloat16, the same bits each time; changed codes change their row."""
    torch.manual_seed(rows)
    linear = cuda_table().linear
    packed = Packed(make_blocks(name, n, k), name)
    made = linear.arrange(packed._replace(blocks=packed.blocks.to(DEVICE)), torch.bfloat16)
    x, bias = torch.randn(rows, k, device=DEVICE).bfloat16(), torch.randn(n, device=DEVICE).bfloat16()
    exact = x.double() @ ref_table().linear.block_dequantize(packed).to(DEVICE).double().t() + bias.double()
    product = linear.block_matmul(x, made, bias)
    assert (product - exact).norm() < 6e-3 * exact.norm()
    assert all(torch.equal(product, linear.block_matmul(x, made, bias)) for _ in range(10))
    made.blocks[n // 2, : k // 2] ^= 3
    other = linear.block_matmul(x, made, bias) != product
    assert other[:, n // 2].any() and not torch.cat([other[:, : n // 2], other[:, n // 2 + 1 :]], 1).any()


def lines_of_calls(file: Path):
    """What says at which lines a function of a file calls another."""
    tree = ast.parse(file.read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}

    def lines(function: str, call: str) -> list[int]:
        nodes = (node for node in ast.walk(functions[function]) if isinstance(node, ast.Call))
        return [node.lineno for node in nodes if ast.unparse(node.func).startswith(call)]

    return lines


def test_programs_wait_before_anything_can_be_seen_of_them():
    """Few rows: all warps, before they release. Many: the warp that fetches; the others need its boxes."""
    lines = lines_of_calls(Path(launch.__file__).parent / "register_unpack.py")
    few, many = "_few_rows_kernel", "_many_rows_kernel"
    assert max(lines(few, "gdc_wait")) < min(lines(few, "gdc_launch")) < min(lines(few, "finish"))
    assert max(lines("_fetch", "gdc_wait")) < min(lines("_fetch", "tma."))
    fewer = lines_of_calls(Path(launch.__file__).parent / "few_rows.py")
    waits, releases = (fewer("few_rows_kernel", call) for call in ("gdc_wait", "gdc_launch"))
    assert max(waits) < min(releases) < min(fewer("few_rows_kernel", "finish"))
    assert max(lines(many, "gl.warp_specialize")) < min(lines(many, "gdc_launch"))
