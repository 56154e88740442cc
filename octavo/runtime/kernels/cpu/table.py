"""The table of compiled CPU kernels, or that of the references where they cannot be had.

Activations are float32. Tensors go down as pointers with sizes and strides; the library keeps none of them.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from octavo.runtime.kernels.activations import Activation
from octavo.runtime.kernels.adapters import AdapterKernels, LowRankTable
from octavo.runtime.kernels.attention import AttentionKernels, HeadInputs, Pieces, Ragged, Scores, Share
from octavo.runtime.kernels.choice import TORCH_SAMPLING, choose
from octavo.runtime.kernels.cpu.arguments import ACTIVATIONS, TYPE_IDS, Way, address_of, rows_of, way_of
from octavo.runtime.kernels.cpu.call_recorder import Arena, CallRecorder, Refused, new_memory
from octavo.runtime.kernels.cpu.experts import CompiledExperts
from octavo.runtime.kernels.cpu.library import Library, Products, load_library
from octavo.runtime.kernels.cpu.ranks import CompiledRanks
from octavo.runtime.kernels.cpu.recurrent import CompiledRecurrence
from octavo.runtime.kernels.experts import ExpertKernels
from octavo.runtime.kernels.linear import LinearKernels, Packed
from octavo.runtime.kernels.norms import NormKernels, ResidualUpdate
from octavo.runtime.kernels.recurrent import RecurrentKernels
from octavo.runtime.kernels.ref.cache import paged_attention as reference
from octavo.runtime.kernels.ref.elementwise import gated_matmul, matmul
from octavo.runtime.kernels.ref.experts import dense_experts
from octavo.runtime.kernels.ref.noise import row_limits
from octavo.runtime.kernels.ref.steps import STEP_KERNELS
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.kernels.sampling import Choice
from octavo.runtime.kernels.table import KernelTable

_CACHE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}
_FLOATS = ("F32", "F16", "BF16")
_LARGE_BYTES = 1 << 20
_ROWS_OF_TILES = 64  # that multiply weights as they are unpacked
_FEW_ROWS = 512  # of bfloat16 meet weights where they lie; of other types a block is as fast in two kernels
_MOST_LAID_OUT_BYTES = 16 << 20  # of its matrices, which all rows pass


def cpu_table(threads: int, snapshot: Path | None = None) -> KernelTable:
    """Return every op for the CPU, run by `threads` threads."""
    library = load_library(snapshot)
    if library is None:
        return replace(ref_table(), sampling=TORCH_SAMPLING)
    return table_of(library, threads)


def table_of(library: Library, threads: int) -> KernelTable:
    """Return the ops of a loaded library."""
    kernels = _CompiledKernels(library, threads)
    experts = CompiledExperts(library, threads)
    recurrence = CompiledRecurrence(library, threads)
    ranks = CompiledRanks(library, kernels.add_norm)
    tiles = library.bfloat16_products == Products.TILES
    rounds = library.bfloat16_products != Products.NONE
    return KernelTable(
        name="cpu",
        attention=AttentionKernels(
            kernels.store_kv,
            kernels.paged_attention,
            kernels.rotary_tables,
            kernels.cut_chunks,
            kernels.distance_attention,
            input_precision="bfloat16" if tiles else "float32",
        ),
        norms=NormKernels(kernels.rms_norm, kernels.add_norm, kernels.sandwich_norm, kernels.layer_norm),
        activate=kernels.activate,
        xielu=kernels.xielu,
        linear=LinearKernels(
            matmul=matmul,
            gated_matmul=gated_matmul,
            block_dequantize=kernels.block_dequantize,
            block_matmul=kernels.block_matmul,
            select_inputs=kernels.select_inputs,
            join=kernels.join,
            input_precision="bfloat16" if tiles else "int16",
            dense_precision="bfloat16" if tiles or (rounds and not library.prefers_floats) else "float32",
            rounds=rounds,
            gated_block_matmul=kernels.gated_block_matmul if rounds or library.gates_floats else None,
            block_feed_forward=kernels.block_feed_forward if tiles else None,
            block_greedy=kernels.block_greedy if tiles else None,
            activated_block_matmul=kernels.activated_block_matmul if tiles else None,
            splits_floats=tiles,
            own_rows=ranks.own_rows,
        ),
        experts=ExpertKernels(experts.route, dense_experts, experts.block_experts),
        recurrent=RecurrentKernels(recurrence.causal_conv, recurrence.scan, recurrence.gate),
        sampling=replace(
            TORCH_SAMPLING,
            choose=partial(choose, kernels.greedy),
            row_limits=row_limits,
            forbid=kernels.forbid,
        ),
        steps=replace(STEP_KERNELS, record_calls=CallRecorder(library, threads).record),
        adapters=AdapterKernels(kernels.add_low_rank, kernels.replace, kernels.change_lookup),
        peers=ranks.kernels,
    )


class _CompiledKernels:
    """The ops over one loaded library and a number of threads; each is what its family says of it."""

    def __init__(self, library: Library, threads: int) -> None:
        self._library = library
        self._threads = threads
        self._arena = Arena(new_memory())

    def store_kv(self, new: HeadInputs, cache: Tensor, slots: Tensor) -> Tensor:
        q, k, v, rotation, norms, q_factors = new
        q_weight, k_weight, eps, follows = norms or (None, None, 0.0, False)
        cos, sin, interleaved = rotation or (None, None, False)
        assert cos is None or sin is None or (cos.is_contiguous() and sin.is_contiguous())
        heads = *rows_of(q), q.shape[1], *rows_of(k), *rows_of(v)
        to = *_cache(cache, q), slots.data_ptr(), len(slots)
        normed = 0 if k_weight is None else len(k_weight)
        norm = address_of(q_weight), address_of(k_weight), normed, eps, follows, address_of(q_factors)
        half = 0 if cos is None else cos.shape[-1]
        turn = address_of(cos), address_of(sin), half, interleaved
        self._library.octavo_store_kv(*heads, *to, *norm, *turn, self._threads)
        return q

    def paged_attention(
        self,
        q: Tensor,
        cache: Tensor,
        block_tables: Tensor,
        batch: Ragged,
        scores: Scores,
        share: Share | None = None,
    ) -> Tensor:
        """See attention.PagedAttention; ranks of a CPU that share a context show that it is right, slowly."""
        if share is not None:
            return reference(q, cache, block_tables, batch, scores, share)
        cu_q_lens, kv_lens = batch.cu_q_lens, batch.kv_lens
        assert block_tables.dtype == cu_q_lens.dtype == kv_lens.dtype == torch.int32
        out = self._placed(_empty_like(q))
        *how, input_precision, is_causal, _, sinks = scores
        tables = block_tables.data_ptr(), block_tables.stride(0)
        lens = cu_q_lens.data_ptr(), kv_lens.data_ptr(), len(kv_lens)
        end = out.data_ptr(), self._threads, input_precision == "bfloat16", is_causal, address_of(sinks)
        self._library.octavo_attention(*rows_of(q), q.shape[1], *_cache(cache, q), *tables, *lens, *how, *end)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, None, weight, eps, None)[0]

    def add_norm(
        self, x: ResidualUpdate, weight: Tensor, eps: float, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See norms.AddNorm; no product leaves partial sums here."""
        assert isinstance(x, Tensor)
        return self._norm(x, None, weight, eps, residual)

    def sandwich_norm(
        self, x: Tensor, inner: Tensor, weight: Tensor, eps: float, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self._norm(x, inner, weight, eps, residual)

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        residual: Tensor | None = None,
    ) -> Tensor:
        y = self._placed(_empty_like(x))
        end = address_of(weight), address_of(bias), eps, y.data_ptr(), self._threads
        stream = (None, 0) if residual is None else rows_of(residual)
        self._library.octavo_layer_norm(*rows_of(x), *x.shape, *stream, *end)
        return y

    def _norm(
        self, x: Tensor, inner: Tensor | None, weight: Tensor, eps: float, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the norm of the sum, and the sum; without a residual stream, the norm twice."""
        y = self._placed(_empty_like(x))
        total = y if residual is None else self._placed(_empty_like(x))
        stream = (None, 0, None) if residual is None else (*rows_of(residual), total.data_ptr())
        shape = x.shape[0], 1 if x.dim() == 2 else x.shape[1], x.shape[-1]
        end = address_of(inner), weight.data_ptr(), eps, *stream, y.data_ptr(), self._threads
        self._library.octavo_rms_norm(*rows_of(x), *shape, *end)
        return y, total

    def activate(self, x: Tensor, activation: Activation, *, gated: bool) -> Tensor:
        assert x.is_contiguous()
        rows, width = x.shape
        y = self._placed(torch.empty((rows, width // 2 if gated else width)))
        kind = ACTIVATIONS[activation]
        self._library.octavo_activation(x.data_ptr(), *y.shape, kind, gated, y.data_ptr(), self._threads)
        return y

    def xielu(self, x: Tensor, learned: list[Tensor]) -> Tensor:
        y = self._placed(torch.empty(x.shape))
        given = *rows_of(x), *x.shape, *(each.data_ptr() for each in learned), y.data_ptr()
        self._library.octavo_xielu(*given, self._threads)
        return y

    def rotary_tables(self, positions: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        cos, sin = (torch.empty((len(positions), len(frequencies))) for _ in range(2))
        given = positions.data_ptr(), len(positions), frequencies.data_ptr(), len(frequencies), factor
        self._library.octavo_rotary_tables(*given, cos.data_ptr(), sin.data_ptr(), self._threads)
        return cos, sin

    def distance_attention(
        self, q: Tensor, cache: Tensor, block_tables: Tensor, batch: Ragged, terms: Tensor, scale: float
    ) -> Tensor:
        assert cache.dtype != torch.int8
        out = self._placed(_empty_like(q))
        lens = batch.cu_q_lens.data_ptr(), batch.kv_lens.data_ptr(), len(batch.kv_lens)
        how = block_tables.data_ptr(), block_tables.stride(0), *lens, *rows_of(terms), len(terms), scale
        attend = self._library.octavo_distance_attention
        attend(*rows_of(q), q.shape[1], *_cache(cache, q), *how, out.data_ptr(), self._threads)
        return out

    def cut_chunks(self, batch: Ragged, block_tables: Tensor, size: int, blocks: int, most: int) -> Pieces:
        requests, singles = len(batch.kv_lens), batch.num_singles
        shape = (singles + (requests - singles) * most, blocks)
        bounds, lens, own = (torch.empty(n, dtype=torch.int32) for n in (shape[0] + 1, shape[0], shape))
        given = batch.cu_q_lens.data_ptr(), batch.kv_lens.data_ptr(), requests, singles, most, size, blocks
        tables = block_tables.data_ptr(), block_tables.stride(0), block_tables.shape[1]
        made = bounds.data_ptr(), lens.data_ptr(), own.data_ptr()
        self._library.octavo_cut_chunks(*given, *tables, *made, self._threads)
        return Pieces(bounds, lens, own)

    def greedy(self, logits: Tensor) -> Choice:
        choice = _new_choice(len(logits))
        found = choice.token_ids.data_ptr(), choice.max_logits.data_ptr()
        self._library.octavo_greedy(logits.data_ptr(), logits.stride(0), *logits.shape, *found, self._threads)
        return choice

    def forbid(self, logits: Tensor, rows: Tensor, numbers: Tensor, words: Tensor) -> None:
        assert rows.dtype == numbers.dtype == torch.int64
        places = rows.data_ptr(), numbers.data_ptr(), len(rows)
        end = words.data_ptr(), words.shape[1], self._threads
        self._library.octavo_forbid(*rows_of(logits), logits.shape[1], *places, *end)

    def block_dequantize(self, matrix: Packed, places: Tensor | None = None, scale: float = 1.0) -> Tensor:
        blocks = matrix.blocks
        out = torch.empty((len(blocks if places is None else places), matrix.num_inputs))
        how = blocks.stride(0), TYPE_IDS[matrix.type_name], scale
        dequantize = self._library.octavo_dequantize
        dequantize(blocks.data_ptr(), address_of(places), *out.shape, *how, out.data_ptr(), self._threads)
        return out

    def block_matmul(
        self, x: Tensor, matrix: Packed, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        if out is None:
            out = self._placed(torch.empty((x.shape[0], matrix.blocks.shape[0])))
        given, way = (*_factors(x, matrix), address_of(bias), *rows_of(out)), way_of(matrix)
        if way in (Way.INT8, Way.INT16):
            self._library.octavo_matmul_integers(*given, way, self._threads)
        elif way == Way.BFLOAT16 and self._rounds(matrix):
            self._library.octavo_matmul_bf16(*given, self._threads)
        else:
            self._library.octavo_matmul(*given, self._threads)
        return out

    def add_low_rank(
        self, x: Tensor, out: Tensor, slots: Tensor, table: LowRankTable, bias: Tensor | None
    ) -> None:
        assert len(slots) == len(x) and slots.dtype == torch.int32
        bounds = table.bounds.data_ptr(), len(table.bounds) - 1
        of_rows = slots.data_ptr(), table.entries.data_ptr()
        end = address_of(bias), table.dtype == torch.bfloat16, self._threads
        address, stride = rows_of(x)
        self._library.octavo_add_low_rank(address, stride, *x.shape, *rows_of(out), *of_rows, *bounds, *end)

    def replace(
        self, x: Tensor, out: Tensor, slots: Tensor, table: LowRankTable, bias: Tensor | None
    ) -> None:
        assert len(slots) == len(x) and slots.dtype == torch.int32
        of_rows = slots.data_ptr(), table.whole_entries.data_ptr(), table.entries.data_ptr(), out.shape[1]
        end = address_of(bias), table.dtype == torch.bfloat16, self._threads
        address, stride = rows_of(x)
        self._library.octavo_replace_products(address, stride, *x.shape, *rows_of(out), *of_rows, *end)

    def change_lookup(
        self, ids: Tensor, out: Tensor, slots: Tensor, table: LowRankTable, scale: float
    ) -> None:
        assert len(slots) == len(ids) and slots.dtype == torch.int32 and ids.dtype == torch.int64
        entries = slots.data_ptr(), table.entries.data_ptr(), table.whole_entries.data_ptr()
        end = scale, table.dtype == torch.bfloat16, self._threads
        self._library.octavo_change_lookup(ids.data_ptr(), *out.shape, *rows_of(out), *entries, *end)

    def select_inputs(self, x: Tensor, places: Tensor) -> Tensor:
        assert places.dtype == torch.int32
        y = self._placed(torch.empty((x.shape[0], len(places))))
        end = places.data_ptr(), len(places), y.data_ptr(), self._threads
        self._library.octavo_select_inputs(*rows_of(x), x.shape[0], *end)
        return y

    def join(self, *parts: Tensor) -> Tensor:
        assert len({len(part) for part in parts}) == 1
        y = self._placed(torch.empty((len(parts[0]), sum(part.shape[1] for part in parts))))
        for x, columns in zip(parts, torch.split(y, [part.shape[1] for part in parts], dim=1), strict=True):
            self._library.octavo_copy_rows(*rows_of(x), *x.shape, *rows_of(columns), self._threads)
        return y

    def block_greedy(self, x: Tensor, matrix: Packed) -> tuple[Tensor, Tensor] | None:
        """See linear.BlockGreedy; products of tiles of few rows only."""
        if way_of(matrix) != Way.BFLOAT16 or x.shape[0] > _ROWS_OF_TILES:
            return None
        choice = _new_choice(x.shape[0])
        found = choice.token_ids.data_ptr(), choice.max_logits.data_ptr()
        self._library.octavo_greedy_matmul_bf16(*_factors(x, matrix), *found, self._threads)
        return choice

    def activated_block_matmul(
        self, x: Tensor, matrix: Packed, bias: Tensor | None, activation: Activation
    ) -> Tensor | None:
        """See linear.ActivatedBlockMatmul; products of tiles only."""
        if way_of(matrix) != Way.BFLOAT16:
            return None
        out = self._placed(torch.empty((x.shape[0], matrix.blocks.shape[0])))
        end = address_of(bias), ACTIVATIONS[activation], out.data_ptr(), self._threads
        self._library.octavo_activated_matmul_bf16(*_factors(x, matrix), *end)
        return out

    def gated_block_matmul(self, x: Tensor, matrix: Packed, gate: Activation) -> Tensor | None:
        """See linear.GatedBlockMatmul; products in bfloat16, and with floats in long vectors, only."""
        rounds = way_of(matrix) == Way.BFLOAT16 and self._rounds(matrix)
        if not rounds and not (self._library.gates_floats and matrix.type_name in _FLOATS):
            return None
        out = self._placed(torch.empty((x.shape[0], matrix.blocks.shape[0] // 2)))
        end = ACTIVATIONS[gate], out.data_ptr(), self._threads
        multiply = self._library.octavo_gated_matmul_bf16 if rounds else self._library.octavo_gated_matmul
        multiply(*_factors(x, matrix, 2), *end)
        return out

    def block_feed_forward(self, x: Tensor, up: Packed, gate: Activation, down: Packed) -> Tensor | None:
        """See linear.BlockFeedForward; where weights are used as they lie, or fit a cache unpacked."""
        (count, size), outputs, inner = x.shape, down.blocks.shape[0], up.blocks.shape[0] // 2
        types = {up.type_name, down.type_name}
        in_place = types == {"BF16"} and size % 32 == 0 and count > _ROWS_OF_TILES
        is_small = 2 * inner * (2 * size + outputs) <= _MOST_LAID_OUT_BYTES
        fits = is_small if count > _FEW_ROWS else in_place
        if not fits or inner % 32 or "F32" in types or any(way_of(y) != Way.BFLOAT16 for y in (up, down)):
            return None
        out = self._placed(torch.empty((x.shape[0], outputs)))
        end = ACTIVATIONS[gate], *_weights(down), out.data_ptr(), self._threads
        self._library.octavo_feed_forward_bf16(*_factors(x, up, 2), *end)
        return out

    def _rounds(self, matrix: Packed) -> bool:
        """Return True if a kernel for bfloat16 takes a matrix; floats, as sums of two, only tiles take."""
        return self._library.bfloat16_products > (
            Products.DOTS if matrix.type_name == "F32" else Products.NONE
        )

    def _placed(self, made: Tensor) -> Tensor:
        """Return a tensor of that kind, `made` itself if it is small or there is no room.

        Large ones lie in memory that stays ours: pages from the system cost a prompt as much as its norms.
        """
        if made.nbytes < _LARGE_BYTES or self._library.call_log is not None:
            return made
        try:
            return self._arena.like(made)
        except Refused:
            return made


def _cache(cache: Tensor, q: Tensor) -> tuple[int, ...]:
    """Describe a cache for heads of the size of q's."""
    assert cache.is_contiguous()
    return cache.data_ptr(), _CACHE_TYPES[cache.dtype], *cache.shape[1:4], q.shape[2]


def _factors(x: Tensor, matrix: Packed, shares: int = 1) -> tuple[int, ...]:
    address, stride = rows_of(x)
    return address, *x.shape, stride, *_weights(matrix, shares)


def _weights(matrix: Packed, shares: int = 1) -> tuple[int, ...]:
    """Describe a matrix. shares: 2 for gates and values, of which there are half as many as rows."""
    blocks = matrix.blocks
    return blocks.data_ptr(), blocks.shape[0] // shares, blocks.stride(0), TYPE_IDS[matrix.type_name]


def _new_choice(rows: int) -> Choice:
    return Choice(torch.empty(rows, dtype=torch.int64), torch.empty(rows))


def _empty_like(x: Tensor) -> Tensor:
    """Return a contiguous tensor of x's shape; half the price of torch.empty(x.shape)."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
