"""Every Triton kernel against its reference: some cases in the interpreter; on a GPU all, and in bf16 too."""

import ast
import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.triton_here import DEVICE, HAS_GPU  # skips where there is no Triton

# isort: split
from octavo.runtime.kernels.attention import HeadInputs, HeadNorms, Ragged, Rotation, Scores
from octavo.runtime.kernels.experts import ExpertForm, Routing, Shared, Stacks
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.recurrent import Conv, Decay, GateForm, Scanned, States
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.kernels.sampling import Draws, Limits, Scored, TokenLists, Truncation, Words
from octavo.runtime.kernels.triton import attention, launch, tiles
from octavo.runtime.kernels.triton.table import cuda_table
from octavo.runtime.kernels.triton.tiles import split
from tests.kernel_cases import CASES, OPS, TRUNCATE_AND_DRAW, Case, assert_close, make_paged, nothing_of, run

# The interpreter computes with NumPy, which warns of overflows.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
REF, TRITON = ref_table(), cuda_table()
SHARES = 8  # tests per op: so many processes can compile at once
SOME = [0, *(pytest.param(share, marks=pytest.mark.slow) for share in range(1, SHARES))]
STRIDES = {"paged_attention": 10, "block_matmul": 3, "store_kv": 3, "truncate": 4}
"""In the interpreter only every n-th case is run."""


@functools.cache
def cases(op: str) -> list[Case]:
    """A cache in int8 is for the CPU's kernels alone."""
    torch.manual_seed(3)
    found = [case for case in CASES[op]() if _cache_type(op, case) != torch.int8]
    return found[:: 1 if HAS_GPU else STRIDES.get(op, 1)]


def _cache_type(op: str, case: Case) -> torch.dtype | None:
    return case.args[1].dtype if op in ("paged_attention", "store_kv") else None


def on_device(case: Case, dtype: torch.dtype | None = None) -> Case:
    """The case on the device, slices as slices. Activations become `dtype`; rope tables stay float32."""

    def move(value):
        if isinstance(value, Rotation):
            return value._replace(cos=value.cos.to(DEVICE), sin=value.sin.to(DEVICE))
        if isinstance(value, HeadNorms):
            return HeadNorms(*map(move, value))
        if isinstance(value, HeadInputs):
            factors = None if value.q_factors is None else value.q_factors.to(DEVICE)
            return HeadInputs(*map(move, value[:-1]), factors)
        if isinstance(value, Ragged):
            return replace(value, cu_q_lens=move(value.cu_q_lens), kv_lens=move(value.kv_lens))
        if isinstance(value, Packed):
            return value._replace(blocks=value.blocks.to(DEVICE))
        if isinstance(value, Scores):
            return value._replace(sinks=None if value.sinks is None else value.sinks.to(DEVICE))
        if isinstance(
            value, Shared | ExpertForm | TokenLists | Scored | Stacks | Words | Conv | Scanned | GateForm
        ):
            return type(value)(*map(move, value))
        if isinstance(value, Decay):
            return Decay(*(part.to(DEVICE) if isinstance(part, torch.Tensor) else part for part in value))
        if type(value) in (tuple, list):  # of factors
            return type(value)(map(move, value))
        if isinstance(value, States):
            shared = value.cache[:, :1].to(DEVICE).expand_as(value.cache)
            return States(shared, value.offset, *map(move, value[2:]))
        if isinstance(value, Draws | Limits | Truncation | Routing):
            return type(value)(*(part.to(DEVICE) for part in value))
        if not isinstance(value, torch.Tensor):
            return value
        target = dtype if dtype and value.dtype == torch.float32 else value.dtype
        if value.is_contiguous():
            return value.to(DEVICE, target)
        size = value[0].numel()
        wide = torch.zeros((value.shape[0], size + 64), dtype=target, device=DEVICE)
        return wide[:, 32 : 32 + size].unflatten(1, value.shape[1:]).copy_(value)

    return replace(
        case,
        args=tuple(move(value) for value in case.args),
        kwargs={name: move(value) for name, value in case.kwargs.items()},
    )


def compare(op: str, case: Case, tolerance: float) -> None:
    results = run(TRITON, op, case), run(REF, op, case)
    if op == "truncate":
        results = tuple([_kept(case.args[0], Truncation(*result))] for result in results)
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected, tolerance, f"{op} {case.name}")


