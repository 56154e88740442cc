"""Options of adapters, and what PEFT writes beside an adapter's weights.

`read_peft` and `read_shapes` read an adapter's folder; the front-end checks with them what users name, the
runtime how the weights are scaled. Nothing here is taken from a pickle file.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from octavo.base.errors import BadCheckpoint, ConfigError, RequestError, Unsupported
from octavo.config.checkpoint import Checkpoint, read_json
from octavo.config.option import Concern, option

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_CHANGES_BASE = ("pissa", "corda", "loftq", "lora_ga")
_RESIDUALS = ("pissa", "olora")
_REFUSED = {
    "layer_replication": "layer_replication makes another model of the base; merge the adapter into it.",
    "use_qalora": "QALoRA (use_qalora) is not supported.",
    "use_bdlora": "BD-LoRA (use_bdlora) is not supported.",
    "arrow_config": "Arrow's routing among adapters (arrow_config) is not supported.",
    "lora_ga_config": "lora_ga_config changes the base; convert the adapter to plain LoRA.",
}


@dataclass(frozen=True, kw_only=True)
class LoRAConfig(metaclass=Concern):
    """Adapters that requests may name. How many of them share a step says SchedulerConfig.max_loras."""

    enable_lora: bool = option(False, "Serve LoRA adapters beside the model (lora_request).")
    max_lora_rank: int = option(64, "Largest rank of an adapter; any number. Memory goes by the real rank.")
    max_cpu_loras: int = option(
        0, "Adapters kept in host memory; the least recently used goes. 0 = eight times max_loras."
    )
    lora_dtype: str = option(
        "auto",
        "Type that adapters are kept in; auto = the model's (float16 on a CPU: float32).",
        ("auto", "float32", "bfloat16", "float16"),
    )
    enable_prompt_adapter: bool = option(
        False, "Serve learned prompts beside the model (prompt_adapter_request)."
    )
    max_prompt_adapters: int = option(32, "Learned prompts in host memory; the least recently used goes.")
    max_prompt_adapter_token: int = option(0, "Most virtual tokens of a learned prompt; 0 = any number.")
    lora_target_modules: list[str] = option(
        [], "Modules that adapters may change, by the last part of their names; none = any."
    )
    default_mm_loras: dict[str, str] = option(
        {},
        'Adapters of requests that name none, by modality: {"audio": "./folder"}; the first that a prompt '
        'has answers. {} = the checkpoint\'s own (Phi-4 multimodal\'s), {"image": ""} = none.',
    )


def resolve_lora(lora: LoRAConfig, max_loras: int, model_impl: str, checkpoint: Checkpoint) -> LoRAConfig:
    """Decide what was left open. Raises ConfigError, Unsupported."""
    lora = _with_defaults(lora, checkpoint)
    if lora.enable_prompt_adapter:
        _check_prompts(lora, model_impl)
    if not lora.enable_lora:
        return lora
    if max_loras < 1 or lora.max_lora_rank < 1:
        raise ConfigError(f"max_loras ({max_loras}) and max_lora_rank ({lora.max_lora_rank}) must be >= 1.")
    most = lora.max_cpu_loras or 8 * max_loras
    if most < max_loras:
        raise ConfigError(f"max_cpu_loras ({most}) must be greater than or equal to max_loras ({max_loras}).")
    if model_impl == "transformers":
        raise Unsupported("enable_lora needs a model of octavo's own: leave out model_impl='transformers'.")
    return replace(lora, max_cpu_loras=most)


def _with_defaults(lora: LoRAConfig, checkpoint: Checkpoint) -> LoRAConfig:
    """Serve the adapters that images and sounds need, the checkpoint's own too, whatever their rank."""
    given, most = lora.default_mm_loras, lora.max_lora_rank
    if not given and checkpoint.architecture == "Phi4MultimodalForCausalLM":
        from octavo.config.phi4_multimodal import own_adapters

        given = own_adapters(Path(checkpoint.path), checkpoint.config)
    given = {name: path for name, path in given.items() if path}
    if wrong := given.keys() - {"image", "video", "audio"}:
        raise ConfigError(f"default_mm_loras: modalities are image, video, audio; got {sorted(wrong)}.")
    try:
        most = max([most, *(read_peft(Path(path).expanduser()).rank for path in given.values())])
    except RequestError as error:
        raise ConfigError(f"default_mm_loras: {error}") from error
    is_on = lora.enable_lora or bool(given)
    return replace(lora, default_mm_loras=given, enable_lora=is_on, max_lora_rank=most)


