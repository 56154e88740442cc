"""A `ScaledForm` is one tensor of whole bytes (int8, fp8) and scales: per tensor, channel, group or block.

FP8, ModelOpt, compressed-tensors and Quark store it under their own names. Inputs are rounded by scales of
their own as they come, which are finer than stored ones, so scales for inputs are not needed.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.base.errors import BadCheckpoint
from octavo.runtime.quantization.forms import FLOATS, Expected, Form, Part
from octavo.runtime.quantization.grouped import Grouped, Kind
from octavo.runtime.quantization.packed_layout import EACH, WHOLE, Axis, PackedLayout, groups_of

POWERS = (torch.uint8, torch.float8_e8m0fnu)
_TYPES: dict[Kind, torch.dtype] = {"F8": torch.float8_e4m3fn, "S8": torch.int8}


@dataclass(frozen=True)
class ScaledForm(Form):
    """weight = (code - zero) * scale, or what the code stands for * scale.

    scale:           the name of the scales; zero: of the zero points, which may be missing
    outputs, inputs: how many weights share a scale
    divisor:         of all scales
    rounds_inputs:   see Form
    """

    kind: Kind
    scale: str = "weight_scale"
    zero: str = ""
    outputs: Axis = EACH
    inputs: Axis = WHOLE
    divisor: float = 1.0
    rounds_inputs: bool = False

    def tensors(self, part: Part) -> Mapping[str, Expected]:
        shared = PackedLayout(self.outputs, self.inputs)
        made = {
            "weight": Expected(PackedLayout(), (_TYPES[self.kind],)),
            self.scale: Expected(shared, FLOATS + POWERS),
        }
        if self.zero:
            made[self.zero] = Expected(shared, (torch.int8, *FLOATS), is_optional=True)
        return made

    @property
    def packed_as(self) -> tuple[Kind, int]:
        return self.kind, self.inputs.values

    def read(self, stored: Mapping[str, Tensor], part: Part) -> Grouped:
        rows, groups = self.outputs.entry_of(part.outputs), self.inputs.entry_of(part.inputs)
        scales = to_float(stored[self.scale])[rows] / self.divisor
        codes = stored["weight"].contiguous().view(torch.uint8)
        if self.zero not in stored or not stored[self.zero].any():
            return Grouped(self.kind, codes, scales, None, groups)
        return Grouped("U8", codes, scales, stored[self.zero].float()[rows], groups)


def to_float(scales: Tensor) -> Tensor:
    """Return scales as float32; bytes are powers of two. Raises BadCheckpoint for 255, which is NaN."""
    if scales.dtype not in POWERS:
        return scales.float()
    exponents = scales.contiguous().view(torch.uint8)
    if (exponents == 255).any():
        raise BadCheckpoint("a scale is NaN: the file is damaged, or was not written to its end")
    return torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)


def of_strategy(strategy: str, group: int, block: list[int] | None) -> tuple[Axis, Axis]:
    """Return how many outputs and inputs share a scale. Raises BadCheckpoint for an unknown strategy."""
    if strategy == "block" and block:
        return Axis(block[0]), Axis(block[1])
    if strategy in ("group", "tensor_group"):
        return EACH, groups_of(group)
    axes = {"tensor": (WHOLE, WHOLE), "channel": (EACH, WHOLE)}
    if strategy not in axes:
        raise BadCheckpoint(
            f"the strategy {strategy!r} of weights is none of tensor, channel, group and block"
        )
    return axes[strategy]
