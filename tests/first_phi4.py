"""Phi-4 multimodal as Microsoft wrote it, out of what transformers and PEFT save: the way back.

The names are those that transformers' convert_phi4_multimodal_weights_to_hf.py reads.
"""

import json
import re
from pathlib import Path

from safetensors.torch import load_file, save_file

_AUDIO = r"(audio_embed\.encoder\.encoders\.\d+\.)"
NAMES = {
    rf"{_AUDIO}feed_forward_(in|out)\.gate_up_proj\.": r"\1feed_forward_\2.net.0.linear.",
    rf"{_AUDIO}feed_forward_(in|out)\.down_proj\.": r"\1feed_forward_\2.net.2.",
    rf"{_AUDIO}self_attn\.([qkv])_proj\.": r"\1self_attn.linear_\2.",
    rf"{_AUDIO}self_attn\.o_proj\.": r"\1self_attn.linear_out.",
    r"img_projection_up\.": "img_projection.0.",
    r"img_projection_down\.": "img_projection.2.",
    r"global_img_feature_extensor$": "glb_GN",
    r"sub_img_feature_extensor$": "sub_GN",
    r"up_proj_for_speech\.": "audio_projection.speech.0.",
    r"down_proj_for_speech\.": "audio_projection.speech.2.",
    r"up_proj_for_vision_speech\.": "audio_projection.vision.0.",
    r"down_proj_for_vision_speech\.": "audio_projection.vision.2.",
    r"^(model\.layers\.\d+\..*_proj)\.weight$": r"\1.base_layer.weight",
}
LAYERS = r"layers.*((self_attn\.(qkv_proj|o_proj))|(mlp\.(gate_up|down)_proj))"


def first_config(config: dict) -> dict:
    """The config of 2025. It does not say the sizes of the tower; here it does, so that they are tiny."""
    audio, plain = config["audio_config"], {n: v for n, v in config.items() if n != "audio_config"}
    heard = {
        "activation": "swish",
        "attention_dim": audio["hidden_size"],
        "attention_heads": audio["num_attention_heads"],
        "batch_norm": False,
        "bias_in_glu": True,
        "causal": True,
        "chunk_size": -1,
        "depthwise_multiplier": 1,
        "depthwise_seperable_out_channel": audio["depthwise_separable_out_channel"],
        "ext_pw_kernel_size": 1,
        "ext_pw_out_channel": audio["ext_pw_out_channel"],
        "input_layer": "nemo_conv",
        "input_size": 80,
        "kernel_size": 3,
        "linear_units": audio["intermediate_size"],
        "nemo_conv_settings": {"conv_channels": audio["nemo_conv_channels"]},
        "num_blocks": audio["num_blocks"],
        "relative_attention_bias_args": {"t5_bias_max_distance": audio["bias_max_distance"], "type": "t5"},
        "time_reduction": 8,
        "audio_token_id": audio["audio_token_id"],
    }
    seen = {"crop_size": 448, "hd_transform_order": "sub_glb", "use_hd_transform": True}
    return {
        **plain,
        "architectures": ["Phi4MMForCausalLM"],
        "model_type": "phi4mm",
        "audio_processor": {"config": heard, "name": "cascades"},
        "embd_layer": {"audio_embd_layer": {"downsample_rate": 1}, "image_embd_layer": seen},
    }


def write(config: dict, plain: Path, adapters: Path, folder: Path) -> None:
    """Write a folder with adapters among the weights. plain, adapters: what transformers and PEFT saved"""
    made = first_config(config)
    tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        found = (re.sub(theirs, first, name) for theirs, first in NAMES.items() if re.search(theirs, name))
        tensors[next(found, name)] = tensor
    for kind in ("vision", "speech"):
        told = json.loads((adapters / f"{kind}-lora" / "adapter_config.json").read_text())
        made[f"{kind}_lora"] = {"r": told["r"], "lora_alpha": told["lora_alpha"], "layer": LAYERS, "dp": 0.0}
        for name, tensor in load_file(adapters / f"{kind}-lora" / "adapter_model.safetensors").items():
            stem, end, _ = name.removeprefix("base_model.model.").rpartition(".weight")
            tensors[f"{stem}.{kind}{end}"] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(made))
