"""`measure_kv_scales` finds scales for an fp8 cache where the checkpoint brings none.

One prompt of tokens from all over the vocabulary is computed at the start, and the largest keys and values of
each layer are noted. Scales are powers of two, so what they move keeps its bits, and 1 wherever that is good
enough: E4M3 has numbers of full precision from 1/64 to 448.
"""

from math import ceil, log2
from typing import Any

import torch
from torch import Tensor, nn

from octavo.base.log import get_logger
from octavo.config.engine import EngineConfig
from octavo.messages.kv import HeadsKV
from octavo.runtime.kernels.attention import HeadNorms
from octavo.runtime.layers.attention import Attention
from octavo.runtime.models.interface import Model
from octavo.runtime.platforms.platform import Platform
from octavo.runtime.worker.profile_run import one_prompt

logger = get_logger(__name__)

_TOKENS = 512
_LARGEST = torch.finfo(torch.float8_e4m3fn).max / 2
"""Other prompts may have keys and values twice as large."""
_SMALLEST = 1.0


@torch.inference_mode()
def measure_kv_scales(model: Model, config: EngineConfig, platform: Platform) -> None:
    """Let attention layers without scales use measured ones, if the cache is fp8 and the weights are real."""
    if config.cache.kv_cache_dtype != "float8_e4m3fn" or config.model.load_format == "dummy":
        return
    layers = [
        module
        for module in model.modules()
        if isinstance(module, Attention) and isinstance(module.kv_spec, HeadsKV) and not module.has_kv_scales
    ]
    largest: dict[Attention, tuple[Tensor, Tensor]] = {}

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(layer, Attention)
        _, k, v, *_ = args
        norms = next((x for x in (*args, *kwargs.values()) if isinstance(x, HeadNorms)), None)
        largest[layer] = (_normalised(k, norms).abs().amax(), v.abs().amax())

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        model.forward(one_prompt(model, config, platform.device, _TOKENS))  # all stages take part
    finally:
        for hook in hooks:
            hook.remove()
    scales = {layer: (power_of_two(float(k)), power_of_two(float(v))) for layer, (k, v) in largest.items()}
    used = {layer: pair for layer, pair in scales.items() if pair != (1.0, 1.0)}
    for layer, (keys, values) in used.items():
        layer.use_kv_scales(keys, values)
    if used:
        logger.info("Keys and values of %d layers are stored by scales measured at the start.", len(used))


def power_of_two(largest: float) -> float:
    """Return what numbers up to `largest` are to be divided by for E4M3."""
    if _SMALLEST <= largest <= _LARGEST or not 0 < largest < float("inf"):
        return 1.0
    return float(2.0 ** ceil(log2(largest / _LARGEST)))


def _normalised(k: Tensor, norms: HeadNorms | None) -> Tensor:
    if norms is None:
        return k
    part = k[..., -norms.k_weight.numel() :].float()
    return part * torch.rsqrt(part.square().mean(-1, keepdim=True) + norms.eps) * norms.k_weight.float()
