"""Quark: int8 and FP8 weights under the names that compressed-tensors has, by a config of its own.

Format: https://quark.docs.amd.com.
"""

from typing import Any

from octavo.base.errors import BadCheckpoint
from octavo.runtime.quantization.forms import Form
from octavo.runtime.quantization.grouped import Kind
from octavo.runtime.quantization.packed import PackedScheme
from octavo.runtime.quantization.scaled import ScaledForm, of_strategy
from octavo.runtime.quantization.stored_config import OF_INPUTS, is_excluded

_KINDS: dict[str, Kind] = {"int8": "S8", "fp8_e4m3": "F8"}


class Quark(PackedScheme):
    """Reads Quark's config: one for all layers, others by pattern."""

    METHODS = ("quark",)
    NEEDLESS = OF_INPUTS

    def form_of(self, module: str) -> Form | None:
        if is_excluded(module, self.stored.get("exclude")):
            return None
        own = self.stored.get("layer_quant_config") or {}
        config = next((own[name] for name in own if is_excluded(module, [name])), None)
        config = config or self.stored.get("global_quant_config") or {}
        weight, inputs = config.get("weight"), config.get("input_tensors") or {}
        return None if weight is None else _form(weight, inputs.get("dtype") == weight.get("dtype"))


def _form(weight: dict[str, Any], rounds: bool) -> Form:
    number = weight.get("dtype")
    if number not in _KINDS:
        raise BadCheckpoint(f"Quark's weights in {number!r} are not read; int8 and fp8_e4m3 are")
    strategy = str(weight.get("qscheme", "")).removeprefix("per_")
    axes = of_strategy(strategy, weight.get("group_size") or -1, None)
    zero = "weight_zero_point" if number == "int8" else ""
    return ScaledForm(_KINDS[number], "weight_scale", zero, *axes, rounds_inputs=rounds)
