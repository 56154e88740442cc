"""The table of references: pure torch, any device. The fallback, and the oracle in tests."""

from octavo.runtime.kernels.adapters import AdapterKernels
from octavo.runtime.kernels.attention import AttentionKernels
from octavo.runtime.kernels.experts import ExpertKernels
from octavo.runtime.kernels.linear import LinearKernels
from octavo.runtime.kernels.norms import NormKernels
from octavo.runtime.kernels.ref import adapters, blocks, cache, draws, elementwise, experts, noise, recurrent
from octavo.runtime.kernels.ref.steps import STEP_KERNELS
from octavo.runtime.kernels.sampling import SamplingKernels, TruncateAndDraw
from octavo.runtime.kernels.table import KernelTable


def ref_table() -> KernelTable:
    """Return every op as its torch reference."""
    return KernelTable(
        name="ref",
        attention=AttentionKernels(
            cache.store_kv,
            cache.paged_attention,
            elementwise.rotary_tables,
            cache.cut_chunks,
            cache.distance_attention,
        ),
        norms=NormKernels(
            elementwise.rms_norm, elementwise.add_norm, elementwise.sandwich_norm, elementwise.layer_norm
        ),
        activate=elementwise.activate,
        linear=LinearKernels(
            matmul=elementwise.matmul,
            gated_matmul=elementwise.gated_matmul,
            block_dequantize=blocks.block_dequantize,
            block_matmul=blocks.block_matmul,
            select_inputs=blocks.select_inputs,
            join=elementwise.join,
        ),
        experts=ExpertKernels(experts.route, experts.dense_experts, experts.block_experts),
        recurrent=recurrent.REFERENCES,
        sampling=SamplingKernels(
            TruncateAndDraw(draws.draw, draws.truncate),
            noise.row_limits,
            draws.widen,
            draws.forbid,
            draws.ban,
            draws.penalize,
            draws.count,
            draws.score,
        ),
        steps=STEP_KERNELS,
        adapters=AdapterKernels(adapters.add_low_rank, adapters.replace, adapters.change_lookup),
    )
