"""Layers of one model whose bodies differ, against Hugging Face: there, zeros stand for what is missing."""

from dataclasses import replace

import torch

from octavo.runtime.models.llama import Llama
from tests.model_driver import load, prompt_logits
from tests.tiny_models import make_oracle, make_prompts, oracle_logits, save, tiny_config


def test_a_layer_may_have_fewer_heads_and_a_smaller_mlp(tmp_path, monkeypatch):
    """The second of three layers has one group of heads of two, and two thirds of the MLP."""
    read = Llama.arch_from_hf

    def mixed(config):
        arch = read(config)
        first, layer, last = arch.layers
        heads = replace(layer.attention, num_heads=3, num_kv_heads=1)
        layer = replace(
            layer, attention=heads, feed_forward=replace(layer.feed_forward, intermediate_size=64)
        )
        return replace(arch, layers=(first, layer, last))

    oracle = make_oracle(tiny_config("LlamaForCausalLM"))
    layer = oracle.model.layers[1]
    with torch.no_grad():
        layer.self_attn.o_proj.weight[:, 24:] = 0
        layer.mlp.down_proj.weight[:, 64:] = 0
    expected = [oracle_logits(oracle, prompt) for prompt in make_prompts(oracle.config.vocab_size)]
    for module, sizes in (
        (layer.self_attn, {"q_proj": 24, "k_proj": 8, "v_proj": 8, "o_proj": 24}),
        (layer.mlp, {"gate_proj": 64, "up_proj": 64, "down_proj": 64}),
    ):
        for name, size in sizes.items():
            weight = getattr(module, name).weight
            weight.data = weight.data.narrow(int(name in ("o_proj", "down_proj")), 0, size).contiguous()
    monkeypatch.setattr(Llama, "arch_from_hf", staticmethod(mixed))
    model = load(save(oracle, tmp_path))
    assert [layer.kv_spec.num_kv_heads for layer in model.cache_layers] == [2, 1, 2]
    for logits, wanted in zip(prompt_logits(model, make_prompts(131)), expected, strict=True):
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)
