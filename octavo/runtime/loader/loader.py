"""`load_model`: build the model that a config describes and fill every parameter, or say which one is at
fault.
"""

from collections.abc import Callable, Iterator

import torch
from tqdm import tqdm

from octavo.base.errors import BadCheckpoint, ConfigError
from octavo.base.registry import Registry
from octavo.config.engine import EngineConfig
from octavo.runtime.attention.registry import choose_backend
from octavo.runtime.distributed.context import ParallelContext
from octavo.runtime.layers.build import BuildContext, finish_loading, named_parameters
from octavo.runtime.loader.piece import Piece
from octavo.runtime.models.arch import Arch
from octavo.runtime.models.interface import MODELS, Model
from octavo.runtime.platforms.platform import Platform
from octavo.runtime.quantization.method import Storage, select_scheme

Reader = Callable[[EngineConfig, Model, Arch], Iterator[Piece]]

READERS: Registry[Reader] = Registry(
    "load format",
    {
        "safetensors": "octavo.runtime.loader.safetensors:read",
        "gguf": "octavo.runtime.loader.gguf:read",
        "dummy": "octavo.runtime.loader.dummy:read",
    },
)

_SHOWN_MISSING = 5


def load_model(config: EngineConfig, platform: Platform, parallel: ParallelContext) -> Model:
    """Build and fill this rank's part of the model. Raises ConfigError (BadCheckpoint), Unsupported."""
    family = MODELS.load(config.checkpoint.architecture)
    arch = family.arch_from_hf(dict(config.checkpoint.text_config))
    model = family.build(arch, _context(config, arch, platform, parallel))
    reader = READERS.load(config.model.load_format)
    _fill(model, reader(config, model, arch), config, parallel)
    finish_loading(model)
    return model


def _context(config: EngineConfig, arch: Arch, platform: Platform, parallel: ParallelContext) -> BuildContext:
    if arch.num_heads % parallel.tp_size:
        raise ConfigError(
            f"tensor_parallel_size={parallel.tp_size} does not divide the model's {arch.num_heads} "
            "attention heads; use a size that does."
        )
    weight_dtype = _dtype(config.model.dtype)
    kv_dtype = _dtype(config.cache.kv_cache_dtype)
    compute_dtype = platform.compute_dtype(weight_dtype)
    storage = Storage(platform.device, weight_dtype, compute_dtype, platform.kernels)
    return BuildContext(
        device=platform.device,
        compute_dtype=compute_dtype,
        kv_dtype=kv_dtype,
        kernels=platform.kernels,
        attention=choose_backend(arch.kv_specs(parallel.tp_size, kv_dtype.itemsize), platform),
        parallel=parallel,
        scheme=select_scheme(config, storage),
    )


def _dtype(name: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _fill(model: Model, pieces: Iterator[Piece], config: EngineConfig, parallel: ParallelContext) -> None:
    """Hand every piece to its parameter; at the end none may be left without."""
    parameters = named_parameters(model)
    for piece in tqdm(pieces, "Loading weights", unit=" tensors", delay=1.0, disable=parallel.tp_rank > 0):
        parameter = parameters.get(piece.parameter)
        if parameter is None:
            raise BadCheckpoint(f"{piece.origin} has no place in this {config.checkpoint.architecture}")
        try:
            parameter.load(piece.tensor, piece.shard)
        except BadCheckpoint as error:
            raise BadCheckpoint(f"{piece.origin}: {error}") from error
    missing = [f"{n}:{s}".rstrip(":") for n, parameter in parameters.items() for s in parameter.missing]
    if missing:
        shown = ", ".join(missing[:_SHOWN_MISSING]) + (", …" if len(missing) > _SHOWN_MISSING else "")
        raise BadCheckpoint(f"{config.checkpoint.path} lacks {len(missing)} weights: {shown}")
