"""The precision of a product's inputs, and the stored types whose weights may be rounded for it."""

from typing import Literal

InputPrecision = Literal["float32", "bfloat16", "int16", "int8"]

INTEGER_TYPES = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"})
"""Types that integers are multiplied with: 32 weights or more in a block."""

BFLOAT16_TYPES = INTEGER_TYPES | {"BF16"}
"""Types whose weights may be rounded to bfloat16: not those that were chosen to be more exact."""
