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
TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA
    | {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
}
"""By model_type, as of transformers 5."""


def fill_text(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config whose `text_config`, if there is one of a known type, is complete."""
    nested = config.get("text_config")
    if not isinstance(nested, dict) or not isinstance(kind := nested.get("model_type"), str):
        return config
    return config | {"text_config": TEXT_DEFAULTS.get(kind, {}) | nested}
