"""Llama 2 and 3, SmolLM and what else is built like them; Mistral differs by its sliding window only."""

from typing import ClassVar

import torch

from octavo.runtime.layers.build import Stored
from octavo.runtime.models.arch import Arch, Config, LayerArch, read_arch, read_dense, read_heads
from octavo.runtime.models.decoder import GGUF_WEIGHTS, Decoder
from octavo.runtime.models.weights import WeightMap, to

LLAMA_WEIGHTS = WeightMap(
    {
        "embed_tokens": to("embed_tokens"),
        "norm": to("norm"),
        "lm_head": to("lm_head"),
        "layers.*.input_layernorm": to("layers.*.attention_norm"),
        "layers.*.self_attn.q_proj": to("layers.*.attention.qkv", "q"),
        "layers.*.self_attn.k_proj": to("layers.*.attention.qkv", "k"),
        "layers.*.self_attn.v_proj": to("layers.*.attention.qkv", "v"),
        "layers.*.self_attn.q_norm": to("layers.*.attention.q_norm"),
        "layers.*.self_attn.k_norm": to("layers.*.attention.k_norm"),
        "layers.*.self_attn.o_proj": to("layers.*.attention.out"),
        "layers.*.post_attention_layernorm": to("layers.*.mlp_norm"),
        "layers.*.mlp.gate_proj": to("layers.*.mlp.up", "gate"),
        "layers.*.mlp.up_proj": to("layers.*.mlp.up", "up"),
        "layers.*.mlp.down_proj": to("layers.*.mlp.down"),
    },
    prefix="model.",
    ignored=(r"rotary_emb\.inv_freq$",),
)


def unpair(tensor: Stored, layer: LayerArch | None) -> Stored:
    """Undo the order of GGUF's q and k rows, where the two rows that rope rotates together are neighbours.

    Whole rows move, so packed ones stay packed. Source: `permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    assert layer is not None
    rows = torch.arange(tensor.shape[0]).view(-1, layer.attention.head_dim // 2, 2)
    return tensor.index_select(0, rows.transpose(1, 2).flatten())


class Llama(Decoder):
    """RMS norms, gated SiLU, grouped queries, rope."""

    WEIGHTS = LLAMA_WEIGHTS
    GGUF_WEIGHTS = GGUF_WEIGHTS.replace(
        {
            "blk.*.attn_q": to("layers.*.attention.qkv", "q", unpair),
            "blk.*.attn_k": to("layers.*.attention.qkv", "k", unpair),
        }
    )
    TINY: ClassVar[Config] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 131,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    }

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Biases are optional."""
        bias = bool(config.get("attention_bias"))
        return read_arch(
            config,
            attention=read_heads(config, qkv_bias=bias, out_bias=bias),
            feed_forward=read_dense(config, bias=bool(config.get("mlp_bias"))),
        )


class Mistral(Llama):
    """A Llama with a sliding window, whose size transformers leaves out of the config when it is 4096."""

    TINY: ClassVar[Config] = Llama.TINY | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "sliding_window": 24,
    }

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """No biases."""
        return read_arch({"sliding_window": 4096, "num_key_value_heads": 8} | config)
