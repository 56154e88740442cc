"""Small random models for speech, made by transformers: the oracle of the parity tests for audio."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedModel,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from octavo.frontend.text.tokenizer import byte_alphabet

SECONDS, RATE = 2, 16000
"""Of audio that the model hears at a time, and its samples per second."""
NAMES = [
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|fr|>", "<|translate|>"),
    *("<|transcribe|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
]
IDS = {name: 256 + index for index, name in enumerate(NAMES)}
END, START, NO_TIMES = IDS["<|endoftext|>"], IDS["<|startoftranscript|>"], IDS["<|notimestamps|>"]
FIRST_TIME = NO_TIMES + 1
VOCAB = FIRST_TIME + SECONDS * 50 + 1
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_mel_bins": 20,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 96,
    "max_source_positions": SECONDS * 50,
    "max_target_positions": 96,
    "decoder_start_token_id": START,
    "eos_token_id": END,
    "bos_token_id": END,
    "pad_token_id": END,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "median_filter_width": 7,
}
SETTINGS = {
    "feature_size": 20,
    "chunk_length": SECONDS,
    "sampling_rate": RATE,
    "hop_length": 160,
    "n_fft": 400,
}
GENERATION: dict[str, Any] = {
    "decoder_start_token_id": START,
    "eos_token_id": END,
    "bos_token_id": END,
    "pad_token_id": END,
    "lang_to_id": {name: IDS[name] for name in ("<|en|>", "<|de|>", "<|fr|>")},
    "task_to_id": {"transcribe": IDS["<|transcribe|>"], "translate": IDS["<|translate|>"]},
    "no_timestamps_token_id": NO_TIMES,
    "prev_sot_token_id": IDS["<|startofprev|>"],
    "suppress_tokens": [*range(32), *range(127, 256), START, IDS["<|nospeech|>"]],
    "begin_suppress_tokens": [32, END],
    "max_initial_timestamp_index": 50,
    "is_multilingual": True,
    "alignment_heads": [[1, 0], [1, 3], [2, 1]],
    "return_timestamps": False,
}


def make_oracle(seed: int = 0, **changes: Any) -> WhisperForConditionalGeneration:
    """A Whisper whose weights are so large that every part shows in the logits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        oracle = WhisperForConditionalGeneration(WhisperConfig(**CONFIG | changes)).eval()
    spread(oracle, seed)
    with torch.no_grad():
        for layer in oracle.model.decoder.layers:
            layer.encoder_attn.out_proj.weight *= 4  # so that it depends on the sound what is said
    oracle.config._attn_implementation = "eager"
    return oracle


def spread(oracle: PreTrainedModel, seed: int) -> None:
    """Add noise to all weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.15)


def save(oracle: WhisperForConditionalGeneration, folder: Path) -> Path:
    """Write a folder that both read."""
    oracle.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    write_settings(folder)
    save_tokenizer(folder)
    return folder


def write_settings(folder: Path) -> None:
    """Say how spectrograms are made."""
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))


def save_tokenizer(folder: Path) -> None:
    """Bytes are tokens, and so are the marks and times of Whisper."""
    vocab = dict(byte_alphabet())
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in NAMES])
    times = [f"<|{index * 0.02:.2f}|>" for index in range(SECONDS * 50 + 1)]
    tokenizer.add_tokens([AddedToken(name, special=False) for name in times])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def make_audio(seed: int = 0, seconds: float = 1.5) -> np.ndarray:
    """Sweeps over noise, louder and softer."""
    rng = np.random.default_rng(seed)
    time = np.arange(int(seconds * RATE)) / RATE
    tone = np.sin(2 * np.pi * (200 + 900 * rng.random()) * time * (1 + rng.random() * time))
    loud = 0.3 + 0.3 * np.sin(2 * np.pi * rng.random() * 3 * time)
    return (tone * loud + 0.05 * rng.standard_normal(len(time))).astype(np.float32)


def features(audio: list[np.ndarray]) -> torch.Tensor:
    """What transformers' extractor makes of it."""
    extractor = WhisperFeatureExtractor(**SETTINGS)
    return extractor(audio, sampling_rate=RATE, return_tensors="pt").input_features
