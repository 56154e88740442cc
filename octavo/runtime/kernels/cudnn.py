"""Prefill attention by cuDNN: one fused kernel over the paged cache, planned per shape and kept.

Needs the package nvidia-cudnn-frontend; called by the attention back end `cudnn`. Of the sequences only their
greatest number and length are planned for, rounded up, so that a few plans serve every step: the first takes
0.5 s, others 30 ms. What is called here is described in
https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cudnn
import torch
from torch import Tensor

from octavo.base.log import get_logger

logger = get_logger(__name__)

TYPES = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}
"""Of queries and cache alike."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """New tokens of some sequences, and where all their keys are; made once for all layers of a step.

    longest: more new tokens than any sequence has; a power of two
    q_lens, kv_lens: [B, 1, 1, 1] int32; 0 from the last sequence on
    starts:  [B + 1, 1, 1, 1] int32, first element of each sequence in queries and outputs
    blocks:  [B, 1, max_blocks, 1] int32
    """

    longest: int
    q_lens: Tensor
    kv_lens: Tensor
    starts: Tensor
    blocks: Tensor


class _Shape(NamedTuple):
    """What a plan is made for."""

    q: tuple[int, ...]
    cache: tuple[int, ...]
    num_blocks: int
    dtype: torch.dtype
    scale: float


class Prefill:
    """Causal attention of new tokens to all earlier ones, with the plans made so far."""

    def __init__(self) -> None:
        self._handle = cudnn.create_handle()
        self._plans: dict[_Shape, _Plan | None] = {}

    def __call__(
        self, q: Tensor, cache: Tensor, sequences: Sequences, out: Tensor, scale: float
    ) -> bool:
        """Fill `out`, like q: [T, num_heads, head_dim], contiguous. False: cuDNN has no kernel for that.

        cache: [num_blocks, 2, block_size, num_kv_heads, head_dim], of q's type
        """
        size = (len(sequences.q_lens), q.shape[1], sequences.longest, q.shape[2])
        shape = _Shape(size, tuple(cache.shape), sequences.blocks.shape[2], q.dtype, scale)
        if shape not in self._plans:
            self._plans[shape] = self._make(shape)
        plan = self._plans[shape]
        if plan is None:
            return False
        cudnn.set_stream(self._handle, torch.cuda.current_stream().cuda_stream)
        plan.run(self._handle, q, cache, sequences, out)
        return True

    def _make(self, shape: _Shape) -> "_Plan | None":
        try:
            return _Plan(self._handle, shape)
        except cudnn.cudnnGraphNotSupportedError as error:
            logger.warning("cuDNN has no attention kernel for %s: %s", shape, error)
            return None


class _Plan:
    """One kernel, and the places of what it takes."""

    def __init__(self, handle: Any, shape: _Shape) -> None:
        self._graph = graph = cudnn.pygraph(
            handle=handle,
            io_data_type=TYPES[shape.dtype],
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
        )
        rows, heads, longest, head_dim = shape.q
        num_blocks, _, block_size, kv_heads, _ = shape.cache

        def integers(*dim: int) -> Any:
            return graph.tensor(dim=[*dim, 1], stride=[dim[2], dim[2], 1, 1], data_type=cudnn.data_type.INT32)

        q_strides = [longest * heads * head_dim, head_dim, heads * head_dim, 1]
        slot = kv_heads * head_dim
        kv = {"dim": [num_blocks, kv_heads, block_size, head_dim]}
        kv["stride"] = [2 * block_size * slot, head_dim, slot, 1]
        self._starts, self._blocks = integers(rows + 1, 1, 1), integers(rows, 1, shape.num_blocks)
        self._q_lens, self._kv_lens = integers(rows, 1, 1), integers(rows, 1, 1)
        self._q = graph.tensor(dim=list(shape.q), stride=q_strides)
        self._q.set_ragged_offset(self._starts)
        self._k, self._v = graph.tensor(**kv), graph.tensor(**kv)
        self._out, _ = graph.sdpa(
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
            paged_attention_max_seq_len_kv=shape.num_blocks * block_size,
        )
        self._out.set_output(True).set_dim(list(shape.q)).set_stride(q_strides)
        self._out.set_ragged_offset(self._starts)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        self._workspace_bytes = graph.get_workspace_size()

    def run(self, handle: Any, q: Tensor, cache: Tensor, sequences: Sequences, out: Tensor) -> None:
        """Launch."""
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
