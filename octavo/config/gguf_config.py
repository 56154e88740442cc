"""The head of a GGUF file in the form of Hugging Face's config.json, one row of data per architecture.

Called by config/checkpoint. What GGUF leaves to the program that reads it (which layers of Gemma 3 are local)
is filled in here, so that the runtime sees one form of config.
"""

import reprlib
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np

from octavo.base.errors import BadCheckpoint, Unsupported
from octavo.base.gguf import GGUFFile

Config = dict[str, Any]


class _Row(NamedTuple):
    architecture: str
    model_type: str
    complete: Callable[[Config], None] | None = None


_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "final_logit_softcapping": "final_logit_softcapping",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "vocab_size": "vocab_size",
    "gguf_pooling_type": "pooling_type",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "expert_gating_func": "expert_gating_func",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "v_head_dim": "attention.value_length",
    "latent_key_length": "attention.key_length_mla",
    "latent_value_length": "attention.value_length_mla",
}

_OF_TOKENIZERS = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "type_vocab_size": "token_type_count",
}
_GENERATION = {
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads")
_FRACTIONS = {key for key in _KEYS if key.endswith(("epsilon", "eps", "theta", "softcapping", "factor"))}
_KINDS = {int: "a whole number", float: "a number"}
_MAX_NUMBER = 1 << 40
_MAX_LAYERS = 10_000

_GEMMA3_LAYERS_PER_GLOBAL = 6
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3_text": 62}
_SIGMOID = 2
_ROPE_DIVISORS = "rope_freqs.weight"
_LONG_ROPE_DIVISORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}


def config_from_gguf(file: GGUFFile) -> Config:
    """Translate the head of `file`. Raises as `config_from_metadata`."""
    try:
        return config_from_metadata(file.metadata, file.tensors.keys(), partial(_divisors, file))
    except BadCheckpoint as error:
        raise BadCheckpoint(f"{file.path}: {error}") from error


def config_from_metadata(
    metadata: Config, tensors: Collection[str], divisors: Callable[[str], list[float]]
) -> Config:
    """Translate a file's metadata. tensors: the names of its tensors; divisors: reads those of a rope

    Raises Unsupported for an unknown architecture, else BadCheckpoint.
    """
    name = str(metadata.get("general.architecture", ""))
    if name not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise Unsupported(f"GGUF architecture {name!r} is not supported. Supported: {known}.")
    row = _ARCHITECTURES[name]
    config: Config = {"architectures": [row.architecture], "model_type": row.model_type}
    for ours, theirs in _KEYS.items():
        if (value := metadata.get(f"{name}.{theirs}")) is not None:
            config[ours] = _checked(f"{name}.{theirs}", value, float if ours in _FRACTIONS else int)
    for key in _REQUIRED:
        if not config.get(key):
            raise BadCheckpoint(f"the metadata has no {name}.{_KEYS[key]}, or it is 0")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if "vocab_size" not in config and isinstance(tokens, list):
        config["vocab_size"] = len(tokens)
    for ours, theirs in _OF_TOKENIZERS.items():
        if (value := metadata.get(f"tokenizer.ggml.{theirs}")) is not None:
            config[ours] = _checked(f"tokenizer.ggml.{theirs}", value, int)
    if isinstance(normalises := metadata.get(f"{name}.expert_weights_norm"), bool):
        config["norm_topk_prob"] = normalises
    config["tie_word_embeddings"] = "output.weight" not in tensors
    _add_rope(config, name, metadata, tensors, divisors)
    if row.complete is not None:
        row.complete(config)
    return config


def metadata_for_gguf(architecture: str, config: Config) -> dict[str, Any]:
    """Return what a GGUF file says of a model with this config.json: the reverse of `config_from_gguf`.

    Ropes are left to the caller. Raises Unsupported for architectures of which octavo writes no file.
    """
    name = WRITTEN.get(architecture)
    if name is None:
        raise Unsupported(
            f"octavo writes GGUF files of {', '.join(sorted(WRITTEN))}, not of {architecture}: convert it "
            "with llama.cpp, then quantize that file."
        )
    made: dict[str, Any] = {"general.architecture": name}
    for ours, theirs in _KEYS.items():
        value = config.get(ours)
        if isinstance(value, int | float) and not isinstance(value, bool) and theirs != "pooling_type":
            made[f"{name}.{theirs}"] = float(value) if ours in _FRACTIONS else value
    return made


