"""Small random checkpoints, made by transformers: the oracle of the parity tests."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests import internlm_oracle

internlm_oracle.register()

PROMPT_LENGTHS = (1, 7, 40, 90)
"""Shorter than a block, and longer than every sliding window below."""

_ROUTER = re.compile(r"(\.gate|router(\.layer)?)\.weight$")
"""Scores of experts are far apart, as in trained models: no rounding changes the choice."""

_FEWEST = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
}
_GROUPED = _FEWEST | {"intermediate_size": 96, "num_key_value_heads": 2}
_GPT2 = {"vocab_size": 131, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 256}
_PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_HALF = {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
_STRETCHED = {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
}
_LONG = {
    "original_max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 1.1],
        "long_factor": [1.2, 4.0],
    },
}
_OF_BOTH_KINDS = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    }
}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_FACTORS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.25,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}
_COHERE = _GROUPED | _PLAIN | {"logit_scale": 0.5}
_GEMMA = _GROUPED | _PLAIN | {"head_dim": 16}
_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}

_EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 3}
_SMALL_EXPERTS = _EXPERTS | {"moe_intermediate_size": 32}
_GROUPED_EXPERTS = _SMALL_EXPERTS | {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
_LATENT = (
    _FEWEST
    | _GROUPED_EXPERTS
    | {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 96,
        "kv_lora_rank": 40,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 64,
        },
    }
)

_MAMBA = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 32,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", _FULL, "linear_attention", "linear_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
_LINEAR_OF_THREE = {"layer_types": ["linear_attention", _FULL, "linear_attention"]}

_ALL_FACTORS = {
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.5,
    "key_multiplier": 1.5,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 0.7,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.6,
    "mlp_multipliers": [0.75, 1.3],
    "ssm_multipliers": [0.9, 1.2, 0.8, 1.1, 1.4],
}

TINY: dict[str, dict[str, Any]] = {
    "ApertusForCausalLM": _GROUPED | _STRETCHED | {"model_type": "apertus", "eos_token_id": 2},
    "ArceeForCausalLM": _GROUPED | _PLAIN | {"model_type": "arcee", "head_dim": 8},
    "Exaone4ForCausalLM": _GROUPED
    | _STRETCHED
    | {"model_type": "exaone4", "sliding_window": 24, "num_hidden_layers": 5, "head_dim": 16},
    "GlmForCausalLM": _GROUPED
    | _HALF
    | {"model_type": "glm", "head_dim": 16, "pad_token_id": 0, "eos_token_id": 2},
    "Ministral3ForCausalLM": _GROUPED
    | {
        "model_type": "ministral3",
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 32,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "Llama4ForCausalLM": _GROUPED
    | _STRETCHED
    | _EXPERTS
    | {
        "model_type": "llama4_text",
        "head_dim": 16,
        "intermediate_size_mlp": 80,
        "no_rope_layer_interval": 2,
        "interleave_moe_layer_step": 2,
        "num_hidden_layers": 4,
        "attention_chunk_size": 32,
        "floor_scale": 16,
        "attn_scale": 0.5,
    },
    "NemotronForCausalLM": _GROUPED | _HALF | {"model_type": "nemotron", "head_dim": 8},
    "CohereForCausalLM": _COHERE | {"model_type": "cohere"},
    "Cohere2ForCausalLM": _COHERE
    | {"model_type": "cohere2", "sliding_window": 24, "layer_types": [_SLIDING, _FULL, _SLIDING]},
    "DeepseekV2ForCausalLM": _LATENT
    | {"model_type": "deepseek_v2", "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "DeepseekV3ForCausalLM": _LATENT | {"model_type": "deepseek_v3", "q_lora_rank": 24},
    "Ernie4_5ForCausalLM": _GROUPED
    | _PLAIN
    | {"model_type": "ernie4_5", "head_dim": 16, "use_bias": True, "tie_word_embeddings": False},
    "Ernie4_5_MoeForCausalLM": _GROUPED
    | _PLAIN
    | {
        "model_type": "ernie4_5_moe",
        "head_dim": 16,
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_intermediate_size": 32,
        "tie_word_embeddings": False,
    },
    "FalconH1ForCausalLM": _GROUPED
    | _PLAIN
    | _MAMBA
    | _ALL_FACTORS
    | {"model_type": "falcon_h1", "mamba_d_ssm": 96, "mamba_rms_norm": True, "head_dim": 16},
    "FalconForCausalLM": _FEWEST | {"model_type": "falcon"},
    "GPT2LMHeadModel": _GPT2 | {"model_type": "gpt2"},
    "GPTJForCausalLM": _GPT2 | {"model_type": "gptj", "rotary_dim": 4},
    "GPTNeoXForCausalLM": _FEWEST | {"model_type": "gpt_neox", "intermediate_size": 96, "rotary_pct": 0.5},
    "GemmaForCausalLM": _GEMMA | {"model_type": "gemma", "num_key_value_heads": 1},
    "Gemma2ForCausalLM": _GEMMA
    | _CAPS
    | {"model_type": "gemma2", "query_pre_attn_scalar": 24, "sliding_window": 24},
    "Gemma3ForCausalLM": _GEMMA
    | _OF_BOTH_KINDS
    | {
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "query_pre_attn_scalar": 24,
        "sliding_window": 24,
        "layer_types": [_SLIDING, _SLIDING, _FULL] * 2,
        "final_logit_softcapping": 30.0,
    },
    "GraniteForCausalLM": _GROUPED | _STRETCHED | _FACTORS | {"model_type": "granite"},
    "Glm4ForCausalLM": _GROUPED
    | _HALF
    | {"model_type": "glm4", "head_dim": 16, "pad_token_id": 0, "eos_token_id": 2},
    "Glm4MoeForCausalLM": _GROUPED
    | _HALF
    | _GROUPED_EXPERTS
    | {"model_type": "glm4_moe", "head_dim": 16, "attention_bias": True, "use_qk_norm": True},
    "GptOssForCausalLM": _GROUPED
    | _EXPERTS
    | {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "sliding_window": 24,
        "layer_types": [_SLIDING, _FULL, _SLIDING],
        "swiglu_limit": 0.6,
        "eos_token_id": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "GraniteMoeForCausalLM": _GROUPED | _PLAIN | _FACTORS | _EXPERTS | {"model_type": "granitemoe"},
    "GraniteMoeSharedForCausalLM": _GROUPED
    | _PLAIN
    | _FACTORS
    | _EXPERTS
    | {"model_type": "granitemoeshared", "shared_intermediate_size": 40},
    "GraniteMoeHybridForCausalLM": _GROUPED
    | _PLAIN
    | _FACTORS
    | _EXPERTS
    | _MAMBA
    | _LINEAR_OF_THREE
    | {"model_type": "granitemoehybrid", "shared_intermediate_size": 40, "mamba_n_groups": 1},
    "HunYuanDenseV1ForCausalLM": _GROUPED
    | {
        "model_type": "hunyuan_v1_dense",
        "head_dim": 16,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0},
    },
    "HunYuanMoEV1ForCausalLM": _GROUPED
    | _PLAIN
    | {"model_type": "hunyuan_v1_moe", "head_dim": 16, "num_experts": 8, "moe_topk": 3},
    "InternLM2ForCausalLM": _GROUPED
    | {
        "model_type": "internlm2",
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        "bias": False,
    },
    "InternLM3ForCausalLM": _GROUPED
    | _STRETCHED
    | {"model_type": "internlm3", "head_dim": 16, "qkv_bias": True, "bias": False},
    "Lfm2ForCausalLM": _GROUPED
    | _PLAIN
    | {
        "model_type": "lfm2",
        "conv_bias": True,
        "block_multiple_of": 16,
        "layer_types": ["conv", _FULL, "conv"],
        "tie_word_embeddings": True,
    },
    "Lfm2MoeForCausalLM": _GROUPED
    | _PLAIN
    | _SMALL_EXPERTS
    | {
        "model_type": "lfm2_moe",
        "num_dense_layers": 1,
        "routed_scaling_factor": 1.5,
        "layer_types": ["conv", _FULL, "conv"],
    },
    "LlamaForCausalLM": _GROUPED | _STRETCHED | {"model_type": "llama"},
    "MinistralForCausalLM": _GROUPED
    | _PLAIN
    | {
        "model_type": "ministral",
        "head_dim": 8,
        "sliding_window": 24,
        "layer_types": [_SLIDING, _FULL, _SLIDING],
    },
    "MistralForCausalLM": _GROUPED | _PLAIN | {"model_type": "mistral", "sliding_window": 24},
    "MiniMaxM2ForCausalLM": _GROUPED
    | _HALF
    | _EXPERTS
    | {"model_type": "minimax_m2", "head_dim": 16, "bos_token_id": 1, "eos_token_id": 2},
    "MixtralForCausalLM": _GROUPED | _PLAIN | _EXPERTS | {"model_type": "mixtral", "sliding_window": 24},
    "OlmoeForCausalLM": _GROUPED | _PLAIN | _EXPERTS | {"model_type": "olmoe", "eos_token_id": 3},
    "Olmo2ForCausalLM": _GROUPED | _STRETCHED | {"model_type": "olmo2"},
    "Olmo3ForCausalLM": _GROUPED
    | _OF_BOTH_KINDS
    | {"model_type": "olmo3", "sliding_window": 24, "num_hidden_layers": 4, "eos_token_id": 2},
    "OPTForCausalLM": _FEWEST | {"model_type": "opt", "num_attention_heads": 4, "ffn_dim": 96},
    "PhiForCausalLM": _GROUPED | _HALF | {"model_type": "phi"},
    "Phi3ForCausalLM": _GROUPED
    | _LONG
    | {"model_type": "phi3", "pad_token_id": 0, "sliding_window": 24, "max_position_embeddings": 1024},
    "Qwen2ForCausalLM": _GROUPED
    | _PLAIN
    | {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "Qwen2MoeForCausalLM": _GROUPED
    | _PLAIN
    | _SMALL_EXPERTS
    | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    "Qwen3MoeForCausalLM": _GROUPED
    | _PLAIN
    | _SMALL_EXPERTS
    | {"model_type": "qwen3_moe", "head_dim": 16, "norm_topk_prob": True},
    "Qwen3NextForCausalLM": _GROUPED
    | _SMALL_EXPERTS
    | _DELTA
    | {"model_type": "qwen3_next", "shared_expert_intermediate_size": 40, "mlp_only_layers": [2]},
    "Qwen3_5ForCausalLM": _GROUPED | _DELTA | {"model_type": "qwen3_5_text"},
    "Qwen3_5MoeForCausalLM": _GROUPED
    | _SMALL_EXPERTS
    | _DELTA
    | {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 40},
    "Qwen3ForCausalLM": _GROUPED | _PLAIN | {"model_type": "qwen3", "head_dim": 16},
    "SeedOssForCausalLM": _GROUPED | _PLAIN | {"model_type": "seed_oss", "head_dim": 16},
    "SmolLM3ForCausalLM": _GROUPED
    | _STRETCHED
    | {"model_type": "smollm3", "num_hidden_layers": 4, "no_rope_layer_interval": 2, "pad_token_id": 0},
    "StableLmForCausalLM": _GROUPED | _HALF | {"model_type": "stablelm"},
    "Starcoder2ForCausalLM": _GROUPED
    | _PLAIN
    | {"model_type": "starcoder2", "hidden_act": "gelu_pytorch_tanh", "sliding_window": 24},
}
"""A config for every architecture of octavo's own."""


