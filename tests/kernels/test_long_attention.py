"""Attention over long contexts, seen in parts: in float32, on AMX where it is, and by tiles in plain code."""

import ctypes
import shlex
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.base import env
from octavo.runtime.kernels import build
from octavo.runtime.kernels.attention import Scores
from octavo.runtime.kernels.cpu.library import Library
from octavo.runtime.kernels.cpu.table import table_of
from octavo.runtime.kernels.precision import InputPrecision
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.kernels.table import KernelTable
from tests.kernel_cases import Paged, make_paged

pytestmark = pytest.mark.matrix(6)

LENS = [(1, 1), (40, 40), (1, 1500), (3, 1030), (70, 600)]  # parts end at 512, 1024
ALIKE = [(1, 560 + 5 * r) for r in range(14)] + [(3, 700), (1, 710), (1, 0), (1, 720), (1, 730)]
WHOLE = [(16, 16), (7, 7), (70, 70), (33, 33), (600, 600), (1, 1), (3, 50)]
COMMON = {0: [(range(1, 9), 33), (range(9, 12), 20), (range(12, 13), 2)], 13: [(range(14, 19), 35)]}
"""Per request, who begins with how many of its blocks."""
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.02, "soft": 0.02}

Attend = Callable[..., Tensor]
_C_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}


@pytest.fixture(scope="module", params=["float32", "bfloat16", "soft"])
def attend(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[Attend]]:
    """The arithmetic's name, and paged attention with 1, 2 and 3 threads."""
    if env.kernels_disabled():
        pytest.skip("OCTAVO_NO_CPU_KERNELS is set")
    path = build.shared_library()
    assert path is not None
    library = Library(path)
    if request.param == "soft":
        library.octavo_attention = _with_soft_tiles(path, tmp_path_factory.mktemp("soft") / "soft.so")
    kind: InputPrecision = "float32" if request.param == "float32" else "bfloat16"
    tables = [table_of(library, threads) for threads in (1, 2, 3)]
    return request.param, [partial(_attend, table, kind) for table in tables]


def _attend(table: KernelTable, kind: InputPrecision, *args: Any) -> Tensor:
    *batch, scores = args
    return table.attention.paged_attention(*batch, scores._replace(input_precision=kind))


def _with_soft_tiles(path: Path, made: Path) -> Callable[..., None]:
    """`octavo_attention` with tiles in plain code, linked to the library for all else."""
    sources = [
        Path(build.__file__).parent / "cpu" / name for name in ("attention.cpp", "attention_tiles.cpp")
    ]
    options = [*build._OPTIONS, "-O1", "-march=native", "-DOCTAVO_SOFT_TILES", "-shared"]
    subprocess.run([*shlex.split(env.compiler()), *options, *sources, path, "-o", made], check=True)
    function = ctypes.CDLL(str(made)).octavo_attention
    function.argtypes = [_C_TYPES[letter] for letter in "pllpillllplppiflfpiiip"]
    function.restype = None
    return function


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (600, 0.0), (40, 30.0)])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (4, 1, 96)])
def test_against_the_twin(
    attend: tuple[str, list[Attend]],
    heads: int,
    kv_heads: int,
    size: int,
    window: int,
    cap: float,
    dtype: torch.dtype,
) -> None:
    paged = _paged(heads, kv_heads, size, window, dtype)
    scores = Scores(size**-0.5, window, cap)
    kind, (one, *_) = attend
    expected = ref_table().attention.paged_attention(*paged.args(), scores)
    error = (one(*paged.args(), scores) - expected).abs().max()
    assert error < TOLERANCE[kind]
    assert kind != "soft" or error > 1e-4  # it did round


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (600, 0.0), (20, 30.0)])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(3, 3, 32), (4, 2, 64)])
def test_both_sides(
    attend: tuple[str, list[Attend]],
    heads: int,
    kv_heads: int,
    size: int,
    window: int,
    cap: float,
    dtype: torch.dtype,
) -> None:
    """Encoders: as the reference, and the bits of each request alone. Floats keep 16 bits."""
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": size, "block_size": 64}
    paged = make_paged(WHOLE, dtype=dtype, **sizes)
    scores = Scores(size**-0.5, window, cap, is_causal=False)
    kind, (one, *many) = attend
    whole = one(*paged.args(), scores)
    error = (whole - ref_table().attention.paged_attention(*paged.args(), scores)).abs().max()
    assert error < (5e-5 if dtype == torch.float32 and kind != "float32" else TOLERANCE[kind])
    assert kind != "soft" or error > (1e-6 if dtype == torch.float32 else 1e-4)  # it did round
    for run in many:
        assert torch.equal(run(*paged.args(), scores), whole)
    for r, (first, last) in enumerate(paged.cu_q_lens.unfold(0, 2, 1).tolist()):
        assert torch.equal(one(*paged.alone(r), scores), whole[first:last]), r


def test_the_future_counts_on_both_sides(attend: tuple[str, list[Attend]]) -> None:
    """Where the twin of `test_both_sides` is causal, that test fails."""
    paged = make_paged(WHOLE, heads=3, kv_heads=3, head_dim=32, block_size=64)
    seen, causal = (attend[1][0](*paged.args(), Scores(0.2, is_causal=causal)) for causal in (False, True))
    assert (seen - causal).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("window", [0, 600])
def test_threads_and_chunks_change_no_bit(
    attend: tuple[str, list[Attend]], window: int, dtype: torch.dtype
) -> None:
    """A long request alone is shared by the threads; among others it may not be."""
    paged = _paged(4, 1, 64, window, dtype)
    scores, (_, (one, *many)) = Scores(0.125, window), attend
    whole = one(*paged.args(), scores)
    for run in many:
        assert torch.equal(run(*paged.args(), scores), whole)
        assert torch.equal(run(*paged.in_chunks(1), scores), whole)
        for r, (first, last) in enumerate(paged.cu_q_lens.unfold(0, 2, 1).tolist()):
            assert torch.equal(run(*paged.alone(r), scores), whole[first:last]), r


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "window"), [(9, 3, 64, 0), (9, 3, 64, 200), (2, 2, 32, 0)]
)
def test_blocks_in_common_change_no_bit(
    attend: tuple[str, list[Attend]],
    heads: int,
    kv_heads: int,
    size: int,
    window: int,
    dtype: torch.dtype,
) -> None:
    """Requests that decode behind the same blocks are computed together."""
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": size, "block_size": 16, "window": window}
    paged = make_paged(ALIKE, dtype=dtype, **sizes)
    for owner, takers in COMMON.items():
        for requests, count in takers:
            paged.block_tables[list(requests), :count] = paged.block_tables[owner, :count]
    scores = Scores(size**-0.5, window)
    _, (one, *many) = attend
    whole = one(*paged.args(), scores)
    for run in many:
        assert torch.equal(run(*paged.args(), scores), whole)
    for r, (first, last) in enumerate(paged.cu_q_lens.unfold(0, 2, 1).tolist()):
        assert torch.equal(one(*paged.alone(r), scores), whole[first:last]), r


def test_nobody_is_finite(attend: tuple[str, list[Attend]]) -> None:
    paged = _paged(9, 3, 64, 0, torch.bfloat16)
    paged.kv_lens[0] = 0
    assert attend[1][0](*paged.args(), Scores(0.125)).isfinite().all()


def _paged(heads: int, kv_heads: int, size: int, window: int, dtype: torch.dtype) -> Paged:
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": size, "block_size": 16, "window": window}
    return make_paged(LENS, dtype=dtype, **sizes)
