"""TorchAO: int8 and FP8 weights in safetensors, in parts: `_weight_qdata`, `_weight_scale` and zero points.

Pickled files are not read. Format: https://github.com/pytorch/ao (torchao/prototype/safetensors).
"""

from typing import Any

from octavo.base.errors import BadCheckpoint
from octavo.runtime.quantization.forms import Form
from octavo.runtime.quantization.grouped import Kind
from octavo.runtime.quantization.packed import PackedScheme
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
    if name not in _KINDS:
        raise BadCheckpoint(
            f"TorchAO's {name!r} is not read; {', '.join(_KINDS)} are. For int4 use GPTQ, AWQ or "
            "compressed-tensors."
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
