"""`load_model` builds the model that a config describes and fills its parameters, or names the fault."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from math import prod
from pathlib import Path
from typing import get_args

import torch
from tqdm.auto import tqdm

from octavo.base.errors import BadCheckpoint, OctavoError, Unsupported
from octavo.base.log import get_logger
from octavo.base.registry import Registry
from octavo.config.engine import EngineConfig
from octavo.config.speculative import HIDDEN_STATES, speculation
from octavo.messages.kv import KVCacheSpec, StateKV
from octavo.runtime.attention.registry import choose_backend
from octavo.runtime.batch import MAX_CAPTURED_TOKENS
from octavo.runtime.distributed.context import ParallelContext
from octavo.runtime.distributed.group import ONE
from octavo.runtime.distributed.stages import cut_layers
from octavo.runtime.kernels.precision import InputPrecision
from octavo.runtime.layers.build import BuildContext, finish_loading, named_parameters, packed_matrices
from octavo.runtime.layers.side_by_side import SideBySideArch
from octavo.runtime.loader import host_weights
from octavo.runtime.loader.expert_cache import ExpertCache, host_expert_bytes
from octavo.runtime.loader.kv_scales import use_kv_scales
from octavo.runtime.loader.piece import Piece
from octavo.runtime.loader.pooler import add_pooler, read_stages
from octavo.runtime.loader.snapshot import restore
from octavo.runtime.lora.reader import AdapterReader
from octavo.runtime.lora.scheme import AdaptedScheme
from octavo.runtime.lora.sites import AdapterSlots, Sites
from octavo.runtime.models.arch import Arch
from octavo.runtime.models.interface import ENCODER_DECODERS, ENCODERS, MODELS, Family, Model
from octavo.runtime.models.media import MEDIA_ENCODERS, media_weights, text_model
from octavo.runtime.models.weights import layer_of
from octavo.runtime.platforms.meta import MetaPlatform
from octavo.runtime.platforms.platform import Platform
from octavo.runtime.quantization.method import SCHEMES, Scheme, Sources, Storage, select_scheme
from octavo.runtime.quantization.stored_config import stored_quantization

logger = get_logger(__name__)

Reader = Callable[[EngineConfig, Family, Arch], Iterator[Piece]]
Load = Callable[[EngineConfig, Platform, ParallelContext], Model]

IMPLEMENTATIONS: Registry[Load] = Registry(
    "model_impl",
    {"octavo": "octavo.runtime.loader.loader:load_own", "transformers": "octavo.runtime.loader.generic:load"},
)

READERS: Registry[Reader] = Registry(
    "load format",
    {
        "safetensors": "octavo.runtime.loader.safetensors:read",
        "gguf": "octavo.runtime.loader.gguf:read",
        "dummy": "octavo.runtime.loader.dummy:read",
    },
)

_SHOWN = 5
_BFLOAT16 = ("bfloat16", torch.bfloat16)  # input precision and weights, where encoders keep keys in it
_PADDING = 256  # rows that recorded and captured steps add
_FAULTS = (ArithmeticError, AttributeError, LookupError, MemoryError, OSError, TypeError, ValueError)


def _unknown(module: str) -> dict[str, str]:
    """Return nothing: no names are known of a model that transformers runs."""
    return {}


def load_model(
    config: EngineConfig, platform: Platform, parallel: ParallelContext, read: Reader | None = None
) -> Model:
    """Build and fill this rank's part of the model. Raises ConfigError (BadCheckpoint), Unsupported.

    read: where weights come from, if not a file
    """
    implementation = config.model.model_impl
    if implementation == "auto":
        every = MODELS, ENCODERS, ENCODER_DECODERS, MEDIA_ENCODERS
        is_own = any(config.architecture in known for known in every)
        implementation = "octavo" if is_own else "transformers"
    if read is None:
        return IMPLEMENTATIONS.load(implementation)(config, platform, parallel)
    if implementation != "octavo":
        raise Unsupported(f"{config.architecture} runs on transformers' code, which reads files only.")
    return load_own(config, platform, parallel, read)


def load_own(
    config: EngineConfig,
    platform: Platform,
    parallel: ParallelContext,
    read: Reader | None = None,
    family: type[Family] | None = None,
) -> Model:
    """Load a family of runtime/models, by default that of the config's architecture.

    read: where weights come from, if not a file
    """
    is_whole, family = family is None, family or _family(config)
    with _blaming_the_config(config):
        arch = _read_arch(config, family)
        if config.pooling is not None:
            if config.pooling.sparse and not family.MASKED_HEAD:
                raise Unsupported(f"{config.architecture} has no head that fills masked places (SPLADE).")
            pooling = config.pooling
            arch = arch.for_pooling(is_causal=pooling.is_causal, has_head=pooling.has_head)
        specs = _kv_specs(config, arch, parallel)
        if parallel.pp.size > 1:
            stages = _cut(config, family, arch, platform, parallel)
            parallel = replace(parallel, layers=stages[parallel.pp.rank])
        host_layers = _host_layers(config, family, arch, platform, parallel)
        build = make_context(config, specs, platform, parallel, host_layers, family.WEIGHTS.sources)
        model = family(arch, build)
        if is_whole and config.architecture in MEDIA_ENCODERS:
            _add_encoder(model, config, build)
        if (own := parallel.layers) is not None:
            each = len(specs) // len(arch.layers)
            model.kv_specs, model.own_kv_specs = specs, range(own.start * each, own.stop * each)
        if isinstance(build.scheme, AdaptedScheme):
            given = model, arch, config.lora.lora_target_modules, parallel.tp_rank
            model.adapters = AdapterReader(build.scheme.sites, *given, is_split=parallel.tp_size > 1)
    if config.pooling is not None:
        add_pooler(model, config.pooling, build, arch.hidden_size)
    if read is None and config.checkpoint.is_snapshot:
        restore(model, Path(config.checkpoint.path), parallel.world.rank, platform.device)
    else:
        read = read or READERS.load(config.model.load_format)
        pieces = read(config, model, arch)
        if config.pooling is not None:
            pieces = chain(pieces, read_stages(config))
        if config.checkpoint.mmproj and model.media_encoder is not None:
            from octavo.runtime.loader.mmproj import read_mmproj

            pieces = chain(pieces, read_mmproj(Path(config.checkpoint.mmproj), model, arch))
        _fill(model, pieces, config, parallel)
        finish_loading(model)
    use_kv_scales(config, model, parallel.layers.start if parallel.layers else 0)
    rounded = config.model.quantization or ("online" if config.model.quantization_config else "")
    if method := stored_quantization(config).get("quant_method") or rounded:
        counts = "; ".join(f"{count} x {kind}" for kind, count in packed_matrices(model).items())
        logger.info("Weights stored by %s are multiplied as %s.", method, counts)
    _offload(config, model, platform, host_layers)
    return model


def _offload(config: EngineConfig, model: Family, platform: Platform, host_layers: frozenset[int]) -> None:
    """Bring the weights that stay in host memory to where the device finds them. Raises ConfigError."""
    parallel, lane = config.parallel, platform.copy_lane()
    if parallel.cpu_offload_experts:
        model.host_weight_bytes = host_expert_bytes(model)
        if lane is not None:
            room = int(parallel.expert_cache_gb * 2**30)
            model.expert_cache = ExpertCache(model, platform.device, lane, room)
    elif host_layers:
        model.host_weight_bytes = sum(host_weights.layer_bytes(model)[layer] for layer in host_layers)
        if lane is not None:
            host_weights.HostWeights(
                model, sorted(host_layers), parallel.offload_prefetch_step, platform.device, lane
            )


def _family(config: EngineConfig) -> type[Family]:
    """Return the family of the text model. Raises Unsupported."""
    for known in (ENCODERS, ENCODER_DECODERS):
        if config.architecture in known:
            return known.load(config.architecture)
    if config.architecture in MEDIA_ENCODERS:
        return MODELS.load(text_model(config.checkpoint.text_config))
    return MODELS.load(config.architecture)


def _add_encoder(model: Family, config: EngineConfig, build: BuildContext) -> None:
    """Attach what turns media into embeddings; its weights are plain numbers, whatever the text's are."""
    scheme: Scheme = SCHEMES.load("unquantized")(build.scheme.storage, config, _unknown)
    if isinstance(build.scheme, AdaptedScheme):
        scheme = AdaptedScheme(scheme, build.scheme.sites)
    kind = MEDIA_ENCODERS.load(config.checkpoint.media_architecture)
    parallel = build.parallel
    if config.media.mm_encoder_tp_mode == "data":
        parallel = replace(parallel, tp=ONE)
    place = replace(build.at("encoder"), scheme=scheme, parallel=parallel)
    encoder = kind(config.checkpoint.config, place)
    model.add_module("encoder", encoder)
    model.WEIGHTS = media_weights(model.WEIGHTS, encoder)


