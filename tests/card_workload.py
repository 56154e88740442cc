"""Launches every Triton kernel in the forms that models, batches and types lead to on a card.

Tensors have shapes and no values: nothing is computed. Shapes are those of models in the gallery.
"""

import torch

from octavo.runtime.kernels.adapters import ENTRY, LowRankTable
from octavo.runtime.kernels.attention import HeadInputs, HeadNorms, PlainPrompts, Ragged, Rotation, Scores
from octavo.runtime.kernels.block_types import TYPES_BY_NAME
from octavo.runtime.kernels.experts import ExpertForm, Router, Stacks
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.peers import MOST_PROGRAMS, PeerMemory
from octavo.runtime.kernels.sampling import Choice, Draws, Limits
from octavo.runtime.kernels.steps import StepRing
from octavo.runtime.kernels.triton import eight_bits
from octavo.runtime.kernels.triton.table import cuda_table
from tests import kernel_cases
from tests.kernels.test_triton_kernels import ALWAYS_WIDE, on_device

HEADS = (32, 8, 128), (9, 3, 64), (8, 1, 256), (16, 16, 80), (64, 8, 64), (128, 8, 128)
LATENT = (16, 64, 512), (128, 64, 512)
MATRICES = (4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (576, 576), (1536, 576), (1024, 2048)
ROWS = 1, 2, 8, 16, 24, 33, 64, 100, 128, 250, 300, 2048
TYPES = "Q4_0", "Q4_1", "Q4_K", "Q8_0", "U4_32", "U4_64", "S8_32", "F8_64", "NV4_64"
PACKED = *TYPES, "Q5_0", "Q5_1", "Q5_K", "Q6_K"
OTHERS = "layer_norm", "forbid", "ban", "penalize", "count", "score", "causal_conv", "gate"
SCANS = (1, 128, 4, 64), (1, 128, 128, 64), (2, 128, 4, 128), (1, 16, 2, 64)
"""Groups, their size, heads and theirs: Mamba 2, in a part and whole, delta networks, Falcon-H1."""


def run(card):
    """Launch all."""
    table = cuda_table()
    dtypes = [*([torch.bfloat16] if card.has_bfloat16 else []), torch.float16, torch.float32]
    for dtype in dtypes:
        for cache in (dtype, *([torch.float8_e4m3fn] if card.has_fp8 and dtype != torch.float32 else [])):
            _attention(table, dtype, cache)
        _latents(table, dtype)
        for rows in ROWS if dtype != torch.float32 else ():
            for n, k in MATRICES:
                _product(table, dtype, rows, n, k)
        _packed(table, dtype)
        _between(table, dtype)
        _experts(table, dtype)
        _choices(table, dtype)
        _adapters(table, dtype)
        _cases(table, dtype)
        _steps(table, dtype)
        if card.name.startswith("sm_"):
            _peers(table, dtype)
    for narrow in dtypes[:-1]:
        _bytes(table, narrow)


def _empty(*shape, dtype):
    return torch.empty(shape, dtype=dtype)


def _ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def _attention(table, dtype, cache_dtype):
    for heads, kv_heads, size in HEADS:
        cache = _empty(64, 2, 64, kv_heads, size, dtype=cache_dtype)
        kinds = (0, 0.0), (128, 0.0), (0, 30.0)
        for requests in (1, 12, 40, 100, 300):
            q, tables = (
                _empty(requests, heads, size, dtype=dtype),
                torch.zeros(requests, 64, dtype=torch.int32),
            )
            lens = torch.full((requests,), 3000, dtype=torch.int32)
            bounds = torch.arange(requests + 1, dtype=torch.int32)
            for window, cap in kinds:
                for shared in (False, True):
                    batch = Ragged(cu_q_lens=bounds, kv_lens=lens, num_singles=requests, common_start=shared)
                    table.attention.paged_attention(q, cache, tables, batch, Scores(0.1, window, cap))
        for window, cap in kinds:
            q, batch = (
                _empty(200, heads, size, dtype=dtype),
                Ragged(cu_q_lens=_ints(0, 200), kv_lens=_ints(900)),
            )
            table.attention.paged_attention(
                q, cache, torch.zeros(1, 64, dtype=torch.int32), batch, Scores(0.1, window, cap)
            )
        new = [_empty(9, n, size, dtype=dtype) for n in (heads, kv_heads, kv_heads)]
        turn = Rotation(*(_empty(9, size // 2, dtype=torch.float32) for _ in range(2)))
        norms = HeadNorms(*(_empty(size, dtype=dtype) for _ in range(2)), 1e-6)
        for given in ((turn, None), (turn, norms), (None, None)):
            table.attention.store_kv(HeadInputs(*new, *given), cache, torch.zeros(9, dtype=torch.int64))


def _latents(table, dtype):
    for heads, rope, latent in LATENT:
        cache = _empty(64, 1, 64, 1, rope + latent, dtype=dtype)
        for lens in ([1], [1] * 40, [100]):
            q = _empty(sum(lens), heads, rope + latent, dtype=dtype)
            bounds = torch.tensor([0, *lens]).cumsum(0).int()
            batch = Ragged(cu_q_lens=bounds, kv_lens=torch.full((len(lens),), 2000, dtype=torch.int32))
            tables = torch.zeros(len(lens), 64, dtype=torch.int32)
            table.attention.paged_attention(q, cache, tables, batch, Scores(0.1, keys_only=rope))
        q, q_rope = (_empty(70, heads, n, dtype=dtype) for n in (192, 64))
        made, k_rope = _empty(70, heads, 256, dtype=dtype), _empty(70, 64, dtype=dtype)
        prompts = PlainPrompts(q, q_rope, made, k_rope, _ints(0, 70), 0.1)
        table.attention.latent_prompts(prompts, _empty(70, heads, 128, dtype=dtype))


def _product(table, dtype, rows, n, k):
    """What of products is Triton's: torch's would be computed here."""
    x, weight = _empty(rows, k, dtype=dtype), _empty(n, k, dtype=dtype)
    if rows <= 64:
        table.linear.matmul(x, weight)
        table.linear.matmul(x, weight, _empty(n, dtype=dtype))
        table.linear.split_product.matmul(x, weight)
    is_gate = rows <= 16 or (rows <= 32 and k > 2048) or (rows in (100, 250) and n * k >= 2**26)
    if is_gate:
        with without_torch():
            table.linear.gated_matmul(x, weight)


class without_torch(torch.overrides.TorchFunctionMode):
    """Products of torch give tensors without values."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.nn.functional.linear, torch.bmm, torch._scaled_mm):
            x, weight = args[:2]
            columns = weight.shape[-2] if func is torch.nn.functional.linear else weight.shape[-1]
            return torch.empty((*x.shape[:-1], columns), dtype=(kwargs or {}).get("out_dtype") or x.dtype)
        return func(*args, **(kwargs or {}))


def _blocks(name, n, k):
    kind = TYPES_BY_NAME[name]
    return Packed(torch.zeros(n, k // kind.block * kind.num_bytes, dtype=torch.uint8), name)


def _packed(table, dtype):
    with without_torch():
        for name in PACKED:
            plain = _blocks(name, 256, 2048)
            table.linear.block_dequantize(plain)
            table.linear.block_dequantize(plain, torch.zeros(3, dtype=torch.int64))
            matrix = table.linear.arrange(plain, dtype)
            for rows in (1, 8, 16, 33, 64, 100):
                x = _empty(rows, 2048, dtype=dtype)
                table.linear.block_matmul(x, matrix)
                table.linear.block_matmul(x, matrix, _empty(256, dtype=dtype))


def _bytes(table, dtype):
    """8-bit weights with rounded inputs."""
    with without_torch():
        for name, in_groups in (("F8", False), ("F8", True), ("S8", False), ("S8", True)):
            if not eight_bits.can_multiply(name):
                continue
            for n, k in ((512, 1024), (4096, 2048)):
                scales = torch.ones(n, k // 128) if in_groups else torch.ones(n)
                blocks = torch.zeros(n, k, dtype=torch.uint8)
                matrix = Packed(blocks, name, "float8" if name == "F8" else "int8", scales)
                for rows in (1, 8, 33, 64, 100, 2048):
                    x = _empty(rows, k, dtype=dtype)
                    table.linear.block_matmul(x, matrix, _empty(n, dtype=dtype))


def _between(table, dtype):
    """Norms, activations and rotary tables."""
    for rows, size in ((1, 4096), (300, 576), (8, 7168)):
        x, weight = _empty(rows, size, dtype=dtype), _empty(size, dtype=dtype)
        table.norms.rms_norm(x, weight, 1e-6)
        table.norms.add_norm(x, weight, 1e-6, x)
        for kind in ("silu", "gelu", "gelu_tanh"):
            table.activate(x, kind, gated=True)
            table.activate(x, kind, gated=False)
    positions, frequencies = torch.arange(9), _empty(64, dtype=torch.float32)
    table.attention.rotary_tables(positions, frequencies, 1.0)


def _experts(table, dtype):
    for rows in (1, 4, 40, 200, 300, 600, 4200):
        logits = _empty(rows, 64, dtype=torch.float32)
        routing = table.experts.route(logits, None, Router(8))
        x = _empty(rows, 1024, dtype=dtype)
        up, down = _empty(64, 512, 1024, dtype=dtype), _empty(64, 1024, 256, dtype=dtype)
        table.experts.dense_experts(x, routing, up, down, ExpertForm(), None)
        for name in ("Q4_K", "U4_32", "F8_64"):
            stacks = Stacks(*(_stack(name, 64, n, k) for n, k in ((256, 1024), (256, 1024), (1024, 256))))
            table.experts.block_experts(x, routing, stacks, ExpertForm(), None)
        for in_blocks in (False, True) if dtype != torch.float32 else ():
            shapes = (256, 1024), (256, 1024), (1024, 256)
            for precision in "float32", "int8", "float8":
                if precision == "float32" or eight_bits.can_multiply("F8" if precision == "float8" else "S8"):
                    stacks = Stacks(*(_stack_of_bytes(64, n, k, in_blocks, precision) for n, k in shapes))
                    table.experts.block_experts(x, routing, stacks, ExpertForm(), None)


def _stack_of_bytes(count, n, k, in_blocks, precision):
    scales = _empty(count, *((n // 128, k // 128) if in_blocks else (n,)), dtype=torch.float32)
    name = "F8" if eight_bits.can_multiply("F8") and precision != "int8" else "S8"
    return Packed(_empty(count, n, k, dtype=torch.uint8), name, precision, scales)


def _stack(name, count, n, k):
    blocks = _blocks(name, n, k).blocks
    return Packed(blocks.expand(count, -1, -1).contiguous(), name)


def _choices(table, dtype):
    for rows, size in ((1, 32000), (8, 151936)):
        logits = _empty(rows, size, dtype=dtype)
        numbers = [torch.ones(rows, dtype=torch.float64) for _ in range(6)]
        table.sampling.choose(logits)
        table.sampling.choose(logits, Draws(*numbers[:2]))
        table.sampling.choose(logits, Draws(*numbers[:2]), Limits(*numbers[:4]))
        table.sampling.widen(logits)
    seeds, limits = torch.zeros(9, 1, dtype=torch.int64), torch.zeros(9, 5, dtype=torch.float64)
    table.sampling.row_limits(torch.arange(4), torch.arange(4), seeds, limits)


def _adapters(table, dtype):
    bounds, empty = (0, 4096, 5120), torch.zeros(6, ENTRY, dtype=torch.int64)
    for most_rank in (16, 64):
        kept = LowRankTable(empty, _ints(*bounds), dtype, bounds, most_rank)
        for tokens in (1, 40, 300):
            groups = table.adapters.group(torch.zeros(tokens, dtype=torch.int32), len(empty))
            x, out = _empty(tokens, 4096, dtype=dtype), _empty(tokens, 5120, dtype=dtype)
            for bias in (None, _empty(5120, dtype=dtype)):
                table.adapters.add_low_rank(x, out, groups, kept, bias)
                table.adapters.replace(x, out, groups, kept, bias)
            ids, slots = (torch.zeros(tokens, dtype=kind) for kind in (torch.int64, torch.int32))
            table.adapters.change_lookup(ids, out, slots, kept, 1.0)


def _cases(table, dtype):
    """What the tests of kernels give those that have no shapes of models here, and scans of such shapes."""
    for op in (*OTHERS, "scan"):
        if dtype == torch.float32 or op not in ALWAYS_WIDE:
            for case in kernel_cases.CASES[op]():
                kernel_cases.run(table, op, on_device(case, dtype))
    for case in kernel_cases.scans(SCANS):
        kernel_cases.run(table, "scan", on_device(case, dtype))


def _steps(table, dtype):
    """Both ends of a captured step, and masks of structured output."""
    ids, rows = torch.zeros(3, 2000, dtype=torch.int64), torch.zeros(1, 40, 68, dtype=torch.int32)
    ring = StepRing(ids, ids, ids.float(), ids[0, :1], ids, ids)
    table.steps.begin(ring, ids[0], ids[0], rows, ids[0, :130], rows[:, :32])
    table.steps.mask(ring, _empty(32, 32000, dtype=dtype), torch.zeros(4, 1000, dtype=torch.int32))
    for drafts in (ids[0, :0], ids[0, :32]):
        table.steps.end(ring, ids[0, :32], ids[0, :32].float(), ids[0, :32], ids[0], 32000, drafts)


def _peers(table, dtype):
    """Sums over ranks, by PTX of NVIDIA's."""
    for size in (2, 8):
        turns, places = torch.zeros(MOST_PROGRAMS, dtype=torch.int32), torch.zeros(size, dtype=torch.int64)
        memory = PeerMemory(0, size, places, places, turns, 1 << 20)
        for x in (_empty(1, 4096, dtype=dtype), _empty(64, 4096, dtype=dtype)):
            table.peers.gather(memory, x)
            for two_shots in (False, True):
                table.peers.sum(memory, x, two_shots=two_shots)
                table.peers.sum_add_norm(memory, x, x[0], 1e-6, x, two_shots=two_shots)
        choice = Choice(torch.zeros(9, dtype=torch.int64), torch.zeros(9))
        table.peers.choose(memory, choice, 100)
