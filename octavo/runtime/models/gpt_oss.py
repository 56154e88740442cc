"""gpt-oss has attention sinks, windows on every other layer, and experts with biases, stored as MXFP4.

Gates and values of its experts are neighbouring rows, and its plain matrices have inputs first.
"""

from typing import Any

import torch
from torch import Tensor

from octavo.base.errors import BadCheckpoint
from octavo.runtime.layers.build import Stored
from octavo.runtime.models import experts
from octavo.runtime.models.arch import Arch, Config, LayerArch, factor_of, read_arch, read_heads, size_of
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.weights import to

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def pairs_apart(tensor: Tensor, layer: LayerArch | None) -> Tensor:
    """Turn [E, 2 I, …], a gate before each value, to [2 E, I, …]: gates and values of each expert."""
    if tensor.dim() < 2 or tensor.shape[1] % 2:
        raise BadCheckpoint(f"gates and values of experts come in pairs; found {list(tensor.shape)}")
    count, rows, *rest = tensor.shape
    return words(tensor.view(count, rows // 2, 2, *rest).transpose(1, 2).reshape(2 * count, -1, *rest), layer)


def words(tensor: Tensor, layer: LayerArch | None) -> Tensor:
    """Join the bytes of the blocks of a row: [E, N, blocks, 16] to [E, N, bytes]; others stay."""
    return tensor.flatten(-2) if tensor.dim() == 4 else tensor


def columns_apart(tensor: Tensor, layer: LayerArch | None) -> Tensor:
    """Turn [E, H, 2 I] to [2 E, I, H]."""
    return pairs_apart(tensor.transpose(1, 2), layer)


def turned(tensor: Tensor, layer: LayerArch | None) -> Tensor:
    """Turn [E, I, H] to [E, H, I]."""
    return tensor.transpose(1, 2)


def plain(stored: Stored, layer: LayerArch | None) -> Any:
    """Read a stack of vectors of a GGUF file, which come as blocks of one number."""
    return stored if isinstance(stored, Tensor) else stored.data.view(_FLOATS[stored.type.name])


class GptOss(Decoder):
    """Its router is a softmax over the scores of the chosen experts, which have biases."""

    WEIGHTS = Decoder.WEIGHTS.replace(
        {
            "layers.*.self_attn.sinks": to("layers.*.attention.sinks.weight"),
            "layers.*.mlp.router": to("layers.*.mlp.router"),
            "layers.*.mlp.experts.gate_up_proj": to("layers.*.mlp.experts.up.weight", "", columns_apart),
            "layers.*.mlp.experts.gate_up_proj_blocks": to("layers.*.mlp.experts.up.blocks", "", pairs_apart),
            "layers.*.mlp.experts.gate_up_proj_scales": to("layers.*.mlp.experts.up.scales", "", pairs_apart),
            "layers.*.mlp.experts.gate_up_proj_bias": to("layers.*.mlp.experts.up_bias", "", pairs_apart),
            "layers.*.mlp.experts.down_proj": to("layers.*.mlp.experts.down.weight", "", turned),
            "layers.*.mlp.experts.down_proj_blocks": to("layers.*.mlp.experts.down.blocks", "", words),
            "layers.*.mlp.experts.down_proj_scales": to("layers.*.mlp.experts.down.scales"),
            "layers.*.mlp.experts.down_proj_bias": to("layers.*.mlp.experts.down_bias"),
        }
    )
    GGUF_WEIGHTS = Decoder.GGUF_WEIGHTS.replace(
        {
            "blk.*.attn_sinks": to("layers.*.attention.sinks"),
            "blk.*.post_attention_norm": to("layers.*.mlp_norm"),
            "blk.*.ffn_gate_exps.bias": to("layers.*.mlp.experts.up_bias", "gate", plain),
            "blk.*.ffn_up_exps.bias": to("layers.*.mlp.experts.up_bias", "up", plain),
            "blk.*.ffn_down_exps.bias": to("layers.*.mlp.experts.down_bias", "", plain),
        }
    )

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Fill in the defaults: the first layer has a window, the second has none, and so on."""
        kinds = ["sliding_attention", "full_attention"] * size_of(config, "num_hidden_layers")
        config = {
            "head_dim": 64,
            "attention_bias": True,
            "sliding_window": 128,
            "rms_norm_eps": 1e-5,
            "layer_types": kinds[: size_of(config, "num_hidden_layers")],
        } | config
        feed_forward = experts.read_experts(
            config,
            experts.granite(config),
            router_bias=True,
            bias=True,
            limit=factor_of(config, "swiglu_limit", 7.0),
            alpha=factor_of(config, "swiglu_alpha", 1.702),
        )
        return read_arch(config, attention=read_heads(config, sinks=True), feed_forward=feed_forward)
