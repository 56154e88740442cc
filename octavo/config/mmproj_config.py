"""An mmproj file has the encoder of a text model in a GGUF file beside it, as llama.cpp's tools write it.

Called by config/checkpoint: text and encoder become one config in Hugging Face's form, with the settings of
its processor under `preprocessor_config`. Names of keys and tensors: `gguf`'s constants (MMPROJ).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.base.errors import BadCheckpoint, ConfigError, Unsupported
from octavo.base.gguf import GGUFFile

Config = dict[str, Any]
_SIZES = {
    "image_size": "image_size",
    "patch_size": "patch_size",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
}
_MOST = 1 << 20


def find_mmproj(path: Path, named: str) -> Path | None:
    """Return the file that belongs to a GGUF file: the one named, or the only mmproj*.gguf in its folder.

    named: "" = look for it, "none" = text alone. Raises ConfigError.
    """
    if named == "none":
        return None
    if named:
        if not Path(named).is_file():
            raise ConfigError(f"mmproj: there is no file {named!r}.")
        return Path(named)
    found = sorted(path.parent.glob("mmproj*.gguf"))
    if len(found) > 1:
        listed = ", ".join(file.name for file in found)
        raise ConfigError(f"Several encoders stand beside {path.name}: choose by mmproj: {listed}, or none.")
    return found[0] if found else None


def models_in(folder: Path) -> list[Path]:
    """Return the GGUF files of a folder but those of encoders."""
    return sorted(file for file in folder.glob("*.gguf") if not file.name.startswith("mmproj"))


def with_encoder(text: Config, tokens: list[str], file: GGUFFile) -> Config:
    """Return the config of both. tokens: of the text model. Raises BadCheckpoint, Unsupported."""
    metadata = file.metadata
    kind = metadata.get("clip.vision.projector_type") or metadata.get("clip.projector_type")
    if not metadata.get("clip.has_vision_encoder") or kind not in _KINDS:
        raise Unsupported(
            f"{file.path}: an encoder of type {kind!r} is not supported. Supported: {', '.join(_KINDS)}."
        )
    vision: Config = {name: _number(file, f"clip.vision.{key}") for name, key in _SIZES.items()}
    vision["layer_norm_eps"] = metadata.get("clip.vision.attention.layer_norm_epsilon", 1e-6)
    vision["hidden_act"] = "gelu_pytorch_tanh" if metadata.get("clip.use_gelu") else "quick_gelu"
    settings = {name: metadata.get(f"clip.vision.{name}") for name in ("image_mean", "image_std")}
    ids = {token: number for number, token in reversed(list(enumerate(tokens)))}
    whole = {"text_config": text, "vision_config": vision, "preprocessor_config": settings}
    _KINDS[kind](whole, ids, file)
    return whole


def _number(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = file.metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MOST:
        raise BadCheckpoint(f"{file.path}: the metadata's {key} is {value!r:.60}; need a whole number from 1")
    return value


def _llava(whole: Config, ids: dict[str, int], file: GGUFFile) -> None:
    """The layers behind the one that is taken are left out; few vocabularies have a token for images."""
    whole["vision_config"]["model_type"] = "clip_vision_model"
    whole |= {"architectures": ["LlavaForConditionalGeneration"], "vision_feature_layer": -1}
    whole["image_token_id"] = ids.get("<image>", len(ids))
    if "<image>" not in ids:
        whole |= {"added_tokens": ["<image>"], "image_placeholder_id": 0}
    side = whole["vision_config"]["image_size"]
    crop = {"height": side, "width": side}
    whole["preprocessor_config"] |= {"size": {"shortest_edge": side}, "crop_size": crop}
    if grids := file.metadata.get("clip.vision.image_grid_pinpoints"):
        if not isinstance(grids, list) or len(grids) % 2 or not all(isinstance(i, int) for i in grids):
            raise BadCheckpoint(f"{file.path}: clip.vision.image_grid_pinpoints is no list of pairs")
        pairs = [list(pair) for pair in zip(grids[::2], grids[1::2], strict=True)]
        whole |= {"architectures": ["LlavaNextForConditionalGeneration"], "image_grid_pinpoints": pairs}
        whole["preprocessor_config"]["image_grid_pinpoints"] = pairs


def _idefics(whole: Config, ids: dict[str, int], file: GGUFFile) -> None:
    if "<image>" not in ids:
        raise BadCheckpoint(f"{file.path}: the text model has no token <image>")
    whole |= {"architectures": ["Idefics3ForConditionalGeneration"], "image_token_id": ids["<image>"]}
    whole["scale_factor"] = _number(file, "clip.vision.projector.scale_factor")
    side = whole["vision_config"]["image_size"]
    longest = _number(file, "clip.vision.preproc_image_size", 4 * side)
    whole["preprocessor_config"] |= {
        "size": {"longest_edge": longest},
        "max_image_size": {"longest_edge": side},
    }


def _gemma(whole: Config, ids: dict[str, int], file: GGUFFile) -> None:
    """What stands for an image's tokens has no place in the file's vocabulary."""
    marks = {f"{name}_token_index": f"<{mark}_of_image>" for name, mark in (("boi", "start"), ("eoi", "end"))}
    if not ids.keys() >= set(marks.values()):
        raise BadCheckpoint(f"{file.path}: the text model lacks the tokens {', '.join(marks.values())}")
    vision, joined = whole["vision_config"], _number(file, "clip.vision.projector.scale_factor", 4)
    whole |= {"architectures": ["Gemma3ForConditionalGeneration"], "image_token_id": 0}
    whole |= {name: ids[mark] for name, mark in marks.items()}
    whole["mm_tokens_per_image"] = (vision["image_size"] // vision["patch_size"] // joined) ** 2
    side = vision["image_size"]
    whole["preprocessor_config"]["size"] = {"height": side, "width": side}


def _internvl(whole: Config, ids: dict[str, int], file: GGUFFile) -> None:
    """The tower's activation is another than that of SigLIP's."""
    if not ids.keys() >= {"<IMG_CONTEXT>", "<img>", "</img>"}:
        raise BadCheckpoint(f"{file.path}: the text model lacks the tokens <IMG_CONTEXT>, <img>, </img>")
    whole |= {"architectures": ["InternVLForConditionalGeneration"], "image_token_id": ids["<IMG_CONTEXT>"]}
    whole["downsample_ratio"] = 1 / _number(file, "clip.vision.projector.scale_factor", 2)
    has_bias = "v.blk.0.attn_q.bias" in file.tensors
    whole["vision_config"] |= {"hidden_act": "gelu", "attention_bias": has_bias}
    side = whole["vision_config"]["image_size"]
    whole["preprocessor_config"]["size"] = {"height": side, "width": side}


def _qwen(whole: Config, ids: dict[str, int], file: GGUFFile) -> None:
    """Qwen2-VL; 2.5-VL, of which every so manyth layer sees whole images; 3-VL, which tells the text more."""
    marks = {"image_token_id": "image_pad", "video_token_id": "video_pad"}
    marks |= {f"vision_{side}_token_id": f"vision_{side}" for side in ("start", "end")}
    if not ids.keys() >= {f"<|{mark}|>" for mark in marks.values()}:
        raise BadCheckpoint(f"{file.path}: the text model lacks the tokens {', '.join(marks.values())}")
    whole |= {name: ids[f"<|{mark}|>"] for name, mark in marks.items()}
    vision, merge = whole["vision_config"], _number(file, "clip.vision.spatial_merge_size", 2)
    vision |= {"depth": vision["num_hidden_layers"], "num_heads": vision["num_attention_heads"]}
    vision["spatial_merge_size"] = whole["preprocessor_config"]["merge_size"] = merge
    for limit in ("min_pixels", "max_pixels"):
        whole["preprocessor_config"][limit] = file.metadata.get(f"clip.vision.image_{limit}")
    deep = file.metadata.get("clip.vision.is_deepstack_layers")
    newer = "2_5_" if "v.blk.0.ffn_gate.weight" in file.tensors else "2"
    generation = newer if deep is None else "3"
    whole["architectures"] = [f"Qwen{generation}VLForConditionalGeneration"]
    if generation == "2":
        ratio = vision["intermediate_size"] / vision["hidden_size"]
        vision |= {"embed_dim": vision["hidden_size"], "mlp_ratio": ratio}
        return
    if generation == "3":
        if not isinstance(deep, list) or len(deep) != vision["depth"]:
            raise BadCheckpoint(f"{file.path}: clip.vision.is_deepstack_layers is no list of its layers")
        vision["num_position_embeddings"] = (vision["image_size"] // vision["patch_size"]) ** 2
        vision["hidden_act"] = "gelu_pytorch_tanh"
        vision["deepstack_visual_indexes"] = [index for index, is_deep in enumerate(deep) if is_deep]
        return
    step, count = _number(file, "clip.vision.n_wa_pattern"), vision["depth"]
    vision |= {"hidden_act": "silu", "fullatt_block_indexes": list(range(step - 1, count, step))}
    vision["window_size"] = _number(file, "clip.vision.window_size", 112)


def _pixtral(whole: Config, ids: dict[str, int], file: GGUFFile) -> None:
    if not ids.keys() >= {"[IMG]", "[IMG_BREAK]", "[IMG_END]"}:
        raise BadCheckpoint(f"{file.path}: the text model lacks the tokens [IMG], [IMG_BREAK], [IMG_END]")
    merges = "mm.patch_merger.weight" in file.tensors
    merge = _number(file, "clip.vision.spatial_merge_size", 2) if merges else 1
    whole["architectures"] = [f"{'Mistral3' if merges else 'Pixtral'}ForConditionalGeneration"]
    whole |= {"image_token_id": ids["[IMG]"], "spatial_merge_size": merge}
    whole["multimodal_projector_bias"] = "mm.1.bias" in file.tensors
    whole["vision_config"]["hidden_act"] = "silu" if file.metadata.get("clip.use_silu") else "gelu"
    whole["preprocessor_config"]["size"] = {"longest_edge": whole["vision_config"]["image_size"]}


_KINDS: dict[Any, Callable[[Config, dict[str, int], GGUFFile], None]] = {
    "mlp": _llava,
    "idefics3": _idefics,
    "gemma3": _gemma,
    "internvl": _internvl,
    "qwen2vl_merger": _qwen,
    "qwen2.5vl_merger": _qwen,
    "qwen3vl_merger": _qwen,
    "pixtral": _pixtral,
}