@contextmanager
def _blaming_the_config(config: EngineConfig) -> Iterator[None]:
    """What fails while a model is made of its config alone, fails by what stands there."""
    try:
        yield
    except OctavoError:
        raise
    except _FAULTS as error:
        text = f"{type(error).__name__}: {error}"
        raise BadCheckpoint(f"{config.checkpoint.path}: the config cannot be used: {text:.200}") from error
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        raise BadCheckpoint(f"{config.checkpoint.path}: no memory for a model of such sizes") from error


def _host_layers(
    config: EngineConfig, family: type[Family], arch: Arch, platform: Platform, parallel: ParallelContext
) -> frozenset[int]:
    """Return the layers whose matrices stay in host memory. Raises ConfigError, Unsupported."""
    if not host_weights.wants_host_weights(config) and not config.parallel.cpu_offload_experts:
        return frozenset()
    is_packed = config.model.load_format == "gguf" or stored_quantization(config)
    if is_packed or config.model.quantization not in ("", "unquantized"):
        raise Unsupported(
            "Packed weights stay on the GPU: use safetensors as they are, or leave out cpu_offload_*."
        )
    shapes = _shapes(config, family, arch, platform, parallel)
    if not config.parallel.cpu_offload_experts:
        return host_weights.choose_layers(config.parallel, host_weights.layer_bytes(shapes))
    host_weights.check_room("The experts", host_expert_bytes(shapes), "cpu_offload_experts")
    return frozenset()


