"""How the functions of the compiled kernels are told of tensors: addresses, strides and numbers of kinds."""

from enum import IntEnum

import torch
from torch import Tensor

from octavo.runtime.kernels.activations import Activation
from octavo.runtime.kernels.block_types import BFLOAT16_TYPES, INTEGER_TYPES, TYPES
from octavo.runtime.kernels.linear import Packed

TYPE_IDS = {kind.name: number for number, kind in TYPES.items()}
ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


class Way(IntEnum):
    """The functions that multiply by a matrix; of integers, the bytes of one."""

    FLOAT = 0
    INT8 = 1
    INT16 = 2
    BFLOAT16 = 3


def way_of(matrix: Packed) -> Way:
    """Return the way that a matrix asks for; where nothing multiplies bfloat16, these are floats."""
    precision, name = matrix.input_precision, matrix.type_name
    if precision == "bfloat16" and name in (*BFLOAT16_TYPES, "F32"):
        return Way.BFLOAT16
    if name in INTEGER_TYPES:
        return {"int8": Way.INT8, "int16": Way.INT16}.get(precision, Way.FLOAT)
    return Way.FLOAT


def rows_of(x: Tensor) -> tuple[int, int]:
    """Return the address and stride of float32 activations that are contiguous in all but the first axis."""
    assert x.dtype == torch.float32, f"activations must be float32, got {x.dtype}"
    assert x.stride(-1) == 1 and (x.dim() == 2 or x.shape[1] == 1 or x.stride(1) == x.shape[2])
    return x.data_ptr(), x.stride(0)


def address_of(x: Tensor | None) -> int | None:
    """Return where a tensor begins; None for none."""
    return None if x is None else x.data_ptr()
