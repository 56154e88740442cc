"""NVFP4: E2M1 numbers, two to a byte, with an E4M3 factor per 16 inputs and one float32 number per matrix.

compressed-tensors stores what factors were multiplied by, ModelOpt what they are to be multiplied by. Inputs
keep their precision (W4A16). Format: https://github.com/vllm-project/compressed-tensors, NVIDIA's ModelOpt.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from octavo.base.errors import BadCheckpoint
from octavo.runtime.quantization.forms import FLOATS, Expected, Form, Part
from octavo.runtime.quantization.gptq import check_group
from octavo.runtime.quantization.grouped import Grouped, Kind
from octavo.runtime.quantization.packed_layout import EACH, WHOLE, Axis, PackedLayout, groups_of

_GROUP, _BLOCK = 16, 64


@dataclass(frozen=True)
class NVFP4Form(Form):
    """Names of the codes and of the matrix's own number; is_inverse: factors were multiplied by it."""

    packed: str = "weight_packed"
    own: str = "weight_global_scale"
    is_inverse: bool = True

    def tensors(self, part: Part) -> Mapping[str, Expected]:
        check_group(_GROUP, part)
        factors = Axis(_GROUP, is_word=True)
        return {
            self.packed: Expected(PackedLayout(EACH, Axis(2, is_word=True)), (torch.uint8,)),
            "weight_scale": Expected(PackedLayout(EACH, factors), (torch.float8_e4m3fn,)),
            self.own: Expected(PackedLayout(WHOLE, WHOLE), FLOATS),
        }

    @property
    def packed_as(self) -> tuple[Kind, int]:
        return "NV4", -1

    def read(self, stored: Mapping[str, Tensor], part: Part) -> Grouped:
        packed, own = stored[self.packed], stored[self.own].float().flatten()[:1]
        scale = 1 / own if self.is_inverse else own
        factors = stored["weight_scale"].contiguous().view(torch.uint8)
        if not scale.isfinite().all() or (factors >= 127).any():
            raise BadCheckpoint("a scale is negative, NaN or infinite: the file is damaged, or not NVFP4")
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
        per_block = functional.pad(factors, (0, -factors.shape[1] % 4)).view(len(factors), -1, 4)
        heads = scale.view(torch.uint8).expand(*per_block.shape[:2], 4)
        groups = groups_of(_BLOCK).entry_of(part.inputs._replace(start=0))
        return Grouped("NV4", codes, torch.cat([heads, per_block], -1), None, groups)