def _shapes(
    config: EngineConfig, family: type[Family], arch: Arch, platform: Platform, parallel: ParallelContext
) -> Family:
    meta = MetaPlatform(platform.compute_dtype(dtype_of(config.model.dtype)))
    specs = _kv_specs(config, arch, parallel)
    return family(arch, make_context(config, specs, meta, parallel, sources=family.WEIGHTS.sources))


def _cut(
    config: EngineConfig, family: type[Family], arch: Arch, platform: Platform, parallel: ParallelContext
) -> list[range]:
    """Return the layers of each stage, cut by the sizes of their weights. Raises ConfigError."""
    whole = named_parameters(_shapes(config, family, arch, platform, replace(parallel, pp=ONE)))
    costs, head = [0] * len(arch.layers), "embed_tokens." if arch.tied_head else "lm_head."
    for name, parameter in whole.items():
        if (layer := layer_of(name)) is not None:
            costs[layer] += prod(parameter.layout.shape)
    head_cost = sum(prod(p.layout.shape) for name, p in whole.items() if name.startswith(head))
    return cut_layers(costs, head_cost, parallel.pp.size)


def kv_specs(
    config: EngineConfig, parallel: ParallelContext, family: type[Family] | None
) -> list[KVCacheSpec]:
    """Return what the layers of a model keep that another stage has. Raises as `load_own`."""
    with _blaming_the_config(config):
        return _kv_specs(config, _read_arch(config, family or _family(config)), parallel)


def _read_arch(config: EngineConfig, family: type[Family]) -> Arch:
    wanted = speculation(config.scheduler.speculative_config)
    bounds = {"max_model_len": config.model.max_model_len, "num_drafts": wanted.most if wanted else 0}
    arch = family.arch_from_hf(config.checkpoint.text_config | bounds)
    return replace(arch, embeds_last=True) if wanted and wanted.method in HIDDEN_STATES else arch


def _kv_specs(config: EngineConfig, arch: Arch, parallel: ParallelContext) -> list[KVCacheSpec]:
    """Return what all layers keep on one rank, by layer of the cache. Raises ConfigError, Unsupported."""
    dtype = dtype_of(config.cache.kv_cache_dtype)
    return [
        part.kv_spec(parallel.tp_size, dtype, layer.sliding_window)
        for body, layer in ((layer.attention, layer) for layer in arch.layers)
        for part in ((body.heads, body.recurrent) if isinstance(body, SideBySideArch) else (body,))
        if part.is_causal
    ]