def _kept(logits: torch.Tensor, truncation: Truncation) -> torch.Tensor:
    ids = torch.arange(logits.shape[1], device=logits.device)
    lowest, last_id = truncation.values[:, None], truncation.ids[:, None]
    return ((logits > lowest) | ((logits == lowest) & (ids <= last_id))).int()


@pytest.mark.parametrize("share", SOME)
@pytest.mark.parametrize("op", [*OPS, *TRUNCATE_AND_DRAW])
def test_kernel_equals_twin(op: str, share: int) -> None:
    for case in cases(op)[share::SHARES]:
        tolerance = case.tolerance
        if op == "paged_attention":
            tolerance = 1e-5  # the tanh of a soft cap is a quotient here
        elif op == "store_kv" and not HAS_GPU and _cache_type(op, case).itemsize < 4:
            tolerance = 2**-7  # the interpreter rounds down
        compare(op, on_device(case), tolerance)


ALWAYS_WIDE = {"ban", "block_dequantize", "count", "forbid", "penalize", "row_limits", "rotary_tables"}
ALWAYS_WIDE |= {"cut_chunks", "distance_attention"}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("share", SOME)
@pytest.mark.parametrize("op", [op for op in OPS if op not in ALWAYS_WIDE])
def test_narrow_activations(op: str, share: int, dtype: torch.dtype) -> None:
    """One rounding of inputs that are already narrow, up to the reference's own roundings."""
    for case in cases(op)[share::SHARES]:
        if op == "paged_attention" and _cache_type(op, case) not in (dtype, torch.float32):
            continue
        compare(op, on_device(case, dtype), 2**-6)


LONG = [
    ([(1, 1000), (1, 17), (1, 640)], 4, 2, 64, 16, 0, 0.0),
    ([(1, 700)], 8, 1, 36, 8, 0, 20.0),
    ([(1, 900), (1, 300)], 2, 2, 32, 16, 500, 0.0),
    ([(1, 500), (1, 65)], 6, 1, 128, 64, 0, 0.0),
]