class LoRAModule(msgspec.Struct, forbid_unknown_fields=True):
    """An entry of the server's option lora_modules."""

    name: str
    path: str
    base_model_name: str = ""
    task_id: int = 0
    """Of a multitask prompt."""


def read_module(text: str) -> LoRAModule:
    """Read name=path, or a JSON object. Raises ConfigError."""
    try:
        if text.lstrip().startswith("{"):
            module = msgspec.json.decode(text, type=LoRAModule)
        else:
            name, _, path = text.partition("=")
            module = LoRAModule(name, path)
    except msgspec.DecodeError as error:
        told = f"lora_modules: {text[:200]!r} is no JSON object of name and path: {error}"
        raise ConfigError(told) from None
    if not module.name or not module.path:
        raise ConfigError(f"lora_modules: give name=path or a JSON object, got {text[:200]!r}.")
    return module


def _check_prompts(lora: LoRAConfig, model_impl: str) -> None:
    """Raise ConfigError, Unsupported where learned prompts cannot be."""
    if lora.max_prompt_adapters < 1 or lora.max_prompt_adapter_token < 0:
        raise ConfigError(
            f"max_prompt_adapters ({lora.max_prompt_adapters}) must be >= 1, max_prompt_adapter_token "
            f"({lora.max_prompt_adapter_token}) >= 0."
        )
    if model_impl == "transformers":
        raise Unsupported(
            "enable_prompt_adapter needs a model of octavo's own: leave out model_impl='transformers'."
        )


