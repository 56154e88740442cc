"""Oracles for InternLM 2 and 3, which transformers knows not at all or only as a Llama: Llamas that write
their weights and configs as InternLM's own code does.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

NAMES = {
    "model.embed_tokens": "model.tok_embeddings",
    "lm_head": "output",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
SEPARATE = re.compile(r"\.[qkv]_proj\.")


def own_name(name: str) -> str:
    for old, new in NAMES.items():
        name = name.replace(f"{old}.", f"{new}.")
    return name


class InternLM2Config(LlamaConfig):
    model_type = "internlm2"

    def __post_init__(self, **others: Any) -> None:
        self.bias = others.pop("bias", True)
        self.attention_bias = self.bias
        super().__post_init__(**others)


class InternLM2ForCausalLM(LlamaForCausalLM):
    """Writes the weights with fused queries, keys and values, and as they are in a folder below."""

    config_class = InternLM2Config

    def save_pretrained(self, folder: Path, **options: Any) -> None:
        super().save_pretrained(folder / "llama", **options)
        super().save_pretrained(folder, state_dict=self.fused_state_dict(), **options)

    @classmethod
    def from_pretrained(cls, folder: Path, **options: Any) -> LlamaForCausalLM:
        return super().from_pretrained(Path(folder) / "llama", **options)

    def fused_state_dict(self) -> dict[str, Tensor]:
        given = self.state_dict()
        kept = [name for name in given if not SEPARATE.search(name)]
        tensors = {own_name(name): given[name].clone() for name in kept}  # tied ones must not share memory
        for name in given:
            if "q_proj" in name:
                parts = (given[name.replace("q_proj", f"{x}_proj")] for x in "qkv")
                tensors[name.replace("self_attn.q_proj", "attention.wqkv")] = self.fused(*parts)
        return tensors

    def fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """For each key head: the rows of its queries, then its own, then those of its values."""
        parts = (x.chunk(self.config.num_key_value_heads) for x in (q, k, v))
        return torch.cat([rows for group in zip(*parts, strict=True) for rows in group])


class InternLM3Config(LlamaConfig):
    model_type = "internlm3"
    rms_norm_eps: float = 1e-5

    def __post_init__(self, **others: Any) -> None:
        self.qkv_bias, self.bias = others.pop("qkv_bias", False), others.pop("bias", False)
        self.attention_bias, self.mlp_bias = self.qkv_bias, self.bias
        super().__post_init__(**others)


class InternLM3ForCausalLM(LlamaForCausalLM):
    """`bias` counts for the output of attention as well."""

    config_class = InternLM3Config

    def __init__(self, config: InternLM3Config) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            old = layer.self_attn.o_proj
            layer.self_attn.o_proj = nn.Linear(old.in_features, old.out_features, bias=config.bias)


def register() -> None:
    """Let transformers' Auto classes find them."""
    for config, model in (
        (InternLM2Config, InternLM2ForCausalLM),
        (InternLM3Config, InternLM3ForCausalLM),
    ):
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModelForCausalLM.register(config, model, exist_ok=True)
