"""Turns what the user said into what the engine does: every open option is decided here, once, and logged."""

import dataclasses
import math
from pathlib import Path
from typing import Any, TypeVar, get_origin

from octavo.base import env
from octavo.base.cores import usable_cores
from octavo.base.errors import BadCheckpoint, ConfigError, Unsupported
from octavo.base.hub import BUILT_IN, locate
from octavo.base.log import get_logger
from octavo.config import snapshot
from octavo.config.args import EngineArgs
from octavo.config.cache import CacheConfig
from octavo.config.checkpoint import Checkpoint, read_checkpoint, read_generation_config
from octavo.config.dtypes import choose_dtype, choose_kv_cache_dtype
from octavo.config.engine import EngineConfig
from octavo.config.expert_load import check_expert_load, share_experts
from octavo.config.front import FrontConfig
from octavo.config.kv_transfer import kv_store
from octavo.config.lora import LoRAConfig, resolve_lora
from octavo.config.media import MediaConfig
from octavo.config.model import FIT, NO_GENERATION_CONFIG, ModelConfig
from octavo.config.observability import ObservabilityConfig
from octavo.config.option import TARGET
from octavo.config.parallel import ALL_LAYERS, ParallelConfig
from octavo.config.pooling import PoolingConfig, read_pooling
from octavo.config.processors import importable_name, installed_processors
from octavo.config.resolve_parallel import check_device, check_sizes, resolve_parallel
from octavo.config.scheduling import SchedulerConfig
from octavo.config.sentence_bert import read_folder
from octavo.config.speculative import (
    BY_WORKERS,
    CUSTOM,
    WITH_WEIGHTS,
    check_draft,
    flattened,
    method_of,
    names_class,
    speculation,
    with_short,
)

logger = get_logger(__name__)
C = TypeVar("C")

_LOWEST = {"max_model_len": FIT, "cpu_offload_experts": ALL_LAYERS}
_LOWEST |= dict.fromkeys(("max_logprobs", "max_num_queued_reqs", "data_parallel_rank", "spec_tokens"), -1)
"""Numbers that may be below 0; every seed may."""


def resolve(args: EngineArgs, *, needs_device: bool = True) -> EngineConfig:
    """Decide everything that was left open. Raises ConfigError for options that cannot work together.

    needs_device: the device must be here; False for plans
    """
    _check(args)
    check_device(args.device, must_be_here=needs_device)
    path = locate(args.model, revision=args.revision, download_dir=args.download_dir)
    folder = read_folder(path)
    checkpoint = read_checkpoint(Path(folder.model_path or path), args.hf_overrides, args.mmproj)
    args = snapshot.with_options(args, checkpoint)
    if args.model in BUILT_IN and path != Path(args.model):  # no folder that has this name
        generation = BUILT_IN[args.model].generation | checkpoint.generation_config
        checkpoint = dataclasses.replace(checkpoint, generation_config=generation)
    if args.generation_config not in ("auto", *NO_GENERATION_CONFIG):
        checkpoint = _with_generation_config(checkpoint, args.generation_config)
    pooling = read_pooling(args.runner, args.convert, args.pooler_config, checkpoint, folder)
    if pooling is not None:
        args = _for_pooling(args, pooling)
    parallel = share_experts(resolve_parallel(_part(args, ParallelConfig)), checkpoint, args)
    check_sizes(parallel, checkpoint)
    check_expert_load(parallel, checkpoint)
    cpu = parallel.device == "cpu"
    model = dataclasses.replace(
        _part(args, ModelConfig),
        dtype=choose_dtype(args.dtype, checkpoint, parallel.device_kind),
        load_format=_load_format(args.load_format, checkpoint),
        max_model_len=_max_model_len(args.max_model_len, checkpoint, folder.max_seq_length),
        logits_processors=[*installed_processors(), *map(importable_name, args.logits_processors)],
        seed=args.seed or int(parallel.distributed_executor_backend == "external_launcher"),
    )
    if (num_stages := parallel.pipeline_parallel_size) > 1 and pooling is not None:
        raise Unsupported(f"pipeline_parallel_size={num_stages}: pooling models run in one stage.")
    if model.enable_return_routed_experts and (
        num_stages > 1 or pooling is not None or with_short(args.speculative_config, args)
    ):
        text = "for models that generate, in one stage only, without speculation"
        raise Unsupported(f"enable_return_routed_experts: {text}.")
    config = EngineConfig(
        model=model,
        cache=_cache(args, parallel.device_kind, model.dtype),
        scheduler=_scheduler(args, cpu, model.max_model_len),
        parallel=parallel,
        observability=_part(args, ObservabilityConfig),
        front=_part(args, FrontConfig),
        media=_media(args),
        lora=resolve_lora(_part(args, LoRAConfig), args.max_loras, args.model_impl, checkpoint),
        checkpoint=checkpoint,
        pooling=pooling,
        fit_max_model_len=args.max_model_len == FIT,
    )
    snapshot.check_options(config)
    config = dataclasses.replace(config, draft=_draft(args, config))
    logger.info("%s", describe(config))
    return config


