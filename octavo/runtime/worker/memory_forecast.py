"""`forecast` tells what a worker will find when it has loaded its model, without loading it.

Asked by name, for `octavo plan`. The model is built and profiled by the code that the worker uses, on a
device where tensors have no bytes; of the checkpoint only config and headers are read.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from msgspec.structs import replace

from octavo.base.devices import torch_name
from octavo.base.errors import Unsupported
from octavo.base.gguf import GGUFFile, TensorInfo
from octavo.config.engine import EngineConfig
from octavo.config.parallel import ParallelConfig
from octavo.messages.kv import Forecast, ModelReady
from octavo.runtime.distributed.context import ParallelContext
from octavo.runtime.distributed.group import ONE, Group
from octavo.runtime.layers.build import named_parameters, packed_matrices
from octavo.runtime.loader.expert_cache import buffer_bytes
from octavo.runtime.loader.gguf import targets
from octavo.runtime.loader.host_weights import layer_bytes
from octavo.runtime.loader.loader import load_own
from octavo.runtime.loader.piece import Piece
from octavo.runtime.models.arch import Arch
from octavo.runtime.models.interface import ENCODER_DECODERS, ENCODERS, MODELS, Family, Model
from octavo.runtime.platforms import cpu
from octavo.runtime.platforms.meta import MetaPlatform
from octavo.runtime.quantization.blocks import Blocks
from octavo.runtime.quantization.forms import StoredParameter
from octavo.runtime.quantization.parameter import Stored
from octavo.runtime.speculative.load import load_drafter
from octavo.runtime.worker.profile_run import cache_groups, measure

GPU_CONTEXT_BYTES = 600 << 20
"""What driver, libraries and kernels take of a GPU before anything is loaded, about."""


def forecast(config: EngineConfig, device_bytes: int = 0) -> Forecast:
    """Return what the stage with the least room will need and find, with the largest uses of all.

    device_bytes: of each device; 0 = what is free here now

    Raises ConfigError (BadCheckpoint) as loading would, Unsupported for models that run by foreign code.
    """
    is_own = any(config.architecture in known for known in (MODELS, ENCODERS, ENCODER_DECODERS))
    if config.model.model_impl == "transformers" or not is_own:
        raise Unsupported(
            f"{config.checkpoint.architecture} runs by transformers' code: what it takes is known once it is "
            "loaded. Start it; what does not fit is refused with figures."
        )
    stages = [_of_stage(config, device_bytes, i) for i in range(config.parallel.pipeline_parallel_size)]
    fullest = min(stages, key=lambda stage: stage.ready.available_bytes)
    return replace(fullest, ready=ModelReady.of_all([stage.ready for stage in stages]))


def _of_stage(config: EngineConfig, device_bytes: int, number: int) -> Forecast:
    """Return what the first rank of one stage will need and find."""
    on_cpu = config.parallel.device == "cpu"
    platform = MetaPlatform(torch.float32 if on_cpu else getattr(torch, config.model.dtype))
    sizes = config.parallel
    tp, pp = Group(0, sizes.tensor_parallel_size), Group(number, sizes.pipeline_parallel_size)
    ep = Group(0, sizes.tensor_parallel_size * (sizes.data_parallel_size if sizes.shares_experts else 1))
    dcp = Group(0, sizes.decode_context_parallel_size)
    parallel = _OneOfMany(tp, pp, ep=ep if sizes.enable_expert_parallel else ONE, dcp=dcp)
    model: Model = load_own(config, platform, parallel, _shapes)
    drafter = load_drafter(config, model, platform, parallel, _shapes)
    groups = cache_groups(model, drafter, config.cache.block_size)
    found = measure(model, config, platform)
    step, recorded, tables, adapters, _ = found
    workspace = tables if on_cpu else sum(found)
    weights, on_host = model.weight_bytes, model.host_weight_bytes
    weights += drafter.weight_bytes if drafter else 0
    held = weights - on_host + _buffer_bytes(model, config.parallel)
    available = _available_bytes(config, held, device_bytes) - workspace
    ready = ModelReady(groups, available, weights, workspace, on_host)
    matrices = {kind.partition(",")[0]: count for kind, count in packed_matrices(model).items()}
    return Forecast(ready, step, 0 if on_cpu else recorded, tables, adapters, matrices)


def _buffer_bytes(model: Model, parallel: ParallelConfig) -> int:
    """Return the bytes of the device's buffers for layers, or experts, in host memory."""
    if not model.host_weight_bytes:
        return 0
    assert isinstance(model, Family)
    if parallel.cpu_offload_experts:
        return buffer_bytes(model, int(parallel.expert_cache_gb * 2**30))
    num_ahead = parallel.offload_prefetch_step
    return min((num_ahead + 1) * max(layer_bytes(model)), model.host_weight_bytes)


class _OneOfMany(ParallelContext):
    """Stands for a rank whose fellows are on the meta device, too."""

    __slots__ = ()

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x] * self.tp_size, dim=-1)


def _available_bytes(config: EngineConfig, weight_bytes: int, device_bytes: int) -> int:
    """Return what the platforms' `available_memory_bytes` will say beside the weights."""
    share, device = config.cache.gpu_memory_utilization, config.parallel.device
    if device == "cpu":
        return int(share * ((device_bytes or cpu.free_bytes()) - weight_bytes))
    free, total = device_bytes - GPU_CONTEXT_BYTES, device_bytes
    if not device_bytes:
        if not torch_name(device).startswith("cuda") or not torch.cuda.is_available():
            raise Unsupported(f"There is no {device} here to look at: say what it has by --device-memory.")
        free, total = torch.cuda.mem_get_info(torch.device(torch_name(device)))
    return int(total * share) - (total - free) - weight_bytes


def _shapes(config: EngineConfig, model: Family, arch: Arch) -> Iterator[Piece]:
    """Return a `Reader` of shapes: of a GGUF file's header, else of the model's own parameters."""
    if config.model.load_format == "gguf":
        # Transforms, which move whole rows, change no size: they are left out.
        file = GGUFFile(Path(config.checkpoint.path))
        for name, origin, target in targets(config, file, model):
            yield Piece(origin, target.module, target.shard, _shape(file.tensors[name]))
        return
    for name, parameter in named_parameters(model).items():
        if isinstance(parameter, StoredParameter):
            yield from (Piece(name, name, shard, tensor) for shard, tensor in parameter.outlines())
            continue
        for shard in parameter.layout.shards:
            if shard.name not in parameter.missing:
                continue
            tensor = torch.empty(parameter.layout.full_shape((shard,)), device="meta")
            yield Piece(name, name, shard.name, tensor)


def _shape(info: TensorInfo) -> Stored:
    if len(info.shape) == 1:
        return torch.empty(info.shape, device="meta")
    rows = info.shape[0]
    return Blocks(torch.empty((rows, info.num_bytes // rows), dtype=torch.uint8, device="meta"), info.type)
