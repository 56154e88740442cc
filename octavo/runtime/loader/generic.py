"""Loads a model that runs by transformers' code: class and config by name, weights from safetensors.

Chosen by `load_model` for architectures without a file in runtime/models. No code of the model's folder runs:
the class is one of the installed transformers, and of the folder only config.json and the tensors are read.
Names and layouts that transformers changes while loading are its own business (`from_pretrained`).
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from octavo.base.devices import torch_name
from octavo.base.errors import BadCheckpoint, ConfigError, Unsupported
from octavo.base.log import get_logger
from octavo.config.engine import EngineConfig
from octavo.runtime.distributed.context import ParallelContext
from octavo.runtime.loader.dummy import random_tensor
from octavo.runtime.loader.host_weights import wants_host_weights
from octavo.runtime.loader.loader import dtype_of, make_context, shorten
from octavo.runtime.loader.safetensors import read_tensors
from octavo.runtime.models.generic import ATTENTION, Generic, probe, verify
from octavo.runtime.models.interface import MODELS
from octavo.runtime.platforms.platform import Platform

logger = get_logger(__name__)

_KINDS = {"full_attention", "sliding_attention"}
_GROWING_ROPES = {"dynamic", "longrope"}
_FOREIGN = ("auto_map", "attn_implementation", "experts_implementation", "quantization_config")
"""Entries of a config.json that name code to run, or are refused before."""


def load(config: EngineConfig, platform: Platform, parallel: ParallelContext) -> Generic:
    """Build, fill, probe and verify. Raises ConfigError (BadCheckpoint), Unsupported."""
    cls = _find_class(config.checkpoint.architecture)
    _check_options(config, cls, parallel)
    hf_config = _make_config(cls, config)
    _check_kind(config, cls, hf_config)
    torch.set_num_threads(config.parallel.cpu_threads)  # products will be torch's own
    hf = _fill(cls, hf_config, config, platform)
    link = probe(hf)
    kv_dtype = dtype_of(config.cache.kv_cache_dtype)
    build = make_context(config, [call.kv_spec(kv_dtype) for call in link.calls], platform, parallel)
    model = Generic(hf, link, build)
    verify(model, build)
    logger.info(
        "%s runs by the code of transformers %s. Its weights, read as %s, take %.2f GiB of memory as %s.",
        cls.__name__,
        transformers.__version__,
        config.model.dtype,
        model.weight_bytes / 2**30,
        str(build.compute_dtype).removeprefix("torch."),
    )
    return model


def _find_class(architecture: str) -> type[PreTrainedModel]:
    if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise BadCheckpoint(
            f"octavo has no file for the architecture {architecture!r}, and transformers "
            f"{transformers.__version__} has no causal language model of that name; code from a model folder "
            f"never runs. octavo's own: {', '.join(MODELS.names()).replace('ForCausalLM', '')}."
        )
    cls: type[PreTrainedModel] = getattr(transformers, architecture)
    return cls


def _check_options(config: EngineConfig, cls: type[PreTrainedModel], parallel: ParallelContext) -> None:
    """Raise ConfigError, Unsupported for what this way of computing does not have."""
    stored = config.checkpoint.config.get("quantization_config")
    method = stored.get("quant_method") if isinstance(stored, dict) else stored
    is_packed = config.model.quantization not in ("", "unquantized")
    on_host = wants_host_weights(config)
    refused = {
        "which needs safetensors, not GGUF": config.model.load_format == "gguf",
        "with weights as they are: leave out quantization": is_packed,
        f"with unquantized weights only; these are stored by {method!r}": bool(stored),
        "which needs its weights on the GPU: leave out cpu_offload_gb and offload_group_size": on_host,
    }
    if parallel.world.size > 1 or parallel.tp_size > 1:
        raise ConfigError(
            f"{cls.__name__} runs by transformers' code, on one rank only: use tensor_parallel_size=1 and "
            "pipeline_parallel_size=1."
        )
    for reason, is_refused in refused.items():
        if is_refused:
            raise Unsupported(f"{cls.__name__} runs by transformers' code, {reason}.")


def _make_config(cls: type[PreTrainedModel], config: EngineConfig) -> Any:
    """Return the config as transformers' object. Raises BadCheckpoint."""
    config_class: Any = cls.config_class
    try:
        return config_class.from_dict(_clean(config.checkpoint.config), attn_implementation=ATTENTION)
    except Exception as error:
        raise BadCheckpoint(
            f"{config.checkpoint.path}: transformers refuses the config of this {cls.__name__}: {error!r}"
        ) from error


