"""Every GGUF architecture against Hugging Face, on files written by the test with the `gguf` package."""

import pytest
import torch

from octavo.base.errors import BadCheckpoint
from octavo.runtime.loader import gguf
from tests.gguf_models import MIXED, write_gguf
from tests.model_driver import load, prompt_logits
from tests.tiny_models import make_oracle, make_prompts, oracle_logits, tiny_config

TOLERANCE = 1e-4
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
FOUR = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, **FOUR}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "truncate": False}
YARN |= {"original_max_position_embeddings": 64}
EXPERTS = {"ffn_gate_exps": "MXFP4", "ffn_up_exps": "MXFP4", "ffn_down_exps": "MXFP4"}
LATENT = {"hidden_size": 64, "intermediate_size": 128, "kv_lora_rank": 32, "v_head_dim": 16}
LATENT |= {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7, "truncate": True}}
CONFIGS = {
    "LlamaForCausalLM": SIZES,
    "Qwen2ForCausalLM": SIZES | {"use_sliding_window": False},
    "Qwen3ForCausalLM": SIZES | {"tie_word_embeddings": False},
    "Qwen3MoeForCausalLM": SIZES,
    "MixtralForCausalLM": SIZES | {"sliding_window": None},
    "Phi3ForCausalLM": SIZES | {"rope_parameters": LONG_ROPE},
    "GemmaForCausalLM": SIZES,
    "Gemma2ForCausalLM": SIZES | {"query_pre_attn_scalar": 16},
    "Gemma3ForCausalLM": SIZES | {"query_pre_attn_scalar": 16, "layer_types": None},
    "GPT2LMHeadModel": {"n_embd": 64},
    "DeepseekV2ForCausalLM": LATENT,
    "DeepseekV3ForCausalLM": LATENT | {"q_lora_rank": 32},
    "GptOssForCausalLM": SIZES | {"rope_parameters": YARN, "swiglu_limit": 7.0, "intermediate_size": 64},
}


@pytest.mark.parametrize("types", [{}, MIXED], ids=["plain", "packed"])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_logits(tmp_path, architecture, types):
    oracle = make_oracle(tiny_config(architecture) | CONFIGS[architecture])
    types = types | EXPERTS if types and architecture.startswith("GptOss") else types
    path = write_gguf(oracle, tmp_path / "tiny.gguf", types, "Q4_1" if types else "F32")
    prompts = make_prompts(oracle.config.vocab_size)
    for logits, prompt in zip(prompt_logits(load(path), prompts), prompts, strict=True):
        torch.testing.assert_close(logits, oracle_logits(oracle, prompt), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("architecture", ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"])
@pytest.mark.parametrize("types", [{"attn_k_b": "F32"}, {"attn_k_b": "F16", "attn_v_b": "Q8_0"}])
def test_keys_and_values_of_latents_apart(tmp_path, architecture, types, monkeypatch):
    """As llama.cpp writes DeepSeek since 2025; not with the keys as they lie."""
    oracle = make_oracle(tiny_config(architecture) | CONFIGS[architecture] | {"qk_nope_head_dim": 32})
    path = write_gguf(oracle, tmp_path / "tiny.gguf", types)
    prompt = max(make_prompts(oracle.config.vocab_size), key=len)
    expected = oracle_logits(oracle, prompt)
    torch.testing.assert_close(prompt_logits(load(path), [prompt])[0], expected, atol=TOLERANCE, rtol=0)
    numbers = gguf._numbers

    def turned(file, name):
        found = numbers(file, name)
        return found if "attn_v_b" in name else found.transpose(1, 2).reshape(found.shape)

    monkeypatch.setattr(gguf, "_numbers", turned)
    assert (prompt_logits(load(path), [prompt])[0] - expected).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("left_out", ["k_b_proj", "v_b_proj"])
def test_half_of_the_latents_heads(tmp_path, left_out):
    oracle = make_oracle(tiny_config("DeepseekV2ForCausalLM") | LATENT)
    path = write_gguf(oracle, tmp_path / "tiny.gguf", {"attn_k_b": "F32"}, left_out=left_out)
    with pytest.raises(BadCheckpoint, match=r"blk\.0\.attn_[kv]_b\.weight' .*blk\.0\.attn_[kv]_b\.weight'"):
        load(path)
