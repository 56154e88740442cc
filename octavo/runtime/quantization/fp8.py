"""FP8 checkpoints: scales per tensor or channel, or DeepSeek's blocks of 128 x 128, of several tools.

Hugging Face and DeepSeek: `weight_scale_inv`; vLLM's own, FBGEMM and ModelOpt: `weight_scale`.
"""

from functools import partial
from typing import Any

from octavo.base.errors import BadCheckpoint
from octavo.runtime.quantization.forms import Form
from octavo.runtime.quantization.nvfp4 import NVFP4Form
from octavo.runtime.quantization.packed import PackedScheme
from octavo.runtime.quantization.packed_layout import WHOLE, Axis
from octavo.runtime.quantization.scaled import ScaledForm, of_strategy
from octavo.runtime.quantization.stored_config import OF_INPUTS, is_excluded

_BLOCK, _FORM = Axis(128), partial(ScaledForm, "F8", rounds_inputs=True)
_MODELOPT = {
    "FP8": _FORM(outputs=WHOLE),
    "FP8_PER_CHANNEL_PER_TOKEN": _FORM(),
    "FP8_PB_WO": _FORM(outputs=_BLOCK, inputs=_BLOCK),
    "MXFP8": ScaledForm("F8", inputs=Axis(32)),
    "NVFP4": NVFP4Form("weight", "weight_scale_2", is_inverse=False),
}


class FP8(PackedScheme):
    """Reads the configs of fp8, fbgemm_fp8 and modelopt."""

    METHODS = ("fp8", "fbgemm_fp8", "modelopt", "modelopt_mxfp8", "modelopt_fp4", "modelopt_mixed")
    NEEDLESS = OF_INPUTS

    def form_of(self, module: str) -> Form | None:
        config = self.stored
        excluded = [*(config.get("modules_to_not_convert") or ()), *(config.get("exclude_modules") or ())]
        if module == "lm_head" or is_excluded(module, [*excluded, *(config.get("ignore") or ())]):
            return None
        method = config["quant_method"]
        if method == "fbgemm_fp8":
            return _FORM()
        if method.startswith("modelopt"):
            return _modelopt(config, module)
        if block := config.get("weight_block_size"):
            outputs, inputs = of_strategy("block", 0, block)
            return _FORM("weight_scale_inv", outputs=outputs, inputs=inputs)
        return _FORM(outputs=WHOLE)


def _modelopt(config: dict[str, Any], module: str) -> Form | None:
    algorithm = str(config.get("quant_algo", "FP8")).upper()
    if algorithm == "MIXED_PRECISION":
        own = (config.get("quantized_layers") or {}).get(module)
        if own is None:
            return None
        algorithm = str(own.get("quant_algo")).upper()
    if algorithm not in _MODELOPT:
        listed = ", ".join(_MODELOPT)
        raise BadCheckpoint(f"ModelOpt's quant_algo {algorithm!r} is not read. Use one of {listed}.")
    return _MODELOPT[algorithm]
