"""Llama 2 and 3, SmolLM and others are built alike; Mistral and Ministral differ by sliding windows only.

Mixtral is a Mistral with experts.
"""

import torch

from octavo.runtime.layers.build import Stored
from octavo.runtime.layers.positions import QueryScale
from octavo.runtime.layers.recurrent import RecurrentArch
from octavo.runtime.models import experts
from octavo.runtime.models.arch import Arch, Config, LayerArch, factor_of, read_arch, read_heads, size_of
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.weights import to


def unpair(tensor: Stored, layer: LayerArch | None) -> Stored:
    """Undo the order of GGUF's q and k rows, where the two rows that rope rotates together are neighbours.

    Whole rows move, so packed ones stay packed. Source: `permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    assert layer is not None and not isinstance(layer.attention, RecurrentArch)
    rows = torch.arange(tensor.shape[0]).view(-1, layer.attention.head_dim // 2, 2)
    return tensor.index_select(0, rows.transpose(1, 2).flatten())


class Llama(Decoder):
    """A Llama has RMS norms, gated SiLU, grouped queries, and rope."""

    GGUF_WEIGHTS = Decoder.GGUF_WEIGHTS.replace(
        {
            "blk.*.attn_q": to("layers.*.attention.qkv", "q", unpair),
            "blk.*.attn_k": to("layers.*.attention.qkv", "k", unpair),
        }
    )


class Mistral(Llama):
    """Mistral is a Llama with a sliding window, whose size configs leave out when it is 4096."""

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        return read_arch({"sliding_window": 4096, "num_key_value_heads": 8} | config)


class Ministral3(Llama):
    """Ministral 3 scales queries behind the context that its rope was made for."""

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Read by how much, from the rope."""
        given: Config = {"head_dim": 128, "rms_norm_eps": 1e-5} | config
        rope: Config = given.get("rope_parameters") or given.get("rope_scaling") or {}
        longest = given.get("max_model_len") or size_of(given, "max_position_embeddings")
        scale = None
        if rope.get("llama_4_scaling_beta") and rope.get("original_max_position_embeddings"):
            unit = size_of(rope, "original_max_position_embeddings")
            scale = QueryScale(factor=factor_of(rope, "llama_4_scaling_beta"), unit=unit, longest=longest)
        scale = scale if scale and longest > scale.unit else None
        return read_arch(given, attention=read_heads(given, query_scale=scale))


class Mixtral(Llama):
    """Every token takes two experts of eight."""

    WEIGHTS = Llama.WEIGHTS.replace(
        experts.routed() | experts.routed("layers.*.block_sparse_moe", "w1", "w3", "w2")
    )

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        config = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5} | config
        return read_arch(config, feed_forward=experts.read_experts(config, experts.mixtral(config)))
