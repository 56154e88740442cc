"""TorchAO: int4, int8 and FP8 weights in safetensors: `_weight_qdata`, `_weight_scale` and zero points.

Pickled files are not read. Format: https://github.com/pytorch/ao (torchao/prototype/safetensors).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.base.errors import BadCheckpoint
from octavo.runtime.quantization.codes import unpack_rows
from octavo.runtime.quantization.forms import FLOATS, Expected, Form, Part
from octavo.runtime.quantization.gptq import check_group
from octavo.runtime.quantization.grouped import Grouped, Kind
from octavo.runtime.quantization.packed import PackedScheme
from octavo.runtime.quantization.packed_layout import EACH, Axis, PackedLayout, groups_of
from octavo.runtime.quantization.scaled import ScaledForm, of_strategy
from octavo.runtime.quantization.stored_config import is_excluded

_KINDS: dict[str, tuple[Kind, bool, str]] = {
    "Int8WeightOnlyConfig": ("S8", False, "PerRow"),
    "Int8DynamicActivationInt8WeightConfig": ("S8", True, "PerRow"),
    "IntxWeightOnlyConfig": ("S8", False, "PerRow"),
    "Float8WeightOnlyConfig": ("F8", False, "PerRow"),
    "Float8DynamicActivationFloat8WeightConfig": ("F8", True, "PerTensor"),
}
"""By configuration: the kind of weights, whether inputs are rounded, and what shares a scale by default."""
_STRATEGIES = {"PerRow": "channel", "PerAxis": "channel", "PerTensor": "tensor", "PerGroup": "group"}


@dataclass(frozen=True)
class Int4Form(Form):
    """Reads `Int4Tensor`: weight = code * scale + zero point. Codes are -8 … 7, that of an even input low.

    Scales and zero points are [groups of `group` inputs, outputs]. Kernels count zero points in codes, in
    float16: they are 0.004 of a code off at most.
    """

    group: int

    def tensors(self, part: Part) -> Mapping[str, Expected]:
        check_group(self.group, part)
        shared = PackedLayout(EACH, groups_of(self.group), is_transposed=True)
        return {
            "weight": Expected(PackedLayout(EACH, Axis(2, is_word=True)), (torch.int8, torch.uint8)),
            "weight_scale": Expected(shared, FLOATS),
            "weight_zero_point": Expected(shared, FLOATS),
        }

    @property
    def packed_as(self) -> tuple[Kind, int]:
        return "U4", self.group

    def read(self, stored: Mapping[str, Tensor], part: Part) -> Grouped:
        codes = unpack_rows(stored["weight"], 4, part.inputs.size) ^ 8
        scales, offsets = (stored[name].t().float() for name in ("weight_scale", "weight_zero_point"))
        if (scales == 0).any():
            raise BadCheckpoint("a scale is 0: the file is damaged, or was not written to its end")
        return Grouped("U4", codes, scales, 8 - offsets / scales, groups_of(self.group).entry_of(part.inputs))


class TorchAO(PackedScheme):
    """Reads the config that transformers writes."""

    METHODS = ("torchao",)

    @classmethod
    def stored_name(cls, name: str) -> str | None:
        """See Scheme.stored_name: what belongs to a weight stands behind its name."""
        return name.replace("._weight_qdata", ".weight").replace("._weight_", ".weight_")

    def form_of(self, module: str) -> Form | None:
        embeds = bool(self.stored.get("include_input_output_embeddings"))
        if (module == "lm_head" and not embeds) or is_excluded(
            module, self.stored.get("modules_to_not_convert")
        ):
            return None
        given = self.stored.get("quant_type")
        return _form((given.get("default") if isinstance(given, dict) else None) or {"_type": given})


def _form(config: dict[str, Any]) -> Form:
    name, data = config.get("_type"), config.get("_data") or {}
    if name == "Int4WeightOnlyConfig":
        return _int4(data)
    if name not in _KINDS:
        raise BadCheckpoint(
            f"TorchAO's {name!r} is not read; Int4WeightOnlyConfig, {', '.join(_KINDS)} are. For others use "
            "GPTQ, AWQ or compressed-tensors."
        )
    kind, rounds, default = _KINDS[name]
    shared = data.get("granularity") or {"_type": default}
    shared = shared[-1] if isinstance(shared, list) else shared
    size = (shared.get("_data") or {}).get("group_size") or data.get("group_size") or -1
    strategy = "PerGroup" if size > 0 else shared.get("_type")
    if strategy not in _STRATEGIES:
        raise BadCheckpoint(f"TorchAO's granularity {strategy!r} is none of {', '.join(_STRATEGIES)}")
    axes = of_strategy(_STRATEGIES[strategy], size, None)
    zero = "weight_zero_point" if kind == "S8" else ""
    return ScaledForm(kind, "weight_scale", zero, *axes, rounds_inputs=rounds)


def _int4(data: dict[str, Any]) -> Form:
    packing = data.get("int4_packing_format") or "plain"
    packing = str(packing.get("_data") if isinstance(packing, dict) else packing).lower()
    if packing != "plain":
        raise BadCheckpoint(
            f"TorchAO's int4_packing_format {packing!r} is arranged for one kind of device; quantize it with "
            "'plain'."
        )
    return Int4Form(data.get("group_size") or 128)