@dataclass(frozen=True)
class PeftConfig:
    """What adapter_config.json says of a LoRA adapter."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    uses_rslora: bool = False
    uses_dora: bool = False
    modules_to_save: tuple[str, ...] = ()
    invocation: tuple[int, ...] = ()
    """Of an activated adapter (arXiv:2504.12397): the tokens from whose last occurrence on it counts."""
    stacked: frozenset[str] = frozenset()
    """Last parts of the names of modules whose parameters, of all experts together, have adapters."""
    residual: str = ""
    """How the base was changed before training, which counts as part of the adapter: "pissa", "olora"."""
    trained_tokens: Mapping[str, list[int]] = field(default_factory=dict)
    """By module, of which matrices single rows were trained, and those of which tokens."""
    trains_biases: bool = False
    """Those of the base, which are saved beside the adapter."""

    def rank_of(self, module: str) -> int:
        """Return the rank that training gave to a module."""
        return int(_by_pattern(self.rank_pattern, module, self.rank))

    def scaling(self, module: str, rank: int) -> float:
        """Return the factor on B A of `module`, whose A has `rank` rows."""
        alpha = float(_by_pattern(self.alpha_pattern, module, self.alpha))
        return alpha / (math.sqrt(rank) if self.uses_rslora else rank)

    def tokens_of(self, module: str) -> list[int]:
        """Return the tokens whose rows of `module` were trained, in the order of the file."""
        return list(_by_pattern(self.trained_tokens, module, ()))


def read_peft_files(folder: Path) -> Mapping[str, Any]:
    """Read adapter_config.json as it is, of a folder that has weights too. Raises RequestError."""
    if not folder.is_dir() or not (folder / CONFIG).is_file():
        raise RequestError(f"No adapter found for {folder}: there is no {CONFIG}.", "lora_path")
    if not (folder / WEIGHTS).is_file():
        pickled = f"; {PICKLE}, a pickle file, is never read" if (folder / PICKLE).exists() else ""
        raise RequestError(f"No adapter found for {folder}: there is no {WEIGHTS}{pickled}.", "lora_path")
    try:
        return read_json(folder / CONFIG)
    except BadCheckpoint as error:
        raise RequestError(str(error), "lora_path") from error


def read_peft(folder: Path) -> PeftConfig:
    """Read the config of a LoRA adapter. Raises RequestError for what is missing, wrong or not supported."""
    config = read_peft_files(folder)
    _refuse_kinds(config, folder)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise _wrong(folder, f"r must be a positive integer, found {rank!r}")
    if not _is_number(alpha):
        raise _wrong(folder, f"lora_alpha must be a number, found {alpha!r}")
    ranks, alphas = (config.get(name) or {} for name in ("rank_pattern", "alpha_pattern"))
    saved = config.get("modules_to_save") or ()
    is_plain = isinstance(saved, list | tuple) and all(isinstance(name, str) for name in saved)
    for pattern in (ranks, alphas):
        is_plain = is_plain and isinstance(pattern, dict) and all(map(_is_number, pattern.values()))
    if not is_plain:
        raise _wrong(folder, "rank_pattern, alpha_pattern or modules_to_save cannot be read")
    invocation = config.get("alora_invocation_tokens") or ()
    if not isinstance(invocation, list | tuple) or any(type(token) is not int for token in invocation):
        raise _wrong(folder, f"alora_invocation_tokens must be token ids, found {invocation!r:.100}")
    rslora, dora = bool(config.get("use_rslora")), bool(config.get("use_dora"))
    biased = config.get("bias", "none") != "none"
    if invocation and (dora or saved or biased):
        raise _wrong(folder, "an activated adapter (alora_invocation_tokens) is plain LoRA")
    parameters = config.get("target_parameters") or ()
    if not isinstance(parameters, list | tuple) or not all(isinstance(name, str) for name in parameters):
        raise _wrong(folder, "target_parameters must be names")
    stacked = frozenset(name.rpartition(".")[0].rpartition(".")[2] for name in parameters)
    start = str(config.get("init_lora_weights")).lower()
    residual = start if start in _RESIDUALS else ""
    if residual and (invocation or dora or saved or stacked or biased):
        text = f"init_lora_weights={start!r} is for plain LoRA only; convert the adapter"
        raise _wrong(folder, f"{text} (path_initial_model_for_weight_conversion)")
    given = rank, float(alpha or 0), ranks, alphas, rslora, dora, tuple(saved), tuple(invocation)
    return PeftConfig(*given, stacked, residual, _trained_tokens(config, folder), biased)


def _trained_tokens(config: Mapping[str, Any], folder: Path) -> dict[str, list[int]]:
    """Return trainable_token_indices by module; a list alone is of the embedding, however it is named."""
    given = config.get("trainable_token_indices") or {}
    found = given if isinstance(given, dict) else {".*": given}
    for tokens in found.values():
        is_plain = isinstance(tokens, list) and all(type(token) is int and token >= 0 for token in tokens)
        if not is_plain or len({*tokens}) < len(tokens):
            text = f"trainable_token_indices must be token ids, each once, found {tokens!r:.100}"
            raise _wrong(folder, text)
    return found


def _wrong(folder: Path, what: str) -> RequestError:
    return RequestError(f"{folder / CONFIG}: {what}.", "lora_path")


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter's tensors by name, from the header alone. Raises RequestError."""
    from octavo.base.safetensors_header import read_header

    path = folder / WEIGHTS
    try:
        return {name: tuple(row["shape"]) for name, row in read_header(path)[0].items()}
    except (OSError, ValueError) as error:
        raise RequestError(f"{path} is no safetensors file: {error!r:.200}", "lora_path") from error


def _refuse_kinds(config: Mapping[str, Any], folder: Path) -> None:
    """Raise RequestError for what is not LoRA, or a kind of it that is not supported; say what would work."""
    reason = next((text for key, text in _REFUSED.items() if config.get(key)), "")
    kind, start = config.get("peft_type"), config.get("init_lora_weights")
    if kind != "LORA":
        reason = f"peft_type {kind!r} is not supported: LORA is."
    elif (
        isinstance(start, str) and start.lower() not in _RESIDUALS and start.lower().startswith(_CHANGES_BASE)
    ):
        reason = (
            f"init_lora_weights={start!r} has changed the base by random numbers or by data: save it "
            "with path_initial_model_for_weight_conversion, which makes it plain LoRA."
        )
    elif config.get("bias", "none") not in ("none", "all", "lora_only"):
        reason = f"bias={config['bias']!r} is not supported: 'none', 'all' and 'lora_only' are."
    if reason:
        raise RequestError(f"{folder / CONFIG}: {reason}", "lora_path")


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first pattern that fits the end of the module's name, as PEFT finds it."""
    for pattern, value in patterns.items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error:
            continue
    return default


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
