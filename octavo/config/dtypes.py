"""Decides the types of weights, activations and KV cache, by checkpoint and device. Called by `resolve`."""

from octavo.base.cards import CARDS, Card, nvidia_card
from octavo.base.errors import ConfigError
from octavo.base.log import get_logger
from octavo.config.checkpoint import Checkpoint
from octavo.metrics.nvml import highest_capability

logger = get_logger(__name__)

_ALIASES = {"float": "float32", "half": "float16"}
_CHECKPOINT_DTYPES = ("float32", "bfloat16", "float16")


def find_card(kind: str) -> Card | None:
    """Return what the best GPU here has; None for other devices, and where the driver does not tell."""
    if kind == "rocm":
        return CARDS["gfx90a"]  # all of AMD's have the same types
    capability = highest_capability() if kind == "cuda" else None
    return nvidia_card(*capability) if capability else None


def choose_dtype(asked: str, checkpoint: Checkpoint, device_kind: str) -> str:
    """Return torch's name of the type of weights: as asked, or as stored, if the device computes in it.

    Raises ConfigError for bfloat16 that was asked for on a GPU without.
    """
    card = find_card(device_kind)
    lacks_bfloat16 = card is not None and not card.has_bfloat16
    if asked == "bfloat16" and lacks_bfloat16:
        raise ConfigError(
            "Bfloat16 is only supported on GPUs with compute capability of at least 8.0. You can use float16 "
            "instead by explicitly setting the `dtype` flag in CLI, for example: --dtype=half."
        )
    if asked != "auto":
        return _ALIASES.get(asked, asked)
    configs = checkpoint.text_config, checkpoint.config  # the whole one alone has it where there are parts
    found = (config.get(name) for config in configs for name in ("dtype", "torch_dtype"))
    stored = next(filter(None, found), None)
    if stored not in _CHECKPOINT_DTYPES:
        stored = "float32" if device_kind == "cpu" and checkpoint.format != "gguf" else "bfloat16"
    if stored == "bfloat16" and lacks_bfloat16:
        logger.warning("The GPU has no bfloat16 (compute capability below 8.0): dtype='float16' is used.")
        stored = "float16"
    return str(stored)


def choose_kv_cache_dtype(asked: str, dtype: str, device_kind: str) -> str:
    """Return torch's name of the type of keys and values. Raises ConfigError for one the device has not."""
    cpu = device_kind == "cpu"
    if asked.startswith("fp8"):
        if cpu:
            raise ConfigError(f"kv_cache_dtype={asked!r} needs a GPU; on a CPU use 'int8' or 'bfloat16'.")
        card = find_card(device_kind)
        if card is not None and not card.has_fp8:
            raise ConfigError(
                f"kv_cache_dtype={asked!r} needs an NVIDIA GPU of compute capability 8.9 or more; this one "
                f"is {card.name}. Leave it out."
            )
        return "float8_e4m3fn"
    if asked.startswith("int8"):
        if not cpu:
            raise ConfigError(f"kv_cache_dtype={asked!r} needs a CPU; on a GPU use 'fp8' or 'bfloat16'.")
        return "int8"
    return dtype if asked == "auto" else asked
