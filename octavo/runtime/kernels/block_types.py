"""Every type of packed weights that kernels multiply: GGUF's, and octavo's own for other formats.

A block of our own begins with a float32 scale (S8, NF4, FP4, F8; in NV4 factors of 16 weights follow) or a
float16 scale and a float16 zero point (U2 to U8: weight = scale * (q - zero)), then has the weights, as
GGUF's types lay them out (ref/blocks.py).
"""

from octavo.base.gguf import BLOCK_TYPES, BlockType

GROUP_TYPES = {
    100: BlockType("U4_32", 32, 20),
    101: BlockType("U4_64", 64, 36),
    102: BlockType("U2_64", 64, 20),
    103: BlockType("U3_64", 64, 28),
    104: BlockType("U8_32", 32, 36),
    105: BlockType("U8_64", 64, 68),
    106: BlockType("S8_32", 32, 36),
    107: BlockType("S8_64", 64, 68),
    108: BlockType("NF4_32", 32, 20),
    109: BlockType("NF4_64", 64, 36),
    110: BlockType("FP4_32", 32, 20),
    111: BlockType("FP4_64", 64, 36),
    112: BlockType("F8_32", 32, 36),
    113: BlockType("F8_64", 64, 68),
    114: BlockType("NV4_64", 64, 40),
}
"""By their number in the compiled kernels."""

ARRANGED_TYPES = {
    name: BlockType(name, block, num_bytes)
    for name, block, num_bytes in (
        ("A4_32", 32, 20),
        ("A4_64", 64, 36),
        ("A4_128", 128, 68),
        ("E4_32", 32, 20),
        ("A8_32", 32, 36),
        ("A8_64", 64, 68),
        ("A8_128", 128, 132),
        ("AF8_32", 32, 36),
        ("AF8_64", 64, 68),
        ("AF8_128", 128, 132),
        ("F8", 1, 1),
        ("S8", 1, 1),
    )
}
"""Forms that kernels for GPUs bring others to, after loading (triton/arranged.py, triton/eight_bits.py)."""

TYPES = BLOCK_TYPES | GROUP_TYPES
TYPES_BY_NAME = {kind.name: kind for kind in TYPES.values()}

INTEGER_TYPES = frozenset(
    {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4"}
    | {name for name in TYPES_BY_NAME if name.startswith(("U", "S8"))}
)
"""Types that integers are multiplied with: whole numbers under a scale."""

BFLOAT16_TYPES = frozenset(TYPES_BY_NAME) - {"F16", "F32"}
"""Types whose weights may be rounded to bfloat16: not those that were chosen to be more exact."""
