"""Small random text models that hear, made by transformers: the oracle of their parity tests."""

from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp

import torch
from transformers import AutoConfig

from tests.tiny_media import IMAGE, TEXT, save_tokenizer
from tests.tiny_speech import SECONDS, spread, write_settings

_AUDIO = {"num_mel_bins": 20, "max_source_positions": SECONDS * 50}
CONFIGS = {
    "Qwen2AudioForConditionalGeneration": {
        "model_type": "qwen2_audio",
        "text_config": {"model_type": "qwen2", **TEXT},
        "audio_config": {
            "model_type": "qwen2_audio_encoder",
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            **_AUDIO,
        },
        "audio_token_index": IMAGE,
    },
    "VoxtralForConditionalGeneration": {
        "model_type": "voxtral",
        "text_config": {"model_type": "llama", **TEXT},
        "audio_config": {
            "model_type": "voxtral_encoder",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            **_AUDIO,
        },
        "audio_token_id": IMAGE,
    },
}


@cache
def oracle_of(architecture):
    config = dict(CONFIGS[architecture])
    kind = config.pop("model_type")
    full = AutoConfig.for_model(kind, **config)
    module = import_module(f"transformers.models.{kind}.modeling_{kind}")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        oracle = getattr(module, architecture)._from_config(full, attn_implementation="eager").eval()
    spread(oracle, 0)
    folder = Path(mkdtemp())
    oracle.save_pretrained(folder)
    write_settings(folder)
    save_tokenizer(folder)
    return oracle, folder
