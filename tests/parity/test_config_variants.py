"""What configs switch on and off within a family, against Hugging Face; test_tiny_models has the rest."""

from typing import Any

import pytest
import torch

from octavo.base.errors import BadCheckpoint, Unsupported
from octavo.runtime.models.interface import MODELS
from tests.model_driver import given_logits, load, prompt_logits
from tests.tiny_models import edit_config, make_oracle, make_prompts, oracle_logits, save, tiny_config

TOLERANCE = 1e-4
PHI3, OPT, NEOX, GPTJ = "Phi3ForCausalLM", "OPTForCausalLM", "GPTNeoXForCausalLM", "GPTJForCausalLM"
STABLELM, FALCON, GEMMA = "StableLmForCausalLM", "FalconForCausalLM", "GemmaForCausalLM"
GEMMA2, MISTRAL, QWEN2 = "Gemma2ForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"
OLMO2, GRANITE, SMOLLM3 = "Olmo2ForCausalLM", "GraniteForCausalLM", "SmolLM3ForCausalLM"
STARCODER2, INTERNLM2, INTERNLM3 = "Starcoder2ForCausalLM", "InternLM2ForCausalLM", "InternLM3ForCausalLM"
COHERE, COHERE2 = "CohereForCausalLM", "Cohere2ForCausalLM"
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}
FULL, SLIDING = "full_attention", "sliding_attention"
LONG_ROPE = tiny_config(PHI3)["rope_parameters"]
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3_beyond_original": (PHI3, {"original_max_position_embeddings": 8}),
    "phi3_scores_factor": (PHI3, {"rope_parameters": LONG_ROPE | {"attention_factor": 1.3}}),
    "phi3_plain": (
        PHI3,
        {"rope_parameters": PLAIN_ROPE, "sliding_window": None, "tie_word_embeddings": True},
    ),
    "phi_head_norms": ("PhiForCausalLM", {"qk_layernorm": True, "num_key_value_heads": 6}),
    "gemma_7b": (GEMMA, {"num_key_value_heads": 6}),
    "gemma_biases": (GEMMA, {"attention_bias": True, "tie_word_embeddings": False}),
    "gemma2_without_caps": (GEMMA2, {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2_layer_types": (
        GEMMA2,
        {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ),
    "mistral_without_window": (MISTRAL, {"sliding_window": None}),
    "mistral_narrow_window": (MISTRAL, {"sliding_window": 3}),
    "mistral_nemo": (MISTRAL, {"sliding_window": None, "head_dim": 16}),
    "qwen2_plain": (QWEN2, {"use_sliding_window": False, "tie_word_embeddings": False}),
    "qwen2_layer_types": (QWEN2, {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}),
    "opt_350m": (OPT, {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt_norms_behind": (OPT, {"do_layer_norm_before": False}),
    "opt_projected_untied": (OPT, {"word_embed_proj_dim": 32, "tie_word_embeddings": False}),
    "opt_no_final_norm": (OPT, {"_remove_final_layer_norm": True}),
    "galactica": (
        OPT,
        {"enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"},
    ),
    "neox_serial": (NEOX, {"use_parallel_residual": False}),
    "neox_whole_rotation": (NEOX, {"rotary_pct": 1.0, "rotary_emb_base": 500, "tie_word_embeddings": True}),
    "neox_without_attention_biases": (NEOX, {"attention_bias": False, "hidden_act": "gelu_fast"}),
    "stablelm_12b": (STABLELM, {"use_parallel_residual": True, "qk_layernorm": True}),
    "stablelm_biases": (STABLELM, {"use_qkv_bias": True, "tie_word_embeddings": True}),
    "stablelm_head_norms": (STABLELM, {"qk_layernorm": True, "num_key_value_heads": 6}),
    "falcon_40b": (FALCON, {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_11b": (
        FALCON,
        {"new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1},
    ),
    "falcon_many_key_heads": (FALCON, {"multi_query": False, "bias": True}),
    "falcon_serial": (FALCON, {"parallel_attn": False, "ffn_hidden_size": 80, "tie_word_embeddings": False}),
    "gptj_inner": (GPTJ, {"n_inner": 64, "rotary_dim": 8}),
    "olmo2_7b": (OLMO2, {"num_key_value_heads": 6}),
    "olmo2_biases": (OLMO2, {"attention_bias": True, "tie_word_embeddings": True}),
    "granite_plain": (
        GRANITE,
        dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), 1),
    ),
    "granite_biases": (GRANITE, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "smollm3_every_fourth": (SMOLLM3, {"no_rope_layer_interval": 4, "tie_word_embeddings": False}),
    "smollm3_list": (SMOLLM3, {"no_rope_layers": [0, 0, 1, 1, 0], "rope_parameters": YARN}),
    "smollm3_windows": (SMOLLM3, {"use_sliding_window": True, "sliding_window": 24}),
    "smollm3_layer_types": (
        SMOLLM3,
        {"use_sliding_window": True, "sliding_window": 3, "layer_types": [SLIDING, SLIDING, FULL, FULL]},
    ),
    "smollm3_biases": (SMOLLM3, {"attention_bias": True, "mlp_bias": True}),
    "starcoder2_without_window": (STARCODER2, {"sliding_window": None, "rope_parameters": YARN}),
    "starcoder2_without_biases": (
        STARCODER2,
        {"use_bias": False, "tie_word_embeddings": False, "hidden_act": "gelu"},
    ),
    "internlm2_biases": (INTERNLM2, {"bias": True, "num_key_value_heads": 6}),
    "internlm2_one_key_head": (INTERNLM2, {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "internlm3_plain": (INTERNLM3, {"qkv_bias": False}),
    "internlm3_biases": (INTERNLM3, {"bias": True, "num_key_value_heads": 6}),
    "cohere_plus": (COHERE, {"use_qk_norm": True}),
    "cohere_plus_biases": (COHERE, {"use_qk_norm": True, "attention_bias": True, "num_key_value_heads": 6}),
    "cohere_untied": (COHERE, {"tie_word_embeddings": False, "rope_parameters": YARN}),
    "cohere2_pattern": (COHERE2, {"layer_types": None, "num_hidden_layers": 5}),
    "cohere2_other_pattern": (COHERE2, {"layer_types": None, "sliding_window_pattern": 2}),
    "falcon_h1_without_norms": ("FalconH1ForCausalLM", {"mamba_rms_norm": False}),
    "falcon_h1_norms_behind": ("FalconH1ForCausalLM", {"mamba_norm_before_gate": False, "mlp_bias": True}),
    "llama4_one_chunk": (
        "Llama4ForCausalLM",
        {"attention_chunk_size": 256, "attn_temperature_tuning": False},
    ),
    "cohere2_global_only": (COHERE2, {"layer_types": [FULL] * 3, "attention_bias": True}),
}


@pytest.mark.parametrize(("architecture", "changes"), VARIANTS.values(), ids=VARIANTS)
def test_logits(tmp_path, architecture, changes):
    oracle = make_oracle(tiny_config(architecture) | changes)
    model = load(save(oracle, tmp_path))
    prompts = make_prompts(oracle.config.vocab_size, (11, 90))
    expected = [oracle_logits(oracle, prompt) for prompt in prompts]
    for chunk in (0, 13):
        for logits, wanted in zip(prompt_logits(model, prompts, chunk), expected, strict=True):
            torch.testing.assert_close(logits, wanted, atol=TOLERANCE, rtol=0)


def test_granite_multiplies_given_embeddings(tmp_path):
    oracle = make_oracle(tiny_config(GRANITE))
    model = load(save(oracle, tmp_path))
    [prompt] = make_prompts(oracle.config.vocab_size, (9,))
    logits = given_logits(model, prompt, oracle.get_input_embeddings()(torch.tensor(prompt[:2])))
    torch.testing.assert_close(logits, oracle_logits(oracle, prompt), atol=TOLERANCE, rtol=0)


def arch_of(architecture: str, **changes: Any) -> Any:
    return MODELS.load(architecture).arch_from_hf(tiny_config(architecture) | changes)


def test_silent_configs():
    """What transformers, or InternLM 2's own code, assumes where a config says nothing."""
    unsaid = {"rope_parameters": None, "num_key_value_heads": None}
    assert arch_of(SMOLLM3, rope_parameters=None).layers[0].rope.theta == 2e6
    assert arch_of(COHERE, **unsaid).layers[0].rope.theta == 5e5
    assert arch_of(COHERE2, **unsaid).layers[0].rope.theta == 1e4
    assert arch_of(COHERE).tied_head and arch_of(STARCODER2).tied_head and arch_of(SMOLLM3).tied_head
    assert arch_of(OLMO2).norm.eps == arch_of(INTERNLM3).norm.eps == 1e-5
    silent = {key: value for key, value in tiny_config(INTERNLM2).items() if key != "bias"}
    assert MODELS.load(INTERNLM2).arch_from_hf(silent).layers[0].attention.qkv_bias


def test_spellings_of_internlm3():
    old = tiny_config(INTERNLM3)
    new = {key: value for key, value in old.items() if key not in ("qkv_bias", "bias")}
    for biases in ((True, True), (False, False)):
        written = new | dict(zip(("attention_bias", "mlp_bias"), biases, strict=True))
        asked = old | dict(zip(("qkv_bias", "bias"), biases, strict=True))
        family = MODELS.load(INTERNLM3)
        assert family.arch_from_hf(written) == family.arch_from_hf(asked)


def test_old_spellings():
    """As transformers 4 and the first checkpoints wrote them."""
    factors = {key: LONG_ROPE[key] for key in ("short_factor", "long_factor")}
    for kind in ("su", "yarn", "longrope"):
        old = {"rope_parameters": None, "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        old["rope_scaling"] = {"type": kind, **factors}
        assert arch_of(PHI3, **old) == arch_of(PHI3)
    # Releases of transformers differ in what they make of this one; Google's own code has the tanh.
    assert arch_of(GEMMA, hidden_act="gelu") == arch_of(GEMMA)
    scaled = {"rope_theta": 500.0, "partial_rotary_factor": 0.25}
    old = {"rotary_pct": 0.25, "rotary_emb_base": 500}
    assert arch_of(NEOX, **old) == arch_of(NEOX, rope_parameters=scaled)


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        (FALCON, {"alibi": True}, "alibi"),
        (FALCON, {"activation": "swoosh"}, "swoosh"),
        (GEMMA, {"use_bidirectional_attention": True}, "bidirectional"),
        (GEMMA2, {"use_bidirectional_attention": True}, "bidirectional"),
        (GPTJ, {"rotary_dim": 14}, "14 components"),
        (FALCON, {"multi_query": False}, "expected shape"),
        (STABLELM, {"rope_parameters": {"partial_rotary_factor": 1.25}}, "10 components"),
        (PHI3, {"rope_parameters": {"rope_type": "spiral"}}, "spiral"),
        (PHI3, {"rope_parameters": {"rope_type": "longrope"}}, "short_factor"),
        (GRANITE, {"logits_scaling": 0}, "logits_scaling must be a positive number"),
        (GRANITE, {"residual_multiplier": "0.2"}, "residual_multiplier"),
        (SMOLLM3, {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        (SMOLLM3, {"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers"),
        (SMOLLM3, {"layer_types": [SLIDING] * 4, "sliding_window": 8}, "use_sliding_window"),
        (SMOLLM3, {"layer_types": [SLIDING] * 4, "use_sliding_window": True}, "gives no size"),
        (STARCODER2, {"norm_type": "rms_norm"}, "norm_type='rms_norm'"),
        (STARCODER2, {"mlp_type": "gated"}, "mlp_type"),
        (STARCODER2, {"hidden_act": "swoosh"}, "swoosh"),
        (INTERNLM2, {"bias": True}, "lacks"),
        (INTERNLM2, {"num_key_value_heads": 6}, "expected shape"),
        (INTERNLM3, {"rope_scaling": {"rope_type": "spiral"}}, "spiral"),
        (COHERE, {"use_parallel_block": False}, "use_parallel_block"),
        (COHERE, {"logit_scale": None}, "logit_scale"),
        (COHERE, {"use_qk_norm": True}, "q_norm"),
        (COHERE2, {"use_qk_norm": True}, "use_qk_norm"),
        (COHERE2, {"sliding_window": None}, "gives no size"),
        (OLMO2, {"num_attention_heads": 12, "head_dim": 4}, "expected shape"),
    ],
)
def test_refused(tmp_path, architecture, changes, reason):
    folder = save(make_oracle(tiny_config(architecture)), tmp_path)
    with pytest.raises((Unsupported, BadCheckpoint), match=reason):
        load(edit_config(folder, **changes))


def test_longrope_needs_a_factor_per_frequency():
    arch = arch_of(PHI3, rope_parameters=LONG_ROPE | {"short_factor": [1.0]})
    with pytest.raises(BadCheckpoint, match="2 rope frequencies"):
        arch.layers[0].rope.frequencies()
