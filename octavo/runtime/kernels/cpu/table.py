"""The table of compiled CPU kernels, or that of the references where they cannot be had.

Activations are float32. Tensors go down as pointers with sizes and strides; the library keeps none of them.
"""

from dataclasses import replace
from functools import partial
from typing import overload

import torch
from torch import Tensor

from octavo.base.gguf import BLOCK_TYPES
from octavo.runtime.kernels.activations import ActivationKernels, Gate
from octavo.runtime.kernels.attention import AttentionKernels, HeadInputs, Ragged, Scores
from octavo.runtime.kernels.choice import TORCH_SAMPLING, TorchChoose
from octavo.runtime.kernels.cpu.call_recorder import Arena, CallRecorder, Refused, new_memory
from octavo.runtime.kernels.cpu.library import Library, load_library
from octavo.runtime.kernels.linear import LinearKernels, Packed
from octavo.runtime.kernels.norms import NormKernels
from octavo.runtime.kernels.precision import BFLOAT16_TYPES, INTEGER_TYPES, InputPrecision
from octavo.runtime.kernels.ref.elementwise import gated_matmul, matmul
from octavo.runtime.kernels.ref.noise import row_limits
from octavo.runtime.kernels.ref.steps import STEP_KERNELS
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.kernels.sampling import Choice, SamplingKernels
from octavo.runtime.kernels.table import KernelTable

_TYPE_IDS = {kind.name: number for number, kind in BLOCK_TYPES.items()}
_BLOCKS = {kind.name: kind for kind in BLOCK_TYPES.values()}
_CACHE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}
_SILU, _GELU, _GELU_TANH = 0, 1, 2
_LARGE_BYTES = 1 << 20
_ROWS_OF_TILES = 64  # that multiply weights as they are unpacked
_FEW_ROWS = 512  # up to here a feed-forward block is as fast in two kernels
_MOST_LAID_OUT_BYTES = 16 << 20  # of its matrices, which all rows pass
_GATES: dict[Gate, int] = {"silu": _SILU, "gelu": _GELU, "gelu_tanh": _GELU_TANH}


def cpu_table(threads: int) -> KernelTable:
    """Every op for the CPU, run by `threads` threads."""
    library = load_library()
    if library is None:
        return replace(ref_table(), sampling=TORCH_SAMPLING)
    return table_of(library, threads)


def table_of(library: Library, threads: int) -> KernelTable:
    """The ops of a loaded library."""
    kernels = _CompiledKernels(library, threads)
    tiles = library.has_tiles
    return KernelTable(
        name="cpu",
        attention=AttentionKernels(kernels.store_kv, kernels.paged_attention, kernels.rotary_tables),
        norms=NormKernels(kernels.rms_norm, kernels.sandwich_norm),
        activations=ActivationKernels(
            silu_and_mul=partial(kernels.activation, kind=_SILU, gated=True),
            gelu_and_mul=partial(kernels.activation, kind=_GELU, gated=True),
            gelu_tanh_and_mul=partial(kernels.activation, kind=_GELU_TANH, gated=True),
            gelu=partial(kernels.activation, kind=_GELU, gated=False),
            gelu_tanh=partial(kernels.activation, kind=_GELU_TANH, gated=False),
        ),
        linear=LinearKernels(
            matmul=matmul,
            gated_matmul=gated_matmul,
            block_dequantize=kernels.block_dequantize,
            block_gather=kernels.block_gather,
            block_matmul=kernels.block_matmul,
            input_precision="bfloat16" if tiles else "int16",
            gated_block_matmul=kernels.gated_block_matmul if tiles else None,
            block_feed_forward=kernels.block_feed_forward if tiles else None,
            block_greedy=kernels.block_greedy if tiles else None,
        ),
        sampling=SamplingKernels(TorchChoose(kernels.greedy), row_limits),
        steps=replace(STEP_KERNELS, record_calls=CallRecorder(library).record),
    )


