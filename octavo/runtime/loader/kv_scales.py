"""Scales of keys and values that a checkpoint brings for caches in fp8: one for each layer's keys and values.

They stand beside the attention, its projections, or, in older files, are one for both. Where a file has one
per head, the largest serves all. Names: vLLM's, ModelOpt's and compressed-tensors'.
"""

import re
from pathlib import Path

from torch import Tensor, nn

from octavo.base.errors import BadCheckpoint
from octavo.base.log import get_logger
from octavo.config.engine import EngineConfig
from octavo.messages.kv import HeadsKV
from octavo.runtime.layers.attention import Attention
from octavo.runtime.loader.safetensors import read_tensors

logger = get_logger(__name__)

_SCALE = re.compile(r"\blayers\.(\d+)\..*?(?:\b(k|v|kv)_scale|\b(k|v)_proj\.output_scale)$")


def use_kv_scales(config: EngineConfig, model: nn.Module, first_layer: int = 0) -> None:
    """Let the attention layers use the checkpoint's scales, if their cache is fp8. Raises BadCheckpoint.

    first_layer: the number of the first of them in the checkpoint
    """
    if config.cache.kv_cache_dtype != "float8_e4m3fn" or config.model.load_format != "safetensors":
        return
    found = read_kv_scales(Path(config.checkpoint.path))
    layers = [x for x in model.modules() if isinstance(x, Attention) and isinstance(x.kv_spec, HeadsKV)]
    used = [layer for layer in layers if layer.layer_id + first_layer in found]
    for layer in used:
        layer.use_kv_scales(*found[layer.layer_id + first_layer])
    if used:
        logger.info("Keys and values of %d layers are stored by the checkpoint's scales.", len(used))


def read_kv_scales(folder: Path) -> dict[int, tuple[float, float]]:
    """Return (of keys, of values) by layer; what a file does not say is 1. Raises BadCheckpoint."""
    found: dict[int, list[float]] = {}
    for origin, name, tensor in read_tensors(folder):
        if match := _SCALE.search(name):
            value, which = _value(origin, tensor), match[2] or match[3]
            scales = found.setdefault(int(match[1]), [1.0, 1.0])
            scales[:] = [value if kind in which else old for kind, old in zip("kv", scales, strict=True)]
    return {layer: (k, v) for layer, (k, v) in found.items()}


def _value(origin: str, tensor: Tensor) -> float:
    largest = float(tensor.float().max()) if tensor.numel() else 0.0
    if not 0 < largest < float("inf") or not tensor.float().isfinite().all():
        raise BadCheckpoint(f"{origin}: a scale of keys or values must be a number above 0")
    return largest
