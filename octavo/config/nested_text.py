"""What the text part of a checkpoint leaves out: transformers writes only what differs from its defaults.

The config of a text model names its sizes all the same; the text part of a model for images often does not.
"""

from typing import Any

_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
_QWEN = _LLAMA | {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}
_QWEN_VL = _QWEN | {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
}
_GEMMA_3 = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
}
_CLIP = {
    "vocab_size": 49408,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
    "layer_norm_eps": 1e-5,
    "hidden_act": "quick_gelu",
}
TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "clip_text_model": _CLIP | {"projection_dim": 512},
    "gemma3_text": _GEMMA_3,
    "llama": _LLAMA,
    "mistral": _LLAMA
    | {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN,
    "qwen2_5_omni_text": _QWEN
    | {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "qwen2_vl_text": _QWEN_VL,
    "qwen2_5_vl_text": _QWEN_VL,
    "qwen3": _QWEN | {"head_dim": 128},
    "qwen3_vl_text": _QWEN | {"head_dim": 128, "max_position_embeddings": 128000},
    "siglip_text_model": _CLIP
    | {
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 64,
        "layer_norm_eps": 1e-6,
        "hidden_act": "gelu_pytorch_tanh",
    },
}
"""By model_type, as of transformers 5."""
_IMPLIED = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}
"""What transformers' code does, whatever a config says."""
_TIED = "tie_word_embeddings"
_WITHIN = {
    "thinker_config": "Qwen2_5OmniThinkerForConditionalGeneration",
    "vlm_config": "ColQwen2ForRetrieval",
}
"""Parts that are the whole of a model here, and what that is called."""
_KEPT = ("dtype", "torch_dtype", "embedding_dim", "quantization_config")
_FLAT = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}
"""Types whose files on model hubs have no part for the text, and the type of that part."""


def fill_text(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config whose `text_config`, if there is one of a known type, is complete."""
    if config.get("model_type") in ("phi4mm", "phi4_multimodal"):
        from octavo.config.phi4_multimodal import read_phi4

        config = read_phi4(config)
    for part, architecture in _WITHIN.items():
        if isinstance(inner := config.get(part), dict):
            kept = {name: config[name] for name in _KEPT if name in config}
            config = kept | inner | {"architectures": [architecture]}
    nested = config.get("text_config")
    if nested is None and config.get("model_type") in _FLAT:
        nested = {n: v for n, v in config.items() if n not in ("vision_config", "architectures")}
        nested["model_type"] = _FLAT[str(config["model_type"])]
    if not isinstance(nested, dict) or not isinstance(kind := nested.get("model_type"), str):
        return config
    filled = TEXT_DEFAULTS.get(kind, {}) | nested | _IMPLIED.get(kind, {})
    for name in (_TIED, "projection_dim"):
        if name in config and not (kind in _FLAT.values() and nested.get(name)):
            filled[name] = config[name]  # where transformers looks
    return config | {"text_config": filled}
