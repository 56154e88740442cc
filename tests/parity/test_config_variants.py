"""What configs switch on and off within a family, against Hugging Face; test_tiny_models has the TINYs."""

import json
from typing import Any, NamedTuple

import pytest
import torch

from octavo.base.errors import BadCheckpoint, Unsupported
from octavo.runtime.models.interface import MODELS
from tests.model_driver import load, prompt_logits
from tests.tiny_models import make_oracle, make_prompts, oracle_logits, save, tiny_config

TOLERANCE = 1e-4
LONG_ROPE = tiny_config("Phi3ForCausalLM")["rope_parameters"]
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


class Variant(NamedTuple):
    architecture: str
    changes: dict[str, Any]


def phi3(**changes: Any) -> Variant:
    return Variant("Phi3ForCausalLM", changes)


def opt(**changes: Any) -> Variant:
    return Variant("OPTForCausalLM", changes)


def neox(**changes: Any) -> Variant:
    return Variant("GPTNeoXForCausalLM", changes)


def stablelm(**changes: Any) -> Variant:
    return Variant("StableLmForCausalLM", changes)


def falcon(**changes: Any) -> Variant:
    return Variant("FalconForCausalLM", changes)


VARIANTS = {
    "phi3_beyond_original": phi3(original_max_position_embeddings=8),
    "phi3_scores_factor": phi3(rope_parameters=LONG_ROPE | {"attention_factor": 1.3}),
    "phi3_plain": phi3(rope_parameters=PLAIN_ROPE, sliding_window=None, tie_word_embeddings=True),
    "phi_head_norms": Variant("PhiForCausalLM", {"qk_layernorm": True, "num_key_value_heads": 6}),
    "gemma_7b": Variant("GemmaForCausalLM", {"num_key_value_heads": 6}),
    "gemma_biases": Variant("GemmaForCausalLM", {"attention_bias": True, "tie_word_embeddings": False}),
    "gemma2_without_caps": Variant(
        "Gemma2ForCausalLM", {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    ),
    "gemma2_layer_types": Variant(
        "Gemma2ForCausalLM", {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
    ),
    "mistral_without_window": Variant("MistralForCausalLM", {"sliding_window": None}),
    "mistral_narrow_window": Variant("MistralForCausalLM", {"sliding_window": 3}),
    "mistral_nemo": Variant("MistralForCausalLM", {"sliding_window": None, "head_dim": 16}),
    "qwen2_plain": Variant("Qwen2ForCausalLM", {"use_sliding_window": False, "tie_word_embeddings": False}),
    "qwen2_layer_types": Variant(
        "Qwen2ForCausalLM", {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
    ),
    "opt_350m": opt(do_layer_norm_before=False, word_embed_proj_dim=32),
    "opt_norms_behind": opt(do_layer_norm_before=False),
    "opt_projected_untied": opt(word_embed_proj_dim=32, tie_word_embeddings=False),
    "opt_no_final_norm": opt(_remove_final_layer_norm=True),
    "galactica": opt(enable_bias=False, layer_norm_elementwise_affine=False, activation_function="gelu"),
    "neox_serial": neox(use_parallel_residual=False),
    "neox_whole_rotation": neox(rotary_pct=1.0, rotary_emb_base=500, tie_word_embeddings=True),
    "neox_without_attention_biases": neox(attention_bias=False, hidden_act="gelu_fast"),
    "stablelm_12b": stablelm(use_parallel_residual=True, qk_layernorm=True),
    "stablelm_biases": stablelm(use_qkv_bias=True, tie_word_embeddings=True),
    "stablelm_head_norms": stablelm(qk_layernorm=True, num_key_value_heads=6),
    "falcon_40b": falcon(new_decoder_architecture=True, num_kv_heads=2),
    "falcon_11b": falcon(new_decoder_architecture=True, num_kv_heads=3, num_ln_in_parallel_attn=1),
    "falcon_many_key_heads": falcon(multi_query=False, bias=True),
    "falcon_serial": falcon(parallel_attn=False, ffn_hidden_size=80, tie_word_embeddings=False),
    "gptj_inner": Variant("GPTJForCausalLM", {"n_inner": 64, "rotary_dim": 8}),
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_logits(tmp_path, variant):
    oracle = make_oracle(tiny_config(variant.architecture) | variant.changes)
    model = load(save(oracle, tmp_path))
    prompts = make_prompts(oracle.config.vocab_size, (11, 90))
    expected = [oracle_logits(oracle, prompt) for prompt in prompts]
    for chunk in (0, 13):
        for logits, wanted in zip(prompt_logits(model, prompts, chunk), expected, strict=True):
            torch.testing.assert_close(logits, wanted, atol=TOLERANCE, rtol=0)


def arch_of(architecture: str, **changes: Any) -> Any:
    return MODELS.load(architecture).arch_from_hf(tiny_config(architecture) | changes)


def test_old_spellings():
    """As transformers 4 and the first checkpoints wrote them."""
    factors = {key: LONG_ROPE[key] for key in ("short_factor", "long_factor")}
    for kind in ("su", "yarn", "longrope"):
        old = {"rope_parameters": None, "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        old["rope_scaling"] = {"type": kind, **factors}
        assert arch_of("Phi3ForCausalLM", **old) == arch_of("Phi3ForCausalLM")
    # Releases of transformers differ in what they make of this one; Google's own code has the tanh.
    assert arch_of("GemmaForCausalLM", hidden_act="gelu") == arch_of("GemmaForCausalLM")
    scaled = {"rope_theta": 500.0, "partial_rotary_factor": 0.25}
    old = {"rotary_pct": 0.25, "rotary_emb_base": 500}
    assert arch_of("GPTNeoXForCausalLM", **old) == arch_of("GPTNeoXForCausalLM", rope_parameters=scaled)


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("FalconForCausalLM", {"alibi": True}, "alibi"),
        ("FalconForCausalLM", {"activation": "swoosh"}, "swoosh"),
        ("GemmaForCausalLM", {"use_bidirectional_attention": True}, "bidirectional"),
        ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "bidirectional"),
        ("GPTJForCausalLM", {"rotary_dim": 14}, "14 components"),
        ("FalconForCausalLM", {"multi_query": False}, "expected shape"),
        ("StableLmForCausalLM", {"rope_parameters": {"partial_rotary_factor": 1.25}}, "10 components"),
        ("Phi3ForCausalLM", {"rope_parameters": {"rope_type": "spiral"}}, "spiral"),
        ("Phi3ForCausalLM", {"rope_parameters": {"rope_type": "longrope"}}, "short_factor"),
    ],
)
def test_refused(tmp_path, architecture, changes, reason):
    folder = save(make_oracle(tiny_config(architecture)), tmp_path)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises((Unsupported, BadCheckpoint), match=reason):
        load(folder)


def test_longrope_needs_a_factor_per_frequency():
    arch = arch_of("Phi3ForCausalLM", rope_parameters=LONG_ROPE | {"short_factor": [1.0]})
    with pytest.raises(BadCheckpoint, match="2 rope frequencies"):
        arch.layers[0].rope.frequencies()