RECURRENT = [
    "FalconH1ForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
]
"""Those with states."""


def tiny_config(architecture: str) -> dict[str, Any]:
    return TINY[architecture] | {"architectures": [architecture]}


def make_oracle(config: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """A model with weights large enough that every part of it shows in the logits, norms and biases too."""
    rest = {key: value for key, value in config.items() if key != "model_type"}
    full = AutoConfig.for_model(config["model_type"], **rest)
    # Some versions' other attention knows no soft cap.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # what transformers draws
        oracle = AutoModelForCausalLM.from_config(full, attn_implementation="eager").eval()
    for module in oracle.modules():
        if hasattr(module, "limit") and "swiglu_limit" in config:
            module.limit = config[
                "swiglu_limit"
            ]  # transformers 5.17 does not look at gpt-oss's config for it
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        biases = [pair for pair in oracle.named_buffers() if pair[0].endswith("correction_bias")]
        for name, parameter in [*oracle.named_parameters(), *biases]:
            alpha = 1.5 if name.endswith("sinks") else 0.4 if _ROUTER.search(name) else 0.1
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=alpha)
    return oracle


def edit_config(folder: Path, **entries: Any) -> Path:
    """Add or replace entries of the folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    return folder


def save(oracle: PreTrainedModel, folder: Path, **options: Any) -> Path:
    oracle.save_pretrained(folder, **options)
    return folder


def make_prompts(vocab_size: int, lengths: tuple[int, ...] = PROMPT_LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


@torch.inference_mode()
def oracle_logits(oracle: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    return oracle(torch.tensor([prompt])).logits[0].float()


def oracle_greedy(oracle: PreTrainedModel, prompt: list[int], output: list[int]) -> list[int]:
    """The most likely token after the prompt and after each token of `output` but the last.

    Equals `output` if and only if the oracle's greedy decoding does, at the price of one forward pass.
    """
    return oracle_logits(oracle, prompt + output[:-1])[len(prompt) - 1 :].argmax(-1).tolist()
