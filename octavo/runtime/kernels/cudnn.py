"""Prefill attention by cuDNN: one fused kernel over the paged cache, planned per shape and kept.

`Prefill` needs the package nvidia-cudnn-frontend; the attention back end `cudnn` calls it. A plan knows the
greatest number and length of sequences only, so that a few plans, for rounded sizes, serve every step.
What is called here is described in
https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.base.log import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Sequences:
    """New tokens of some sequences, and where all their keys are; made once for all layers of a step.

    longest: at least the most new tokens of a sequence
    q_lens, kv_lens: [B, 1, 1, 1] int32; 0 from the last sequence on
    starts:  [B + 1, 1, 1, 1] int32, first element of each sequence in queries and outputs
    blocks:  [B, 1, max_blocks, 1] int32
    ends:    [B, 1] int64, the block each sequence ends in; the null block, if it fills that or is none
    behind:  [B, block_size] int64, the slots of that block behind the end, in order, the last repeated
    zero:    [] of the cache's type
    """

    longest: int
    q_lens: Tensor
    kv_lens: Tensor
    starts: Tensor
    blocks: Tensor
    ends: Tensor
    behind: Tensor
    zero: Tensor


class _Shape(NamedTuple):
    """What a plan is made for."""

    q: tuple[int, ...]
    cache: tuple[int, ...]
    table_width: int
    dtype: torch.dtype
    scale: float


class Prefill:
    """Causal attention of new tokens to all up to themselves, with the plans made so far."""

    def __init__(self) -> None:
        import cudnn

        self._cudnn: Any = cudnn
        self._handle = cudnn.create_handle()
        self._plans: dict[_Shape, _Plan | None] = {}

    def __call__(self, q: Tensor, cache: Tensor, sequences: Sequences, out: Tensor, scale: float) -> bool:
        """Fill `out`. False: there is no kernel for such shapes here.

        q, out: [T, num_heads, head_dim], contiguous, bfloat16 or float16
        cache:  [num_blocks, 2, block_size, num_kv_heads, head_dim], of the same type
        """
        size = (len(sequences.q_lens), q.shape[1], sequences.longest, q.shape[2])
        shape = _Shape(size, tuple(cache.shape), sequences.blocks.shape[2], q.dtype, scale)
        if shape not in self._plans:
            self._plans[shape] = self._make(shape)
        plan = self._plans[shape]
        if plan is None:
            return False
        # The kernel multiplies these by 0, which does not help if a broken request left a NaN there.
        cache[:, 1].index_put_((sequences.ends, sequences.behind), sequences.zero)
        self._cudnn.set_stream(self._handle, torch.cuda.current_stream().cuda_stream)
        plan.run(self._handle, q, cache, sequences, out)
        return True

    def _make(self, shape: _Shape) -> "_Plan | None":
        try:
            return _Plan(self._cudnn, self._handle, shape)
        except self._cudnn.cudnnGraphNotSupportedError as error:
            logger.warning("cuDNN has no attention kernel for %s: %s", shape, error)
            return None


class _Plan:
    """One kernel, and the names it has for what it takes."""

    def __init__(self, cudnn: Any, handle: Any, shape: _Shape) -> None:
        is_half = shape.dtype == torch.float16
        self._graph = cudnn.pygraph(
            handle=handle,
            io_data_type=cudnn.data_type.HALF if is_half else cudnn.data_type.BFLOAT16,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
        )
        self._declare(cudnn, shape)
        self._graph.validate()
        self._graph.build_operation_graph()
        self._graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self._graph.check_support()
        self._graph.build_plans()
        self._workspace_bytes = self._graph.get_workspace_size()

    def _declare(self, cudnn: Any, shape: _Shape) -> None:
        rows, heads, longest, head_dim = shape.q
        num_blocks, _, block_size, kv_heads, _ = shape.cache
        slot, make = kv_heads * head_dim, self._graph.tensor

        def integers(count: int, width: int = 1) -> Any:
            strides = [width, width, 1, 1]
            return make(dim=[count, 1, width, 1], stride=strides, data_type=cudnn.data_type.INT32)

        self._starts, self._blocks = integers(rows + 1), integers(rows, shape.table_width)
        self._q_lens, self._kv_lens = integers(rows), integers(rows)
        strides = [longest * heads * head_dim, head_dim, heads * head_dim, 1]
        self._q = make(dim=list(shape.q), stride=strides).set_ragged_offset(self._starts)
        pages = {
            "dim": [num_blocks, kv_heads, block_size, head_dim],
            "stride": [2 * block_size * slot, head_dim, slot, 1],
        }
        self._k, self._v = make(**pages), make(**pages)
        self._out, _ = self._graph.sdpa(
            q=self._q,
            k=self._k,
            v=self._v,
            attn_scale=shape.scale,
            generate_stats=False,
            use_padding_mask=True,
            seq_len_q=self._q_lens,
            seq_len_kv=self._kv_lens,
            diagonal_alignment=cudnn.diagonal_alignment.BOTTOM_RIGHT,
            diagonal_band_right_bound=0,
            paged_attention_k_table=self._blocks,
            paged_attention_v_table=self._blocks,
            paged_attention_max_seq_len_kv=shape.table_width * block_size,
        )
        self._out.set_output(True).set_dim(list(shape.q)).set_stride(strides)
        self._out.set_ragged_offset(self._starts)

    def run(self, handle: Any, q: Tensor, cache: Tensor, sequences: Sequences, out: Tensor) -> None:
        keys, values = cache.transpose(2, 3).unbind(1)
        tensors = {
            self._q: q,
            self._k: keys,
            self._v: values,
            self._q_lens: sequences.q_lens,
            self._kv_lens: sequences.kv_lens,
            self._starts: sequences.starts,
            self._blocks: sequences.blocks,
            self._out: out,
        }
        workspace = torch.empty(self._workspace_bytes, dtype=torch.uint8, device=q.device)
        self._graph.execute(tensors, workspace, handle=handle)