def generation_from_gguf(file: GGUFFile) -> Config:
    """What `file` recommends, in the words of generation_config.json. Raises BadCheckpoint."""
    found = {ours: (key, file.metadata.get(key)) for ours, key in _GENERATION.items()}
    return {
        ours: _checked(key, value, int if ours in {"eos_token_id", "top_k"} else float)
        for ours, (key, value) in found.items()
        if value is not None
    }


def _checked(key: str, value: Any, kind: type) -> int | float:
    """The value, if it is a number that a model can have: the file is untrusted, and sizes become loops."""
    number = isinstance(value, int | kind) and not isinstance(value, bool)
    if not number or not 0 <= value <= _MAX_NUMBER:
        raise BadCheckpoint(f"The GGUF metadata's {key} is {reprlib.repr(value)}; need {_KINDS[kind]} from 0")
    if key.endswith(".block_count") and value > _MAX_LAYERS:
        raise BadCheckpoint(f"The GGUF metadata's {key} is {value}; at most {_MAX_LAYERS} layers can be")
    return cast("int | float", value)


def _add_rope(
    config: Config,
    name: str,
    metadata: Config,
    tensors: Collection[str],
    divisors: Callable[[str], list[float]],
) -> None:
    """Rope scaling: Llama 3's and Phi 3's frequencies come as tensors of divisors, the rest as metadata."""
    if rotated := metadata.get(f"{name}.rope.dimension_count"):
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        config["partial_rotary_factor"] = _checked(f"{name}.rope.dimension_count", rotated, int) / size
    if isinstance(sections := metadata.get(f"{name}.rope.dimension_sections"), list):
        config["rope_scaling"] = {"rope_type": "default", "mrope_section": sections[:3]}
        config["rope_scaling"]["mrope_interleaved"] = name.startswith("qwen3vl")
        return
    length = f"{name}.rope.scaling.original_context_length"
    if _ROPE_DIVISORS in tensors:
        config["rope_scaling"] = {"rope_type": "divided", "divisors": divisors(_ROPE_DIVISORS)}
        return
    if all(theirs in tensors for theirs in _LONG_ROPE_DIVISORS.values()):
        both = {ours: divisors(theirs) for ours, theirs in _LONG_ROPE_DIVISORS.items()}
        config["rope_scaling"] = {"rope_type": "longrope", **both}
        config["original_max_position_embeddings"] = _checked(length, metadata.get(length), int)
        return
    kind = metadata.get(f"{name}.rope.scaling.type", "none")
    if kind == "none":
        return
    if kind not in ("linear", "yarn"):
        raise Unsupported(f"GGUF rope scaling {kind!r} is not supported (none, linear and yarn are)")
    factor = f"{name}.rope.scaling.factor"
    config["rope_scaling"] = {
        "rope_type": kind,
        "factor": _checked(factor, metadata.get(factor), float),
        "original_max_position_embeddings": metadata.get(length),
    }
    if multiplier := metadata.get(f"{name}.rope.scaling.yarn_log_multiplier"):
        scale = 10 * _checked(f"{name}.rope.scaling.yarn_log_multiplier", multiplier, float)
        config["rope_scaling"] |= {"mscale": scale, "mscale_all_dim": scale}


def _divisors(file: GGUFFile, name: str) -> list[float]:
    if (kind := file.tensors[name].type.name) != "F32":
        raise BadCheckpoint(f"{name} must be F32, found {kind}")
    divisors: list[float] = file.data(name).ravel().view(np.float32).tolist()
    return divisors


def _complete_bert(config: Config) -> None:
    config["layer_norm_eps"] = config.pop("layer_norm_epsilon", 1e-12)
    config["hidden_act"] = "gelu"


def _complete_llama(config: Config) -> None:
    if config.get("num_experts"):
        config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}