def make_context(
    config: EngineConfig,
    specs: list[KVCacheSpec],
    platform: Platform,
    parallel: ParallelContext,
    host_layers: frozenset[int] = frozenset(),
    sources: Sources = _unknown,
) -> BuildContext:
    """Return what layers are built with; `specs` are those of the cache's layers. Raises Unsupported.

    host_layers: those whose matrices stay in host memory; sources: names in the checkpoint
    """
    weight_dtype = dtype_of(config.model.dtype)
    compute_dtype = platform.compute_dtype(weight_dtype)
    kernels, linear, attention = platform.kernels, platform.kernels.linear, platform.kernels.attention
    chosen = _input_precision(config)
    is_planned = platform.device.type == "meta"
    heads = config.checkpoint.text_config.get("num_attention_heads")
    attend = choose_backend(
        [spec for spec in specs if not isinstance(spec, StateKV)],
        platform,
        "auto" if is_planned else config.model.attention_backend,
        chosen or attention.input_precision,
        heads // parallel.tp_size if isinstance(heads, int) else 0,
        (parallel.dcp, config.parallel.cp_kv_cache_interleave_size),
    )
    storage = Storage(
        device=platform.device,
        weight_dtype=weight_dtype,
        compute_dtype=compute_dtype,
        kernels=platform.kernels.linear,
        experts=platform.kernels.experts,
        input_precision=chosen or linear.input_precision,
        dense_precision=chosen or linear.dense_precision,
        splits_floats=config.pooling is not None,
        follows_recipes=chosen is None or chosen == "int8",
        host_layers=host_layers,
        host_experts=range(sys.maxsize if (count := config.parallel.cpu_offload_experts) < 0 else count),
    )
    scheme = select_scheme(config)(storage, config, sources)
    if config.lora.enable_lora:
        dtype = weight_dtype if config.lora.lora_dtype == "auto" else dtype_of(config.lora.lora_dtype)
        if platform.device.type == "cpu" and dtype == torch.float16:
            dtype = torch.float32
        most_tokens = max(config.scheduler.max_num_batched_tokens, MAX_CAPTURED_TOKENS) + _PADDING
        slots = AdapterSlots(config.scheduler.max_loras, most_tokens, platform.device, kernels.adapters.group)
        sites = Sites(slots, kernels, dtype, config.lora.max_lora_rank)
        sites.can_change_experts = parallel.exchange is None and parallel.redundant_experts is None
        scheme = AdaptedScheme(scheme, sites)
    return BuildContext(
        device=platform.device,
        compute_dtype=compute_dtype,
        kv_dtype=dtype_of(config.cache.kv_cache_dtype),
        kernels=platform.kernels,
        attention=attend,
        parallel=parallel,
        scheme=scheme,
        step_dtype=weight_dtype if (attend.input_precision, weight_dtype) == _BFLOAT16 else None,
        splits_floats=storage.splits_floats or weight_dtype != torch.float32,
    )


def _input_precision(config: EngineConfig) -> InputPrecision | None:
    """Return the user's choice; None for what suits the kernels."""
    chosen: dict[str, InputPrecision] = {kind: kind for kind in get_args(InputPrecision)}
    return chosen.get(config.model.activations)


def dtype_of(name: str) -> torch.dtype:
    """Return the type that an option names."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8)
    return {str(dtype).removeprefix("torch."): dtype for dtype in dtypes}[name]


def _fill(model: Family, pieces: Iterator[Piece], config: EngineConfig, parallel: ParallelContext) -> None:
    """Hand every piece to its parameter; at the end none may be left without."""
    parameters = named_parameters(model)
    quiet = True if parallel.tp_rank else None  # None: unless stderr is a terminal
    total = sum(len(parameter.missing) for parameter in parameters.values())
    for piece in tqdm(pieces, "Loading weights", total, unit=" tensors", delay=1.0, disable=quiet):
        parameter = parameters.get(piece.parameter)
        if parameter is None:
            raise BadCheckpoint(
                f"{piece.origin} has no place in this {config.checkpoint.architecture}{_stored_by(config)}"
            )
        try:
            parameter.load(piece.tensor, piece.shard)
        except BadCheckpoint as error:
            raise BadCheckpoint(f"{piece.origin}: {error}") from error
    missing = [f"{n}:{s}".rstrip(":") for n, p in parameters.items() if p.is_required for s in p.missing]
    if missing:
        raise BadCheckpoint(f"{config.checkpoint.path} lacks {len(missing)} weights: {shorten(missing)}")


def _stored_by(config: EngineConfig) -> str:
    method = stored_quantization(config).get("quant_method")
    return f", whose config says that it is stored by {method!r}" if method else ""


def shorten(names: list[str]) -> str:
    """Return the first few of `names`, for a message."""
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
