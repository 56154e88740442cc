"""compressed-tensors: groups of modules (`config_groups`), each with a format of its own.

Formats: https://github.com/vllm-project/compressed-tensors. Packed integers are streams of bits along the
inputs (zero points: along the outputs), counted from -2^(bits - 1); others are whole bytes with scales.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.base.errors import BadCheckpoint
from octavo.runtime.quantization.codes import unpack_rows
from octavo.runtime.quantization.forms import FLOATS, Expected, Form, Part
from octavo.runtime.quantization.gptq import WORDS, check_bits, check_group, grouped, kind_of
from octavo.runtime.quantization.grouped import Grouped, Kind
from octavo.runtime.quantization.nvfp4 import NVFP4Form
from octavo.runtime.quantization.packed import PackedScheme
from octavo.runtime.quantization.packed_layout import EACH, WHOLE, Axis, PackedLayout, groups_of, words
from octavo.runtime.quantization.scaled import POWERS, ScaledForm, of_strategy, to_float
from octavo.runtime.quantization.stored_config import OF_INPUTS, compiled

_BYTES = ("int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized")


@dataclass(frozen=True)
class PackForm(Form):
    """Integers in words. outputs, inputs: how many share a scale"""

    bits: int
    outputs: Axis
    inputs: Axis

    def tensors(self, part: Part) -> Mapping[str, Expected]:
        check_group(self.inputs.values or -1, part)
        packed, shape = words(self.bits), (torch.int32, torch.int64)
        zeros = PackedLayout(packed if self.outputs == EACH else self.outputs, self.inputs)
        return {
            "weight_packed": Expected(PackedLayout(EACH, packed), WORDS),
            "weight_scale": Expected(PackedLayout(self.outputs, self.inputs), FLOATS),
            "weight_zero_point": Expected(zeros, (*WORDS, torch.int8), is_optional=True),
            "weight_g_idx": Expected(PackedLayout(WHOLE, EACH), shape, is_optional=True),
            "weight_shape": Expected(None, shape, is_optional=True),
        }

    @property
    def packed_as(self) -> tuple[Kind, int]:
        return kind_of(self.bits), self.inputs.values

    def read(self, stored: Mapping[str, Tensor], part: Part) -> Grouped:
        codes = unpack_rows(stored["weight_packed"], self.bits, part.inputs.size)
        rows, groups = self.outputs.entry_of(part.outputs), self.inputs.entry_of(part.inputs)
        scales, zeros = stored["weight_scale"].float()[rows], stored.get("weight_zero_point")
        if zeros is not None and zeros.dtype == torch.int32:
            zeros = unpack_rows(zeros.t(), self.bits, part.outputs.size).t().float()
        elif zeros is not None:
            zeros = zeros.float()[rows] + (1 << self.bits - 1)
        if "weight_g_idx" in stored and (stored["weight_g_idx"] >= 0).all():  # -1: not in use
            groups = stored["weight_g_idx"].flatten().long()
            if groups.max() >= scales.shape[1]:
                raise BadCheckpoint(f"g_idx has groups beyond the {scales.shape[1]} of scales")
        return grouped(self.bits, codes, scales, zeros, groups)


@dataclass(frozen=True)
class MXFP4Form(Form):
    """Two E2M1 numbers to a byte, the first one low, and a power of two per 32. Names: of both tensors."""

    packed: str = "weight_packed"
    scale: str = "weight_scale"

    def tensors(self, part: Part) -> Mapping[str, Expected]:
        check_group(32, part)
        return {
            self.packed: Expected(PackedLayout(EACH, Axis(2, is_word=True)), (torch.uint8,)),
            self.scale: Expected(PackedLayout(EACH, Axis(32)), POWERS),
        }

    @property
    def packed_as(self) -> tuple[Kind, int]:
        return "MXFP4", 32

    def read(self, stored: Mapping[str, Tensor], part: Part) -> Grouped:
        packed, exponents = stored[self.packed], stored[self.scale]
        to_float(exponents)  # which refuses NaN
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
        groups = groups_of(32).entry_of(part.inputs)
        return Grouped("MXFP4", codes, exponents.contiguous().view(torch.uint8), None, groups)


class CompressedTensors(PackedScheme):
    """Reads config_groups, ignore, and what older versions wrote beside them."""

    METHODS = ("compressed-tensors",)
    NEEDLESS = OF_INPUTS

    def form_of(self, module: str) -> Form | None:
        if any(_hits(name, module) for name in self.stored.get("ignore") or ()):
            return None
        if self.stored.get("transform_config"):
            raise BadCheckpoint(
                "transform_config: octavo does not undo rotations; quantize without transforms"
            )
        groups = (self.stored.get("config_groups") or {}).values()
        hit = {name: group for group in groups for name in group.get("targets", ()) if _hits(name, module)}
        named = [name for name in hit if name != "Linear"]
        if not hit:
            return None
        group = hit[(named or ["Linear"])[0]]
        return _form(group, group.get("format") or self.stored.get("format", "pack-quantized"))


def _hits(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return compiled(target[3:]).match(module) is not None
    return target in ("Linear", module) or module.endswith(f".{target}")


def _form(group: dict[str, Any], kind: str) -> Form | None:
    weights = group.get("weights")
    if weights is None or kind == "dense":
        return None
    if kind == "mxfp4-pack-quantized":
        return MXFP4Form()
    if kind == "nvfp4-pack-quantized":
        return NVFP4Form()
    bits, number = weights.get("num_bits"), weights.get("type", "int")
    size = weights.get("group_size") or -1
    strategy = weights.get("strategy") or ("group" if size > 0 else "channel")
    if kind == "pack-quantized":
        check_bits(bits, (2, 3, 4, 8), "pack-quantized")
        return PackForm(bits, *of_strategy(strategy, size, weights.get("block_structure")))
    if kind not in _BYTES or bits != 8:
        raise BadCheckpoint(
            f"compressed-tensors format {kind!r} with {number}{bits} weights is not read. What is: "
            "pack-quantized integers of 2, 3, 4 and 8 bits, mxfp4- and nvfp4-pack-quantized, and 8 bits in "
            f"{', '.join(_BYTES)}."
        )
    axes = of_strategy(strategy, size, weights.get("block_structure"))
    zero = "weight_zero_point" if number == "int" else ""
    given = group.get("input_activations") or {}
    rounds = (given.get("num_bits"), given.get("type", "int")) == (8, number)
    return ScaledForm("S8" if number == "int" else "F8", "weight_scale", zero, *axes, rounds_inputs=rounds)