def _clean(entry: Any) -> Any:
    """Return the entry without foreign ones; read numbers that JSON lacks ({"__float__": "Infinity"})."""
    if isinstance(entry, list):
        return [_clean(value) for value in entry]
    if not isinstance(entry, dict):
        return entry
    if "__float__" in entry:
        return float(entry["__float__"])
    return {name: _clean(value) for name, value in entry.items() if not name.strip("_").startswith(_FOREIGN)}


def _check_kind(config: EngineConfig, cls: type[PreTrainedModel], hf_config: Any) -> None:
    """Raise Unsupported for models that cannot use a paged cache, before anything is read."""
    text = hf_config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) - _KINDS
    if hf_config.is_encoder_decoder or getattr(text, "add_cross_attention", False):
        reason = "it has an encoder"
    elif kinds:
        reason = f"it has layers of kind {', '.join(sorted(kinds))}"
    elif cls._is_stateful:
        reason = "it keeps a recurrent state"
    elif not hasattr(sys.modules[cls.__module__], "ALL_ATTENTION_FUNCTIONS"):
        reason = "it does not use transformers' attention interface (as models with ALiBi do not)"
    else:
        _check_rope(config, text)
        return
    raise Unsupported(f"{cls.__name__} of transformers cannot run over octavo's paged cache: {reason}.")


def _check_rope(config: EngineConfig, text: Any) -> None:
    """Raise ConfigError for lengths at which a rope would depend on the longest request of the step."""
    given = getattr(text, "rope_parameters", None) or {}
    for rope in [given] if "rope_type" in given else given.values():
        if not rope or rope["rope_type"] not in _GROWING_ROPES:
            continue
        own = getattr(text, "original_max_position_embeddings", None) or text.max_position_embeddings
        longest = rope.get("original_max_position_embeddings") or own
        if config.model.max_model_len > longest:
            raise ConfigError(
                f"max_model_len={config.model.max_model_len}: by transformers' code, this model's rope "
                f"({rope['rope_type']}) serves at most {longest} tokens; use max_model_len={longest}."
            )


def _fill(
    cls: type[PreTrainedModel], hf_config: Any, config: EngineConfig, platform: Platform
) -> PreTrainedModel:
    path = config.checkpoint.path
    make: Any = cls.from_pretrained
    try:
        hf, report = make(
            None,
            config=hf_config,
            state_dict=_tensors(cls, hf_config, config),
            dtype=platform.compute_dtype(dtype_of(config.model.dtype)),
            attn_implementation=ATTENTION,
            ignore_mismatched_sizes=True,  # reported below
            output_loading_info=True,
        )
    except (ImportError, RuntimeError, ValueError) as error:
        raise BadCheckpoint(f"{path}: transformers cannot fill a {cls.__name__} from it: {error}") from error
    _check_report(path, "lacks", report["missing_keys"])
    _check_report(path, "has, but this model has no place for,", report["unexpected_keys"])
    _check_report(path, "has in another shape", (row[0] for row in report["mismatched_keys"]))
    filled: PreTrainedModel = hf.eval().requires_grad_(False).to(platform.device)
    return filled


def _check_report(path: str, what: str, names: Iterable[str]) -> None:
    if listed := sorted(names):
        raise BadCheckpoint(f"{path} {what} {len(listed)} weights: {shorten(listed)}")


def _tensors(cls: type[PreTrainedModel], hf_config: Any, config: EngineConfig) -> dict[str, Tensor]:
    """Return the checkpoint's tensors by name, mapped from the files, or random ones."""
    if config.model.load_format != "dummy":
        return {name: tensor for _, name, tensor in read_tensors(Path(config.checkpoint.path))}
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in cls(hf_config).state_dict().items()}
    seed, device = config.model.seed, torch_name(config.parallel.device)
    return {name: random_tensor(seed, name, shape, device) for name, shape in shapes.items()}