def _complete_qwen3moe(config: Config) -> None:
    """Weights of experts add up to 1 in all published models."""
    config["norm_topk_prob"] = True


def _complete_deepseek2(config: Config) -> None:
    """DeepSeek-V3 chooses experts by sigmoid. Raises BadCheckpoint for files without what V2 needs.

    Newer files count the latent as the one key head: the sizes of the heads have names of their own.
    """
    stored, share = config.get("head_dim"), config.pop("partial_rotary_factor", None)
    size = config["head_dim"] = config.pop("latent_key_length", stored)
    config["v_head_dim"] = config.pop("latent_value_length", config.get("v_head_dim", size))
    if not (stored and size) or share is None or config["v_head_dim"] > size:
        raise BadCheckpoint(
            "The GGUF file lacks attention.key_length, rope.dimension_count or attention.value_length of its "
            "heads"
        )
    config["num_key_value_heads"] = config["num_attention_heads"]
    rope_size = round(share * stored)
    config |= {"qk_rope_head_dim": rope_size, "qk_nope_head_dim": size - rope_size}
    if config.pop("expert_gating_func", 1) == _SIGMOID:
        config |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
        config |= {"n_group": config.get("n_group", 1), "topk_group": config.get("topk_group", 1)}
    elif config.get("n_group", 1) > 1:
        config["topk_method"] = "group_limited_greedy"


def _complete_gpt_oss(config: Config) -> None:
    """Where YaRN begins and ends is no whole dimension."""
    if "rope_scaling" in config:
        config["rope_scaling"]["truncate"] = False


def _complete_gemma3(config: Config) -> None:
    """Every sixth layer is global."""
    config["layer_types"] = [
        "sliding_attention" if (i + 1) % _GEMMA3_LAYERS_PER_GLOBAL else "full_attention"
        for i in range(config["num_hidden_layers"])
    ]
    _complete_gemma(config)


def _complete_gemma(config: Config) -> None:
    """The scale of the scores is the head's, but for the largest size."""
    share = config["hidden_size"] // config["num_attention_heads"]
    largest = config["num_hidden_layers"] == _GEMMA_27B_LAYERS[config["model_type"]]
    config["query_pre_attn_scalar"] = share if largest else config.get("head_dim", share)


_ARCHITECTURES = {
    "llama": _Row("LlamaForCausalLM", "llama", _complete_llama),
    "qwen2vl": _Row("Qwen2ForCausalLM", "qwen2"),
    "qwen2": _Row("Qwen2ForCausalLM", "qwen2"),
    "qwen3": _Row("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": _Row("Qwen3MoeForCausalLM", "qwen3_moe", _complete_qwen3moe),
    "qwen3vl": _Row("Qwen3ForCausalLM", "qwen3"),
    "qwen3vlmoe": _Row("Qwen3MoeForCausalLM", "qwen3_moe", _complete_qwen3moe),
    "phi3": _Row("Phi3ForCausalLM", "phi3"),
    "gemma": _Row("GemmaForCausalLM", "gemma"),
    "gemma2": _Row("Gemma2ForCausalLM", "gemma2", _complete_gemma),
    "gemma3": _Row("Gemma3ForCausalLM", "gemma3_text", _complete_gemma3),
    "gpt2": _Row("GPT2LMHeadModel", "gpt2"),
    "deepseek2": _Row("DeepseekV2ForCausalLM", "deepseek_v2", _complete_deepseek2),
    "gpt-oss": _Row("GptOssForCausalLM", "gpt_oss", _complete_gpt_oss),
    "bert": _Row("BertModel", "bert", _complete_bert),
}

WRITTEN = {
    _ARCHITECTURES[name].architecture: name
    for name in ("llama", "qwen2", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3", "deepseek2", "gpt-oss")
}
"""Their names in GGUF files, by architecture: of those that octavo writes."""
WRITTEN |= dict.fromkeys(("MistralForCausalLM", "MixtralForCausalLM"), "llama")
WRITTEN["DeepseekV3ForCausalLM"] = "deepseek2"
