"""Phi-4 multimodal as Microsoft published it: another config, and adapters among the weights.

Called by the readers of configs and by LoRAConfig's resolver. Source: transformers'
convert_phi4_multimodal_weights_to_hf.py.
"""

import json
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from octavo.base import env
from octavo.base.errors import BadCheckpoint, Unsupported
from octavo.base.safetensors_header import read_header

_ADAPTERS = {"image": "vision", "audio": "speech"}
"""By modality. A prompt with both has the first."""
_RENAMED = {
    "attention_dim": "hidden_size",
    "attention_heads": "num_attention_heads",
    "depthwise_seperable_out_channel": "depthwise_separable_out_channel",
    "linear_units": "intermediate_size",
}
_ONLY: dict[str, Any] = {"causal": True, "batch_norm": False, "bias_in_glu": True, "ext_pw_kernel_size": 1}
_ONLY |= {"input_layer": "nemo_conv", "use_hd_transform": True, "hd_transform_order": "sub_glb"}


def read_phi4(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config of Phi-4 multimodal as transformers has it.

    Raises BadCheckpoint, Unsupported.
    """
    if config.get("model_type") == "phi4mm":
        try:
            config = config | _converted(config)
        except (KeyError, TypeError, AttributeError) as error:
            raise BadCheckpoint(f"config.json of a Phi4MMForCausalLM cannot be read: {error!r}") from error
    usual = {"image_token_id": 200010, "audio_token_id": 200011}
    parts = (config.get("vision_config"), config.get("audio_config"))
    told = {name: part[name] for part in parts if isinstance(part, dict) for name in usual if name in part}
    return usual | told | config


def _converted(config: Mapping[str, Any]) -> dict[str, Any]:
    layers, audio = config["embd_layer"], config["audio_processor"]["config"]
    distances = audio["relative_attention_bias_args"]
    for name, value in (audio | layers["image_embd_layer"]).items():
        if name in _ONLY and value != _ONLY[name]:
            raise Unsupported(f"{name}={value!r} is not supported, only {name}={_ONLY[name]!r} is.")
    own = {
        "bias_max_distance": distances["t5_bias_max_distance"],
        "bias_symmetric": distances.get("t5_bias_symmetric", False),
        "downsample_rate": layers["audio_embd_layer"].get("downsample_rate", 1),
        "nemo_conv_channels": audio["nemo_conv_settings"]["conv_channels"],
    }
    return {
        "architectures": ["Phi4MultimodalForCausalLM"],
        "model_type": "phi4_multimodal",
        "audio_config": {_RENAMED.get(name, name): value for name, value in audio.items()} | own,
        "vision_config": {"crop_size": layers["image_embd_layer"].get("crop_size", 448)}
        | config.get("vision_config", {}),
    }


def own_adapters(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the folders of a checkpoint's adapters by modality: those beside the weights.

    Those that are only among the weights are copied to octavo's cache. Raises BadCheckpoint.
    """
    found = {}
    for modality, name in _ADAPTERS.items():
        if (beside := folder / f"{name}-lora").is_dir():
            found[modality] = str(beside)
        elif isinstance(told := config.get(f"{name}_lora"), Mapping):
            found[modality] = str(_copied(folder, name, told))
    return found


def _copied(folder: Path, name: str, told: Mapping[str, Any]) -> Path:
    """Return the folder of an adapter in the cache, as PEFT would have saved it."""
    files = sorted(folder.glob("*.safetensors"))
    states = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    key = sha256(repr((states, sorted(told.items()))).encode()).hexdigest()[:32]
    made = env.cache_dir() / "adapters" / f"{key}-{name}"
    if made.is_dir():
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent) as temporary:
        new = Path(temporary) / "new"
        new.mkdir()
        given = {"peft_type": "LORA", "r": told.get("r"), "lora_alpha": told.get("lora_alpha")}
        (new / "adapter_config.json").write_text(json.dumps(given | {"target_modules": told.get("layer")}))
        _gather(files, f".{name}.", new / "adapter_model.safetensors")
        with suppress(OSError):  # another process may have been faster
            new.rename(made)
    return made


def _gather(files: list[Path], infix: str, target: Path) -> None:
    """Write the tensors of an adapter into a file of their own. Raises BadCheckpoint."""
    header, pieces, end = {}, list[tuple[Path, int, int]](), 0
    for path in files:
        try:
            rows, start = read_header(path)
        except (OSError, ValueError) as error:
            raise BadCheckpoint(f"{path} is no safetensors file: {error!r:.200}") from error
        for name, row in rows.items():
            if ".lora_" in name and infix in name:
                first, last = row["data_offsets"]
                place = {"data_offsets": [end, end := end + last - first]}
                header[f"base_model.model.{name.replace(infix, '.')}"] = row | place
                pieces.append((path, start + first, last - first))
    text = json.dumps(header).encode()
    with target.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for path, start, size in pieces:
            with path.open("rb") as file:
                file.seek(start)
                out.write(file.read(size))
