"""The table of Triton kernels: every op for an NVIDIA GPU. Activations have any floating-point type.

Importing this module needs the package `triton`; the CUDA platform asks for it, and takes the twins without.
"""

from octavo.runtime.kernels.table import KernelTable
from octavo.runtime.kernels.triton import blocks, cache, elementwise


def cuda_table() -> KernelTable:
    """Every op as a Triton kernel."""
    return KernelTable(
        name="triton",
        write_kv=cache.write_kv,
        paged_attention=cache.paged_attention,
        rms_norm=elementwise.rms_norm,
        apply_rope=elementwise.apply_rope,
        silu_and_mul=elementwise.silu_and_mul,
        gelu_and_mul=elementwise.gelu_and_mul,
        gelu_tanh_and_mul=elementwise.gelu_tanh_and_mul,
        gelu=elementwise.gelu,
        gelu_tanh=elementwise.gelu_tanh,
        block_dequantize=blocks.block_dequantize,
        block_matmul=blocks.block_matmul,
    )