@pytest.mark.parametrize("lens,heads,kv_heads,head_dim,block_size,window,cap", LONG)
def test_decoding_in_parts(lens, heads, kv_heads, head_dim, block_size, window, cap) -> None:
    paged = make_paged(
        lens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, window=window
    )
    scores = Scores(head_dim**-0.5, window, cap)
    compare("paged_attention", on_device(Case("parts", (*paged.args(), scores))), 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("num_requests", [8, 16, 33, 66, 132, 133])
def test_decoding_with_every_kind_of_tile(num_requests: int) -> None:
    """Tiles follow the number of pairs of requests and key heads; here it is at each of its limits."""
    lens = [(1, 1 + 137 * index % 1300) for index in range(num_requests)]
    paged = make_paged(lens, heads=16, kv_heads=8, head_dim=128, block_size=64)
    case = Case("tiles", (*paged.args(), Scores(128**-0.5)))
    compare("paged_attention", on_device(case, torch.bfloat16), 2**-6)


@pytest.mark.parametrize("told", [0, 1, 2])
def test_single_tokens_before_chunks(told: int) -> None:
    paged = make_paged([(1, 70), (1, 33), (9, 40), (1, 5)], heads=4, kv_heads=2, head_dim=64, block_size=16)
    paged = paged.to(DEVICE)
    expected = REF.attention.paged_attention(*paged.args(), Scores(0.125))
    actual = TRITON.attention.paged_attention(*paged.args(num_singles=told), Scores(0.125))
    assert_close(actual, expected, 1e-5, "singles")


def test_rows_without_keys_are_padding() -> None:
    paged = make_paged([(1, 70), (1, 33)], heads=4, kv_heads=2, head_dim=64, block_size=16)
    paged.kv_lens[1] = 0
    arguments = *paged.to(DEVICE).args(), Scores(0.125)
    results = [table.attention.paged_attention(*arguments) for table in (TRITON, REF)]
    assert_close(*results, 1e-5, "padding")


@pytest.mark.parametrize("lens", [[(1, 70), (1, 3)], [(5, 60), (1, 33)]], ids=["decode", "mixed"])
def test_cache_of_8_bits(lens) -> None:
    """Both sides read the same numbers; against the exact cache their rounding, 1 in 16, averages out."""
    paged = make_paged(lens, heads=4, kv_heads=2, head_dim=64, block_size=16)
    q, cache, *rest = *paged.to(DEVICE).args(), Scores(0.125)
    narrow = cache.nan_to_num(0.0).to(torch.float8_e4m3fn)
    results = [table.attention.paged_attention(q, narrow, *rest) for table in (TRITON, REF)]
    assert_close(*results, 1e-5, "8 bits")
    exact = REF.attention.paged_attention(q, cache, *rest)
    assert (results[0] - exact).norm() < 0.05 * exact.norm()


def test_storing_in_8_bits() -> None:
    q, k, v = (torch.randn(3, heads, 64, device=DEVICE) for heads in (4, 2, 2))
    k[0, 0, :3] = torch.tensor([1e4, -1e4, 0.0])
    stored = []
    for table in (TRITON, REF):
        cache = torch.zeros(2, 2, 4, 2, 64, dtype=torch.float8_e4m3fn, device=DEVICE)
        table.attention.store_kv(HeadInputs(q, k, v), cache, torch.tensor([5, -1, 0], device=DEVICE))
        stored.append(cache.float())
    assert stored[0][1, 0, 1, 0, :3].tolist() == [448.0, -448.0, 0.0]
    assert_close(*stored, 2**-4, "8 bits")


def test_parts_fill_the_device_once() -> None:
    assert split(8, 64, 32) == (32, 2)
    assert split(8, 16384, 32) == (32, 32)
    assert split(16 * 8, 16384, 64) == (64, 4)
    assert split(16 * 8, 300, 128) == (512, 1)


def test_of_many_requests_only_long_ones_are_cut() -> None:
    for pairs in (136, 528, 1056):
        assert split(pairs, 16384, 32) == (512, 4)
        assert split(pairs, 513, 32) == (512, 2)
    assert split(1064, 16384, 32)[1] == 1


COPIED = [(32, 1, 0, 0.0), (64, 2, 0, 0.0), (64, 7, 0, 20.0), (32, 8, 0, 0.0), (64, 16, 0, 0.0)]
NOT_COPIED = [(16, 2, 0, 0.0), (64, 2, 50, 0.0)]


@pytest.mark.parametrize(("block_size", "heads", "window", "cap"), COPIED + NOT_COPIED)
def test_whole_tiles_are_copied(monkeypatch, block_size, heads, window, cap) -> None:
    """By a descriptor, where tiles do not cross blocks; some of the requests in parts."""
    made, describe = [], attention.describe
    monkeypatch.setattr(attention, "describe", lambda *given: made.append(given) or describe(*given))
    monkeypatch.setattr(attention, "decode_tiles", tiles.decode_tiles.__wrapped__)
    for name, value in {"_FEW_PAIRS": 0, "_ONE_WAVE": 0, "_LONG": 64}.items():
        monkeypatch.setattr(tiles, name, value)
    lens = [(1, 1), (1, 31), (1, 32), (1, 33), (1, 150), (1, 64), (1, 5)]
    paged = make_paged(lens, heads=heads, kv_heads=1, head_dim=64, block_size=block_size, window=window)
    paged.kv_lens[6] = 0
    sinks = torch.linspace(-3, 3, heads) if cap else None
    case = Case("copied", (*paged.args(), Scores(0.125, window, cap, sinks=sinks)))
    dtype, tolerance = (torch.bfloat16, 2**-6) if HAS_GPU else (None, 1e-5)
    compare("paged_attention", on_device(case, dtype), tolerance)
    assert len(made) == ((block_size, heads, window, cap) in COPIED)


def test_rows_that_cannot_be_drawn_from_say_so() -> None:
    logits = torch.randn(4, 3000, device=DEVICE)
    logits[0, 5], logits[1, 2900], logits[2] = float("nan"), float("inf"), float("-inf")
    ones = torch.ones(4, dtype=torch.float64, device=DEVICE)
    for arguments in ((), (Draws(ones, ones * 0.3),)):
        token_ids, max_logits = TRITON.sampling.choose(logits, *arguments)
        assert max_logits.isfinite().tolist() == [False, False, False, True]
        assert ((token_ids >= 0) & (token_ids < 3000)).all()


@pytest.mark.parametrize("op", [*OPS, *TRUNCATE_AND_DRAW])
def test_nothing_to_do(op: str) -> None:
    case = on_device(next(CASES[op]()))
    case.args = nothing_of(op, case)
    for actual, expected in zip(run(TRITON, op, case), run(REF, op, case), strict=True):
        assert actual.shape == expected.shape and torch.equal(actual, expected)


@pytest.mark.matrix(6)
@pytest.mark.parametrize("heads", [8, 6, 2], ids=["packs_of_4", "packs_of_5", "packs_of_16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_common_start(heads, dtype):
    """Neighbours with all, some or none of their first blocks in common, and one that is padding."""
    lens = [(1, kv) for kv in (70, 65, 64, 90, 33, 130, 66, 1, 80, 95, 64, 7, 40)]
    paged = make_paged(lens, heads=heads, kv_heads=2, head_dim=64, block_size=16, dtype=dtype)
    tables = paged.block_tables
    for request, number in ((1, 4), (2, 3), (3, 4), (5, 2), (6, 2), (9, 5), (10, 3)):
        tables[request, :number] = tables[request - 1 if request != 5 else 3, :number]
    paged.kv_lens[7] = 0
    q, *args = paged.to(DEVICE).args(num_singles=len(lens), common_start=True)
    q = q.to(dtype if HAS_GPU else torch.float32)
    for soft_cap, sinks in ((0.0, None), (20.0, None), (0.0, torch.linspace(-3, 3, heads, device=DEVICE))):
        actual, expected = (
            table.attention.paged_attention(q, *args, Scores(0.125, 0, soft_cap, sinks=sinks)).float()
            for table in (TRITON, REF)
        )
        actual[7] = expected[7] = 0
        assert_close(actual, expected, 1e-5 if q.dtype == torch.float32 else 1e-2, str(soft_cap))


def _overlapped_kernels() -> list[ast.FunctionDef]:
    """In Triton; for those in Gluon see test_persistent_gates, test_register_unpack and test_copied_experts.

    Programs of adapters.py that shrink write to memory that nobody else uses; the first waits, so that the
    launch is done when the product is. Those that expand wait before they release, or have nothing to do.
    """
    folder = Path(launch.__file__).parent
    others = "persistent.py", "register_unpack.py", "few_rows.py", "copied_experts.py", "adapters.py"
    trees = [ast.parse(path.read_text()) for path in folder.glob("*.py") if path.name not in others]
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [f for f in functions if f.name.endswith("_kernel") and "PDL" in {a.arg for a in f.args.args}]


def _seen_too_early(block: list[ast.stmt], has_waited: bool = False) -> list[int]:
    """Lines by which others may see something of a program that has not waited on its way there."""
    early = []
    for node in block:
        if isinstance(node, ast.If | ast.For | ast.While):
            early += _seen_too_early(node.body, has_waited) + _seen_too_early(node.orelse, has_waited)
            continue
        calls = {ast.unparse(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)}
        is_seen = calls & {"release", "is_last", "tl.store", "tl.atomic_add"} or isinstance(node, ast.Return)
        early += [node.lineno] if is_seen and not has_waited else []
        has_waited |= "wait" in calls
    return early


@pytest.mark.parametrize("kernel", _overlapped_kernels(), ids=lambda kernel: kernel.name)
def test_programs_wait_before_anything_can_be_seen_of_them(kernel: ast.FunctionDef) -> None:
    """All later kernels count on it: once a program has released its successor, or ended, it has waited."""
    body = [*kernel.body, ast.Return(lineno=kernel.end_lineno)]
    assert _seen_too_early(body) == []
    for node in ast.walk(kernel):  # without the waits that are there, it shows
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "wait":
            node.func = ast.Name("pause")
    assert _seen_too_early(body)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["all_to_one", "one_each", "most_empty"])
def test_hostile_routings(kind):
    """More pairs than are left unsorted; the last tile of an expert is never full."""
    torch.manual_seed(4)
    ids = {
        "all_to_one": torch.full((83, 1), 2),
        "one_each": torch.randperm(80)[:, None],
        "most_empty": torch.rand(9, 512).argsort(1)[:, :16],
    }[kind]
    count = 80 if kind == "one_each" else 512 if kind == "most_empty" else 3
    up, down = torch.randn(count, 32, 48) * 0.1, torch.randn(count, 48, 16) * 0.1
    routing = Routing(ids.int().contiguous(), torch.rand(ids.shape))
    case = Case(kind, (torch.randn(len(ids), 48), routing, up, down, ExpertForm(), None))
    compare("dense_experts", on_device(case), 2e-6)
