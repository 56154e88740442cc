"""The table of twins: pure torch, any device. The fallback, and the oracle in tests."""

from octavo.runtime.kernels.ref import blocks, cache, draws, elementwise, noise
from octavo.runtime.kernels.ref.steps import STEP_ENDS
from octavo.runtime.kernels.table import KernelTable


def ref_table() -> KernelTable:
    """Every op as its torch twin."""
    return KernelTable(
        name="ref",
        store_kv=cache.store_kv,
        paged_attention=cache.paged_attention,
        rms_norm=elementwise.rms_norm,
        rotary_tables=elementwise.rotary_tables,
        silu_and_mul=elementwise.silu_and_mul,
        gelu_and_mul=elementwise.gelu_and_mul,
        gelu_tanh_and_mul=elementwise.gelu_tanh_and_mul,
        gelu=elementwise.gelu,
        gelu_tanh=elementwise.gelu_tanh,
        matmul=elementwise.matmul,
        gated_matmul=elementwise.gated_matmul,
        draw=draws.draw,
        row_limits=noise.row_limits,
        cut=draws.cut,
        step_ends=STEP_ENDS,
        block_dequantize=blocks.block_dequantize,
        block_gather=blocks.block_gather,
        block_matmul=blocks.block_matmul,
        sandwich_norm=elementwise.sandwich_norm,
    )
