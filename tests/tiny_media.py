"""Small random models for images, made by transformers: the oracle of the parity tests for media."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

VOCAB, IMAGE, VIDEO = 131, 120, 119
"""Number of tokens, and those that stand for an image and for a video."""

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
    "{% if p['type'] in ('image', 'video') %}<{{ p['type'] }}> {% else %}{{ p['text'] }} {% endif %}"
    "{% endfor %}{% endfor %}"
)


@dataclass(frozen=True)
class TinyMedia:
    """One family. settings: of preprocessor_config.json; processor: of transformers, on Pillow

    inputs: what the oracle's forward is given beside ids, of the processor's results
    around: tokens that a chat template puts around a marker
    types: name under which the oracle is told which tokens are an image's
    """

    config: dict[str, Any]
    settings: dict[str, Any]
    processor: str
    marker: int = IMAGE
    inputs: Callable[[dict[str, Any]], dict[str, Any]] = dict
    around: tuple[int, ...] = ()
    types: str = ""


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


def _qwen(
    generation: str, vision: dict[str, Any], text: dict[str, Any] | None = None, **rope: Any
) -> TinyMedia:
    parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], **rope}
    sizes = {"depth": 3, "num_heads": 4, "patch_size": 7, "out_hidden_size": 48, "hidden_size": 32}
    return TinyMedia(
        {
            "model_type": generation,
            "text_config": {
                "model_type": f"{generation}_text",
                **TEXT,
                "head_dim": 8,
                "rope_parameters": parameters,
                "num_hidden_layers": 4,
                **(text or {}),
            },
            "vision_config": {"model_type": f"{generation}_vision", **sizes, **vision},
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "vision_start_token_id": 124,
            "vision_end_token_id": 125,
        },
        {
            "size": {"shortest_edge": 28 * 28, "longest_edge": 70 * 70},
            "patch_size": 7,
            "image_mean": [0.4, 0.5, 0.6],
            "image_std": [0.3, 0.25, 0.2],
        },
        "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl:Qwen2VLImageProcessorPil",
        around=(124, 125),
        types="mm_token_type_ids",
    )


TINY_MEDIA = {
    "Gemma3ForConditionalGeneration": TinyMedia(
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                **TEXT,
                "head_dim": 8,
                "query_pre_attn_scalar": 8,
                "sliding_window": 12,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            "vision_config": _siglip(vision_use_head=False),
            "mm_tokens_per_image": 4,
            "boi_token_index": 117,
            "eoi_token_index": 118,
            "image_token_index": 116,
        },
        {"size": {"height": 28, "width": 28}},
        "transformers.models.gemma3.image_processing_pil_gemma3:Gemma3ImageProcessorPil",
        marker=117,
        inputs=_only("pixel_values"),
        types="token_type_ids",
    ),
    "Qwen2VLForConditionalGeneration": _qwen(
        "qwen2_vl", {"embed_dim": 32, "hidden_size": 48, "mlp_ratio": 2}
    ),
    "Qwen2_5_VLForConditionalGeneration": _qwen(
        "qwen2_5_vl", {"intermediate_size": 60, "window_size": 28, "fullatt_block_indexes": [1]}
    ),
    "Qwen3VLForConditionalGeneration": _qwen(
        "qwen3_vl",
        {"intermediate_size": 64, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1]},
        mrope_interleaved=True,
    ),
    "Qwen3VLMoeForConditionalGeneration": _qwen(
        "qwen3_vl_moe",
        {"intermediate_size": 64, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1]},
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        mrope_interleaved=True,
    ),
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
    with torch.random.fork_rng(devices=[]):
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
        "<video>": VIDEO,
        "<fake_token_around_image>": 121,
        "<global-img>": 122,
        "\n": 123,
        "<img>": 126,
        "</img>": 127,
        "[IMG_BREAK]": 128,
        "[IMG_END]": 129,
        "<start_of_image>": 117,
        "<end_of_image>": 118,
        "<image_soft_token>": 116,
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


def make_prompt(
    num_images: int, seed: int, marker: int, length: int = 20, around: tuple[int, ...] = ()
) -> list[int]:
    """Random tokens with markers at random places, each between the two tokens of `around`, if there are."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(3, 100, length).tolist()
    for place in sorted(rng.integers(0, length - 1, num_images).tolist(), reverse=True):
        ids[place:place] = [*around[:1], marker, *around[1:]]
    return ids


def make_video(seconds: float = 2, fps: int = 10, size: tuple[int, int] = (64, 48), **options: str) -> bytes:
    """An MP4 whose frames get brighter."""
    import av

    file = BytesIO()
    with av.open(file, "w", format="mp4", options=options) as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for number in range(round(seconds * fps)):
            shade = Image.new("RGB", size, (number * 8 % 256,) * 3)
            container.mux(stream.encode(av.VideoFrame.from_image(shade)))
        container.mux(stream.encode())
    return file.getvalue()


def numbers_of(arrays: dict[str, Any]) -> Any:
    """Return what transformers calls pixel_values, of ours: bytes and the table of what they become."""
    values = np.asarray(arrays["pixel_values"])
    if "levels" in arrays:
        channels = np.arange(3).reshape(3, *[1] * (values.ndim - 2))
        values = np.asarray(arrays["levels"])[channels, values]
    if "grid_thw" in arrays and values.shape[-1] == 49:  # what an image shows twice
        values = np.repeat(values[:, :, None], 2, axis=2)
    return values.reshape(len(values), -1) if "grid_thw" in arrays else values