def _media(args: EngineArgs) -> MediaConfig:
    media = _part(args, MediaConfig)
    return dataclasses.replace(
        media, media_processes=media.media_processes or min(4, -(-usable_cores() // 2))
    )


def _draft(args: EngineArgs, config: EngineConfig) -> EngineConfig | None:
    """The config of the model that guesses tokens; None without one."""
    given = config.scheduler.speculative_config
    wanted = speculation(given)
    if wanted is None or wanted.method not in WITH_WEIGHTS:
        return None
    if config.pooling is not None:
        raise Unsupported("speculative_config: a draft model does not work with a pooling model.")
    shared = {
        "draft_tensor_parallel_size": config.parallel.tensor_parallel_size,
        "max_model_len": config.model.max_model_len,
        "kv_cache_dtype": config.cache.kv_cache_dtype,
    }
    for name, value in shared.items():
        if given.get(name) not in (None, "auto", value):
            raise Unsupported(
                f"speculative_config: {name}={given[name]!r} is not supported: drafts share ranks and blocks "
                f"of the model. Leave it out, or use {value!r}."
            )
    on_device = dataclasses.replace(config.parallel, cpu_offload_experts=0)
    alone = dataclasses.replace(config, lora=LoRAConfig(), parallel=on_device)
    if not given.get("model") or wanted.method == CUSTOM:
        return alone
    path = locate(given["model"], revision=given.get("revision", ""), download_dir=args.download_dir)
    checkpoint = read_checkpoint(Path(path))
    checkpoint = dataclasses.replace(checkpoint, config=flattened(checkpoint.config))
    check_draft(given, wanted.method, checkpoint, config.checkpoint, config.model.max_model_len)
    model = dataclasses.replace(
        config.model,
        model=given["model"],
        dtype=choose_dtype(args.dtype, checkpoint, config.parallel.device_kind)
        if wanted.method == "draft_model"
        else config.model.dtype,
        load_format=_load_format(args.load_format, checkpoint),
        quantization=given.get("quantization", ""),
        quantization_config={},
    )
    return dataclasses.replace(alone, model=model, checkpoint=checkpoint)


def describe(config: EngineConfig) -> str:
    """One table of the decisions."""
    rows = {
        "model": f"{config.checkpoint.path} ({config.checkpoint.architecture}, {config.model.load_format})",
        "device": f"{config.parallel.device} x {config.parallel.world_size * config.parallel.num_replicas}",
        "dtype": f"{config.model.dtype}, KV cache {config.cache.kv_cache_dtype}",
        "context": f"{'at most ' * config.fit_max_model_len}{config.model.max_model_len} tokens",
        "step": f"{config.scheduler.max_num_batched_tokens} tokens, {config.scheduler.max_num_seqs} requests,"
        f" {config.scheduler.scheduling_policy}",
    }
    return "Engine:" + "".join(f"\n  {name:<8} {value}" for name, value in rows.items())


def _check(args: EngineArgs) -> None:
    for field in dataclasses.fields(args):
        _check_field(field, getattr(args, field.name))
    if not 0 < args.gpu_memory_utilization <= 1:
        raise ConfigError(
            f"GPU memory utilization must be between 0 and 1. Got {args.gpu_memory_utilization}."
        )
    for kind in ("tensor", "pipeline", "data", "decode_context"):
        if (size := getattr(args, f"{kind}_parallel_size")) < 1:
            raise ConfigError(f"Invalid {kind} parallel size: {size} (must be at least 1).")
    if args.data_parallel_rank >= args.data_parallel_size:
        raise ConfigError(
            f"data_parallel_rank ({args.data_parallel_rank}) must be less than data_parallel_size "
            f"({args.data_parallel_size})."
        )
    _check_offload(args)
    if args.trust_remote_code:
        logger.warning("trust_remote_code has no effect: octavo never runs code from a model folder.")


def _check_offload(args: EngineArgs) -> None:
    if args.cpu_offload_gb and args.offload_group_size:
        raise ConfigError("cpu_offload_gb and offload_group_size say the same in two ways: give one of them.")
    if args.cpu_offload_experts and (args.cpu_offload_gb or args.offload_group_size):
        raise ConfigError(
            "cpu_offload_experts keeps experts in host memory, cpu_offload_gb and offload_group_size whole "
            "layers: give one of them."
        )
    if args.offload_group_size and not 0 < args.offload_num_in_group <= args.offload_group_size:
        raise ConfigError(
            f"offload_num_in_group must be between 1 and offload_group_size ({args.offload_group_size}), "
            f"got {args.offload_num_in_group}."
        )


def _check_field(field: dataclasses.Field[Any], value: Any) -> None:
    """Type, range and choices of one option, as far as they depend on nothing else."""
    kind: Any = get_origin(field.type) or field.type
    fits = isinstance(value, int | float) if kind is float else isinstance(value, kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{field.name} must be of type {kind.__name__}, got {value!r}.")
    if kind in (int, float) and field.name != "seed" and value < (lowest := _LOWEST.get(field.name, 0)):
        raise ConfigError(
            f"{field.name} must be at least {lowest}, got {value}. ({field.metadata['explain']})"
        )
    choices = field.metadata["choices"]
    if choices and value not in choices and not (TARGET in choices and ":" in value):
        raise ConfigError(f"{field.name}={value!r} is not one of {', '.join(choices)}.")


def _part(args: EngineArgs, kind: type[C]) -> C:
    names = [f.name for f in dataclasses.fields(kind)]  # type: ignore[arg-type]  # every kind is a dataclass
    return kind(**{name: getattr(args, name) for name in names})


def _with_generation_config(checkpoint: Checkpoint, folder: str) -> Checkpoint:
    found = read_generation_config(Path(folder))
    if found is None:
        raise ConfigError(
            f"generation_config={folder!r} is neither auto (the model's), octavo (none), nor a folder with a "
            "generation_config.json."
        )
    ends = {key: ids for key, ids in checkpoint.generation_config.items() if key == "eos_token_id"}
    return dataclasses.replace(checkpoint, generation_config=ends | found)


def _load_format(load_format: str, checkpoint: Checkpoint) -> str:
    if load_format in ("auto", "hf"):
        if checkpoint.format == "none":
            raise BadCheckpoint(
                f"{checkpoint.path} holds a config but no *.safetensors; load_format='dummy' runs it with "
                "random weights."
            )
        return checkpoint.format
    if load_format not in ("dummy", checkpoint.format):
        raise ConfigError(f"load_format={load_format!r}, but {checkpoint.path} is {checkpoint.format}.")
    return load_format


def _for_pooling(args: EngineArgs, pooling: PoolingConfig) -> EngineArgs:
    """Without what would change the results: shared beginnings, and prompts in pieces."""
    return dataclasses.replace(
        args,
        enable_prefix_caching=args.enable_prefix_caching and pooling.reads_prefix,
        enable_chunked_prefill=args.enable_chunked_prefill and pooling.is_causal,
    )


def _max_model_len(asked: int, checkpoint: Checkpoint, usual: int = 0) -> int:
    """usual: the longest text that the folder of a pooling model tells."""
    longest = checkpoint.max_position_embeddings
    if asked in (FIT, 0):
        return min(longest, usual or longest)
    if asked > longest:
        raise ConfigError(
            f"max_model_len={asked} is longer than the {longest} positions the model was made for; "
            f"use at most {longest}, or hf_overrides={{'max_position_embeddings': …}} if you know better."
        )
    return asked


def _cache(args: EngineArgs, device_kind: str, dtype: str) -> CacheConfig:
    cache, cpu = _part(args, CacheConfig), device_kind == "cpu"
    kv_store(cache.kv_transfer_config)  # refuses what it does not know
    cpu_bytes = int(env.cpu_cache_gib() * (1 << 30)) if cpu else 0
    block_size, interleave = cache.block_size or (16 if cpu else 64), args.cp_kv_cache_interleave_size
    if interleave < 1 or block_size % interleave:
        raise ConfigError(
            f"Block_size({block_size}) should be greater than or equal to and divisible by "
            f"cp_kv_cache_interleave_size ({interleave})."
        )
    return dataclasses.replace(
        cache,
        block_size=block_size,
        kv_cache_memory_bytes=cache.kv_cache_memory_bytes or cpu_bytes,
        kv_cache_dtype=choose_kv_cache_dtype(cache.kv_cache_dtype, dtype, device_kind),
    )


def _method_of(model: str, revision: str, download_dir: str) -> str:
    """Return how `model` guesses, by what it is."""
    if names_class(model) and not Path(model).exists():
        return CUSTOM
    return method_of(read_checkpoint(locate(model, revision=revision, download_dir=download_dir)).config)


def _scheduler(args: EngineArgs, cpu: bool, max_model_len: int) -> SchedulerConfig:
    scheduler = _part(args, SchedulerConfig)
    _check_weights(scheduler.fair_weights)
    speculative = with_short(scheduler.speculative_config, scheduler)
    if isinstance(model := speculative.get("model"), str) and model and not speculative.get("method"):
        speculative["method"] = _method_of(model, speculative.get("revision") or "", args.download_dir)
    wanted = speculation(speculative)  # refuses what it does not know
    has_drafter = wanted is not None and wanted.method in BY_WORKERS
    if wanted and has_drafter and scheduler.steps_in_flight > 2:
        raise ConfigError(
            f"steps_in_flight={scheduler.steps_in_flight}: a step with drafts of {wanted.method} begins with "
            "what came of the one before. Use steps_in_flight=2 at most, or leave it out."
        )
    num_stages = args.pipeline_parallel_size
    waits = wanted is not None and wanted.method == CUSTOM
    most_seqs = 256 if cpu else 1024
    seqs = scheduler.max_num_seqs or min(most_seqs, scheduler.max_num_batched_tokens or most_seqs)
    tokens = scheduler.max_num_batched_tokens or max(seqs, 4096 if cpu else 16384)
    if tokens < seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({tokens}) must be at least max_num_seqs ({seqs}): each running request "
            "needs one token of every step."
        )
    if not scheduler.enable_chunked_prefill and tokens < max_model_len:
        if scheduler.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_batched_tokens ({tokens}) is smaller than max_model_len ({max_model_len}) and "
                "chunked prefill is off: raise it, lower max_model_len, or leave enable_chunked_prefill on."
            )
        tokens = max_model_len
    if scheduler.long_prefill_token_threshold > 0 and not scheduler.enable_chunked_prefill:
        raise Unsupported("long_prefill_token_threshold needs enable_chunked_prefill=True.")
    return dataclasses.replace(
        scheduler,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        steps_in_flight=scheduler.steps_in_flight or (1 if cpu or waits else 2) * num_stages,
        speculative_config=speculative,
    )


def _check_weights(weights: dict[str, Any]) -> None:
    for tenant, weight in weights.items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not isinstance(tenant, str) or not is_number or not 0 < weight < math.inf:
            raise ConfigError(
                f"fair_weights must map names of tenants to numbers above 0, got {tenant!r}: {weight!r}."
            )
