"""Small random models that embed pictures, made by transformers: the oracle of their parity tests."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, CLIPModel, ColQwen2ForRetrieval, PreTrainedModel, SiglipModel

from tests.tiny_media import IMAGE, TEXT, TINY_MEDIA, VISION
from tests.tiny_speech import spread

SIZES = {"image_size": 28, "patch_size": 7, **VISION}
WORDS = {key: value for key, value in TEXT.items() if key != "num_key_value_heads"} | {
    "max_position_embeddings": 24,
    "bos_token_id": 101,
    "eos_token_id": 102,
    "pad_token_id": 1,
}
_QWEN = TINY_MEDIA["Qwen2VLForConditionalGeneration"]
CONFIGS: dict[str, tuple[type, dict[str, Any], dict[str, Any]]] = {
    "CLIPModel": (
        CLIPModel,
        {
            "model_type": "clip",
            "text_config": {**WORDS, "projection_dim": 20},
            "vision_config": {**SIZES, "projection_dim": 20},
            "projection_dim": 20,
        },
        {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
    ),
    "SiglipModel": (
        SiglipModel,
        {
            "model_type": "siglip",
            "text_config": {**WORDS, "projection_size": 32},
            "vision_config": SIZES,
        },
        {"size": {"height": 28, "width": 28}},
    ),
    "ColQwen2ForRetrieval": (
        ColQwen2ForRetrieval,
        {"model_type": "colqwen2", "vlm_config": _QWEN.config, "embedding_dim": 24},
        _QWEN.settings,
    ),
}
MARKS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|endoftext|>")


@cache
def oracle_of(architecture: str) -> tuple[PreTrainedModel, Path]:
    kind, config, settings = CONFIGS[architecture]
    full = AutoConfig.for_model(**config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        oracle = kind._from_config(full, attn_implementation="eager").eval()
    spread(oracle, 0)
    folder = Path(mkdtemp())
    oracle.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    save_tokenizer(folder)
    return oracle, folder


def save_tokenizer(folder: Path) -> None:
    """Words are numbers of tokens; a text begins with 101 and ends with 102, as CLIP's do, but ColQwen's."""
    marks = {"<|image_pad|>": IMAGE, **{mark: 103 + number for number, mark in enumerate(MARKS)}}
    words = {str(number): number for number in range(TEXT["vocab_size"]) if number not in marks.values()}
    tokenizer = Tokenizer(models.WordLevel({**words, **marks}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    if "vlm_config" not in json.loads((folder / "config.json").read_text()):
        tokenizer.post_processor = processors.TemplateProcessing(
            single="101 $A 102", special_tokens=[("101", 101), ("102", 102)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
