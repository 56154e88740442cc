"""Small random models for images, made by transformers: the oracle of the parity tests for media."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

VOCAB, IMAGE = 131, 120
"""Number of tokens, and the one that stands for an image."""

TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 2048,
}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}


CHAT_TEMPLATE = (
    "{% for m in messages %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<image> {% else %}{{ p['text'] }} {% endif %}{% endfor %}{% endfor %}"
)


@dataclass(frozen=True)
class TinyMedia:
    """One family. settings: of preprocessor_config.json; processor: of transformers, on Pillow

    inputs: what the oracle's forward is given beside ids, of the processor's results
    """

    config: dict[str, Any]
    settings: dict[str, Any]
    processor: str
    marker: int = IMAGE
    inputs: Callable[[dict[str, Any]], dict[str, Any]] = dict


def _clip(**more: Any) -> dict[str, Any]:
    return {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 7, **VISION, **more}


def _idefics(kind: str) -> dict[str, Any]:
    vision = {"image_size": 28, "patch_size": 7, "hidden_act": "gelu_pytorch_tanh", **VISION}
    return {
        "model_type": kind,
        "text_config": {"model_type": "llama", "pad_token_id": 0, **TEXT},
        "vision_config": vision,
        "image_token_id": IMAGE,
        "scale_factor": 2,
    }


def _without_mask(found: dict[str, Any]) -> dict[str, Any]:
    """Squares of all images one after the other: none is padded."""
    mask = found["pixel_attention_mask"].flatten(2).any(-1)
    return {"pixel_values": found["pixel_values"][mask][None]}


_SQUARES = {"size": {"longest_edge": 84}, "max_image_size": {"longest_edge": 28}}


def _siglip(**more: Any) -> dict[str, Any]:
    return {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 7, **VISION, **more}


def _only(*names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda found: {name: found[name] for name in names}


_GRIDS = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]


def _pixtral(kind: str, **more: Any) -> dict[str, Any]:
    return {
        "model_type": kind,
        "text_config": {"model_type": "mistral", "sliding_window": None, **TEXT},
        "vision_config": {"model_type": "pixtral", "image_size": 64, "patch_size": 7, **VISION},
        "image_token_index": IMAGE,
        "vision_feature_layer": -1,
        "tie_word_embeddings": False,
        **more,
    }


_PIXTRAL = "transformers.models.pixtral.image_processing_pil_pixtral:PixtralImageProcessorPil"

TINY_MEDIA = {
    "Mistral3ForConditionalGeneration": TinyMedia(
        _pixtral("mistral3", spatial_merge_size=2),
        {"size": {"longest_edge": 64}, "patch_size": {"height": 14, "width": 14}},
        _PIXTRAL,
    ),
    "PixtralForConditionalGeneration": TinyMedia(
        _pixtral("llava", vision_feature_select_strategy="full"),
        {"size": {"longest_edge": 64}, "patch_size": {"height": 7, "width": 7}},
        _PIXTRAL,
    ),
    "InternVLForConditionalGeneration": TinyMedia(
        {
            "model_type": "internvl",
            "text_config": {"model_type": "qwen2", **TEXT},
            "vision_config": {
                "model_type": "internvl_vision",
                "image_size": [28, 28],
                "patch_size": [7, 7],
                **VISION,
            },
            "image_token_id": IMAGE,
            "tie_word_embeddings": False,
        },
        {"size": {"height": 28, "width": 28}, "crop_to_patches": True, "max_patches": 6},
        "transformers.models.got_ocr2.image_processing_pil_got_ocr2:GotOcr2ImageProcessorPil",
        inputs=_only("pixel_values"),
    ),
    "LlavaNextForConditionalGeneration": TinyMedia(
        {
            "model_type": "llava_next",
            "text_config": {"model_type": "mistral", "sliding_window": None, **TEXT},
            "vision_config": _clip(projection_dim=16),
            "image_token_index": IMAGE,
            "image_grid_pinpoints": _GRIDS,
        },
        {
            "size": {"shortest_edge": 28},
            "crop_size": {"height": 28, "width": 28},
            "image_grid_pinpoints": _GRIDS,
        },
        "transformers.models.llava_next.image_processing_pil_llava_next:LlavaNextImageProcessorPil",
    ),
    "LlavaOnevisionForConditionalGeneration": TinyMedia(
        {
            "model_type": "llava_onevision",
            "text_config": {"model_type": "qwen2", **TEXT},
            "vision_config": _siglip(vision_use_head=False),
            "image_token_index": IMAGE,
            "video_token_index": 125,
            "image_grid_pinpoints": _GRIDS,
            "vision_aspect_ratio": "anyres_max_2",
        },
        {"size": {"height": 28, "width": 28}, "image_grid_pinpoints": _GRIDS},
        "transformers.models.llava_onevision.image_processing_pil_llava_onevision:"
        "LlavaOnevisionImageProcessorPil",
        inputs=_only("pixel_values", "image_sizes"),
    ),
    "Idefics3ForConditionalGeneration": TinyMedia(
        _idefics("idefics3"),
        _SQUARES,
        "transformers.models.idefics3.image_processing_pil_idefics3:Idefics3ImageProcessorPil",
        inputs=_without_mask,
    ),
    "SmolVLMForConditionalGeneration": TinyMedia(
        _idefics("smolvlm"),
        _SQUARES,
        "transformers.models.smolvlm.image_processing_pil_smolvlm:SmolVLMImageProcessorPil",
        inputs=_without_mask,
    ),
    "LlavaForConditionalGeneration": TinyMedia(
        {
            "model_type": "llava",
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": _clip(projection_dim=16),
            "image_token_index": IMAGE,
        },
        {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
        "transformers.models.llava.image_processing_pil_llava:LlavaImageProcessorPil",
    ),
}


def make_oracle(architecture: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model whose weights are so large that every part shows in the logits."""
    config = TINY_MEDIA[architecture].config | changes
    rest = {key: value for key, value in config.items() if key != "model_type"}
    full = AutoConfig.for_model(config["model_type"], **rest)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        oracle = AutoModelForImageTextToText.from_config(full, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.15)
    return oracle


def save(oracle: PreTrainedModel, architecture: str, folder: Path) -> Path:
    oracle.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(TINY_MEDIA[architecture].settings))
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """Words are numbers of tokens, "3 4"; the marks of all families are tokens, too."""
    marks = {
        "<image>": IMAGE,
        "<fake_token_around_image>": 121,
        "<global-img>": 122,
        "\n": 123,
        "<img>": 126,
        "</img>": 127,
        "[IMG_BREAK]": 128,
        "[IMG_END]": 129,
    }
    words = {str(number): number for number in range(VOCAB) if number not in marks.values()}
    tokenizer = Tokenizer(models.WordLevel({**words, **marks}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))


def make_images(count: int, seed: int = 0) -> list[Image.Image]:
    """Images of random sizes: noise over a slope, so that resampling shows."""
    rng = np.random.default_rng(seed)
    images = []
    for _ in range(count):
        height, width = rng.integers(20, 90, 2)
        slope = np.linspace(0, 255, width)[None, :, None] * rng.random(3)
        noisy = (slope + rng.integers(0, 120, (height, width, 3))).clip(0, 255)
        images.append(Image.fromarray(noisy.astype(np.uint8)))
    return images


def make_prompt(num_images: int, seed: int, marker: int, length: int = 20) -> list[int]:
    """Random tokens with markers at random places."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(3, 100, length).tolist()
    for place in sorted(rng.integers(0, length - 1, num_images).tolist(), reverse=True):
        ids.insert(place, marker)
    return ids