class _CompiledKernels:
    """The ops over one loaded library and a number of threads."""

    def __init__(self, library: Library, threads: int) -> None:
        self._library = library
        self._threads = threads
        self._arena = Arena(new_memory())

    def store_kv(self, new: HeadInputs, cache: Tensor, slots: Tensor) -> Tensor:
        """See attention.StoreKV."""
        q, k, v, rotation, norms = new
        q_weight, k_weight, eps = norms or (None, None, 0.0)
        cos, sin, interleaved = rotation or (None, None, False)
        assert cache.is_contiguous()
        assert cos is None or sin is None or (cos.is_contiguous() and sin.is_contiguous())
        self._library.octavo_store_kv(
            _pointer(q),
            q.stride(0),
            q.shape[1],
            _pointer(k),
            k.stride(0),
            _pointer(v),
            v.stride(0),
            cache.data_ptr(),
            _CACHE_TYPES[cache.dtype],
            *cache.shape[2:4],
            q.shape[2],
            slots.data_ptr(),
            len(slots),
            _address(q_weight),
            _address(k_weight),
            eps,
            _address(cos),
            _address(sin),
            0 if cos is None else cos.shape[-1],
            interleaved,
            self._threads,
        )
        return q

    def paged_attention(
        self,
        q: Tensor,
        cache: Tensor,
        block_tables: Tensor,
        batch: Ragged,
        scores: Scores,
        input_precision: InputPrecision = "float32",
    ) -> Tensor:
        """See attention.PagedAttention."""
        cu_q_lens, kv_lens = batch.cu_q_lens, batch.kv_lens
        assert cache.is_contiguous() and block_tables.dtype == cu_q_lens.dtype == kv_lens.dtype == torch.int32
        out = self._placed(_empty_like(q))
        self._library.octavo_attention(
            _pointer(q),
            q.stride(0),
            q.shape[1],
            cache.data_ptr(),
            _CACHE_TYPES[cache.dtype],
            *cache.shape[2:4],
            q.shape[2],
            block_tables.data_ptr(),
            block_tables.stride(0),
            cu_q_lens.data_ptr(),
            kv_lens.data_ptr(),
            len(kv_lens),
            *scores,
            out.data_ptr(),
            self._threads,
            input_precision == "bfloat16",
        )
        return out

    @overload
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: None = None) -> Tensor: ...
    @overload
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]: ...
    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """See norms.RMSNorm."""
        y, total = self._rms_norm(x, None, weight, eps, residual)
        return y if total is None else (y, total)

    def sandwich_norm(
        self, x: Tensor, inner: Tensor, weight: Tensor, eps: float, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See norms.SandwichNorm."""
        y, total = self._rms_norm(x, inner, weight, eps, residual)
        assert total is not None
        return y, total

    def _rms_norm(
        self, x: Tensor, inner: Tensor | None, weight: Tensor, eps: float, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        y = self._placed(_empty_like(x))
        total = None if residual is None else self._placed(_empty_like(x))
        self._library.octavo_rms_norm(
            _pointer(x),
            x.stride(0),
            x.shape[0],
            1 if x.dim() == 2 else x.shape[1],
            x.shape[-1],
            _address(inner),
            weight.data_ptr(),
            eps,
            None if residual is None else _pointer(residual),
            0 if residual is None else residual.stride(0),
            _address(total),
            y.data_ptr(),
            self._threads,
        )
        return y, total

    def activation(self, x: Tensor, *, kind: int, gated: bool) -> Tensor:
        """See activations.Activation."""
        assert x.is_contiguous()
        rows, width = x.shape
        size = width // 2 if gated else width
        y = self._placed(torch.empty((rows, size)))
        self._library.octavo_activation(x.data_ptr(), rows, size, kind, gated, y.data_ptr(), self._threads)
        return y

    def rotary_tables(self, positions: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        """See attention.RotaryTables."""
        cos, sin = (torch.empty((len(positions), len(frequencies))) for _ in range(2))
        self._library.octavo_rotary_tables(
            positions.data_ptr(),
            len(positions),
            frequencies.data_ptr(),
            len(frequencies),
            factor,
            cos.data_ptr(),
            sin.data_ptr(),
            self._threads,
        )
        return cos, sin

    def greedy(self, logits: Tensor) -> Choice:
        """See choice.greedy."""
        rows, size = logits.shape
        ids, max_logits = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
        self._library.octavo_greedy(
            logits.data_ptr(),
            logits.stride(0),
            rows,
            size,
            ids.data_ptr(),
            max_logits.data_ptr(),
            self._threads,
        )
        return Choice(ids, max_logits)

    def block_dequantize(self, blocks: Tensor, type_name: str) -> Tensor:
        """See linear.BlockDequantize."""
        return self._dequantize(blocks, None, type_name, 1.0)

    def block_gather(self, blocks: Tensor, places: Tensor, type_name: str, scale: float = 1.0) -> Tensor:
        """See linear.BlockGather."""
        return self._dequantize(blocks, places, type_name, scale)

    def _dequantize(self, blocks: Tensor, places: Tensor | None, type_name: str, scale: float) -> Tensor:
        kind = _BLOCKS[type_name]
        rows = len(blocks if places is None else places)
        out = torch.empty((rows, blocks.shape[1] // kind.num_bytes * kind.block))
        self._library.octavo_dequantize(
            blocks.data_ptr(),
            _address(places),
            *out.shape,
            blocks.stride(0),
            _TYPE_IDS[type_name],
            scale,
            out.data_ptr(),
            self._threads,
        )
        return out

    def block_matmul(
        self,
        x: Tensor,
        blocks: Tensor,
        type_name: str,
        bias: Tensor | None = None,
        input_precision: InputPrecision = "float32",
        out: Tensor | None = None,
    ) -> Tensor:
        """See linear.BlockMatmul."""
        if out is None:
            out = self._placed(torch.empty((x.shape[0], blocks.shape[0])))
        if input_precision in ("int8", "int16") and type_name in INTEGER_TYPES:
            matmul = getattr(self._library, f"octavo_matmul_{input_precision}")
        elif input_precision == "bfloat16" and type_name in BFLOAT16_TYPES:
            matmul = self._library.octavo_matmul_bf16
        else:
            matmul = self._library.octavo_matmul
        factors = _factors(x, blocks, type_name)
        matmul(*factors, _address(bias), _pointer(out), out.stride(0), self._threads)
        return out

    def block_greedy(
        self, x: Tensor, blocks: Tensor, type_name: str, input_precision: InputPrecision
    ) -> tuple[Tensor, Tensor] | None:
        """See linear.BlockGreedy; products of tiles of few rows only."""
        rows = x.shape[0]
        if input_precision != "bfloat16" or type_name not in BFLOAT16_TYPES or rows > _ROWS_OF_TILES:
            return None
        ids, max_logits = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
        find = self._library.octavo_greedy_matmul_bf16
        find(*_factors(x, blocks, type_name), ids.data_ptr(), max_logits.data_ptr(), self._threads)
        return ids, max_logits

    def gated_block_matmul(
        self, x: Tensor, blocks: Tensor, type_name: str, gate: Gate, input_precision: InputPrecision
    ) -> Tensor | None:
        """See linear.GatedBlockMatmul; products of tiles only."""
        if input_precision != "bfloat16" or type_name not in BFLOAT16_TYPES:
            return None
        size = blocks.shape[0] // 2
        out = self._placed(torch.empty((x.shape[0], size)))
        self._library.octavo_gated_matmul_bf16(
            _pointer(x),
            *x.shape,
            x.stride(0),
            blocks.data_ptr(),
            size,
            blocks.stride(0),
            _TYPE_IDS[type_name],
            _GATES[gate],
            out.data_ptr(),
            self._threads,
        )
        return out

    def block_feed_forward(
        self, x: Tensor, up: Packed, gate: Gate, down: Packed, input_precision: InputPrecision
    ) -> Tensor | None:
        """See linear.BlockFeedForward; for many rows, and matrices that fit a cache when unpacked."""
        (up_blocks, up_type), (down_blocks, down_type) = up, down
        outputs, inner = down_blocks.shape[0], up_blocks.shape[0] // 2
        laid_out = 2 * inner * (2 * x.shape[1] + outputs)
        fits = x.shape[0] > _FEW_ROWS and inner % 32 == 0 and laid_out <= _MOST_LAID_OUT_BYTES
        if input_precision != "bfloat16" or not fits or not {up_type, down_type} <= BFLOAT16_TYPES:
            return None
        out = self._placed(torch.empty((x.shape[0], outputs)))
        self._library.octavo_feed_forward_bf16(
            _pointer(x),
            *x.shape,
            x.stride(0),
            up_blocks.data_ptr(),
            inner,
            up_blocks.stride(0),
            _TYPE_IDS[up_type],
            _GATES[gate],
            down_blocks.data_ptr(),
            outputs,
            down_blocks.stride(0),
            _TYPE_IDS[down_type],
            out.data_ptr(),
            self._threads,
        )
        return out

    def _placed(self, made: Tensor) -> Tensor:
        """A tensor of that kind, `made` itself if it is small or there is no room.

        Large ones lie in memory that stays ours: pages from the system cost a prompt as much as its norms.
        """
        if made.nbytes < _LARGE_BYTES or self._library.call_log is not None:
            return made
        try:
            return self._arena.like(made)
        except Refused:
            return made


def _factors(x: Tensor, blocks: Tensor, type_name: str) -> tuple[int, ...]:
    """What all products begin with."""
    matrix = blocks.data_ptr(), blocks.shape[0], blocks.stride(0), _TYPE_IDS[type_name]
    return _pointer(x), *x.shape, x.stride(0), *matrix


def _pointer(x: Tensor) -> int:
    """Address of float32 activations that are contiguous in all but the first axis."""
    assert x.dtype == torch.float32, f"activations must be float32, got {x.dtype}"
    assert x.stride(-1) == 1 and (x.dim() == 2 or x.shape[1] == 1 or x.stride(1) == x.shape[2])
    return x.data_ptr()


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _empty_like(x: Tensor) -> Tensor:
    """A contiguous tensor of x's shape; half the price of torch.empty(x.shape)."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
