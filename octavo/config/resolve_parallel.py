"""Decides how ranks are spread over devices and nodes, and refuses what cannot be. Called by `resolve`."""

import dataclasses
import os

from octavo.base import env
from octavo.base.cores import usable_cores
from octavo.base.devices import DEVICES
from octavo.base.errors import ConfigError, Unsupported
from octavo.base.log import get_logger
from octavo.config.checkpoint import Checkpoint
from octavo.config.parallel import ParallelConfig

logger = get_logger(__name__)

_NVIDIA_DRIVER, _WSL_GPU, _AMD_DRIVER = "/dev/nvidiactl", "/dev/dxg", "/dev/kfd"
_LONGEST_SILENCE_S = 3600


def resolve_parallel(parallel: ParallelConfig) -> ParallelConfig:
    """Return it with back end, device and threads decided. Raises ConfigError, Unsupported."""
    if parallel.nnodes != 1 or parallel.node_rank:
        _check_nodes(parallel)
    backend = parallel.distributed_executor_backend
    if backend in ("auto", "uni"):
        backend = "inproc" if parallel.world_size == 1 else "mp"
    if backend == "inproc" and parallel.world_size > 1:
        raise ConfigError(
            "distributed_executor_backend='inproc' runs one rank; use 'mp' for tensor_parallel_size or "
            "pipeline_parallel_size > 1."
        )
    if backend == "external_launcher" and parallel.tensor_parallel_size != env.world_size():
        raise ConfigError(
            f"distributed_executor_backend='external_launcher' needs as many processes as ranks: torchrun "
            f"started {env.world_size()}, tensor_parallel_size is {parallel.tensor_parallel_size}."
        )
    device = parallel.device
    if device == "auto":  # under Ray the driver's GPUs may be hidden: the workers have theirs
        is_hidden = backend != "ray" and os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        device = "cpu" if is_hidden else find_device()
    if backend == "external_launcher" and max(parallel.num_replicas, parallel.pipeline_parallel_size) > 1:
        text = (
            "'external_launcher' runs one replica: data_parallel_size and pipeline_parallel_size must be 1."
        )
        raise Unsupported(f"distributed_executor_backend={text}")
    _check_replicas(parallel)
    num_processes = (len(parallel.node_ranks) or parallel.world_size) * parallel.num_replicas
    threads = parallel.cpu_threads or max(1, usable_cores() // num_processes)
    asked = parallel.cpu_offload_gb, parallel.offload_group_size, parallel.cpu_offload_experts
    if device == "cpu" and any(asked):
        logger.warning("On a CPU the weights are in host memory: cpu_offload_* and offload_* have no effect.")
        parallel = dataclasses.replace(
            parallel, cpu_offload_gb=0.0, offload_group_size=0, cpu_offload_experts=0
        )
    return dataclasses.replace(
        parallel, device=device, distributed_executor_backend=backend, cpu_threads=threads
    )


def _check_replicas(parallel: ParallelConfig) -> None:
    size, local = parallel.data_parallel_size, parallel.data_parallel_size_local
    start = parallel.data_parallel_start_rank
    if not parallel.data_parallel_hybrid_lb:
        if local not in (0, size) or start:
            raise ConfigError(
                f"data_parallel_size_local={local} and data_parallel_start_rank={start} of {size} replicas "
                "need data_parallel_hybrid_lb: each server balances between its own."
            )
    elif not 0 < local <= size - start or parallel.data_parallel_rank >= 0:
        raise ConfigError(
            f"data_parallel_hybrid_lb: data_parallel_size_local ({local}) must be at least 1, "
            f"data_parallel_start_rank ({start}) + that at most data_parallel_size ({size}), and "
            "data_parallel_rank is left out."
        )


def _check_nodes(parallel: ParallelConfig) -> None:
    nnodes, size = parallel.nnodes, parallel.world_size
    if nnodes < 1:
        raise ConfigError(f"nnodes must be at least 1, got {nnodes}.")
    if parallel.node_rank >= nnodes:
        raise ConfigError(f"node_rank ({parallel.node_rank}) must be less than nnodes ({nnodes}).")
    if size % nnodes:
        raise ConfigError(
            f"nnodes={nnodes} does not divide the {size} ranks of tensor_parallel_size x "
            "pipeline_parallel_size: every node has as many."
        )
    if parallel.distributed_executor_backend not in ("auto", "mp"):
        raise ConfigError(
            f"nnodes={nnodes} needs distributed_executor_backend='mp', got "
            f"{parallel.distributed_executor_backend!r}, which has its own way to reach other machines."
        )
    if parallel.data_parallel_size > 1 and parallel.data_parallel_rank < 0:
        raise Unsupported(
            f"nnodes={nnodes} and data_parallel_size={parallel.data_parallel_size}: start each replica "
            "alone, with a data_parallel_rank and a master_port of its own."
        )
    if not 0 < parallel.node_timeout < _LONGEST_SILENCE_S:
        raise ConfigError(
            f"node_timeout must be above 0 and at most {_LONGEST_SILENCE_S}, got {parallel.node_timeout}."
        )
    if len(env.node_key()) < env.LEAST_NODE_KEY:
        raise ConfigError(
            f"nnodes={nnodes}: set the variable OCTAVO_NODE_KEY to the same secret of at least "
            f"{env.LEAST_NODE_KEY} characters on every node (openssl rand -hex 32)."
        )


def check_sizes(parallel: ParallelConfig, checkpoint: Checkpoint) -> None:
    """Refuse sizes that the model has not. Raises ConfigError.

    Here, where the config has the usual names for them: a rank would say the same after it has started.
    """
    tp_size, num_stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    heads = checkpoint.text_config.get("num_attention_heads")
    if isinstance(heads, int) and heads > 0 and heads % tp_size:
        raise ConfigError(
            f"Total number of attention heads ({heads}) must be divisible by tensor parallel size "
            f"({tp_size}): choose another tensor_parallel_size."
        )
    if tp_size % (dcp_size := parallel.decode_context_parallel_size):
        raise ConfigError(f"tp_size={tp_size} must be divisible by dcp_size={dcp_size}.")
    kv_heads = checkpoint.text_config.get("num_key_value_heads")
    if isinstance(kv_heads, int) and kv_heads > 0 and not checkpoint.text_config.get("kv_lora_rank"):
        check_context(kv_heads, tp_size, dcp_size)
    layers = checkpoint.text_config.get("num_hidden_layers")
    if isinstance(layers, int) and 0 < layers < num_stages:
        raise ConfigError(f"pipeline_parallel_size={num_stages} is more than the model's {layers} layers.")


def check_context(num_kv_heads: int, tp_size: int, dcp_size: int) -> None:
    """Raise ConfigError unless so many neighbours of tp_size ranks keep the same key head. As in vLLM."""
    if dcp_size == 1:
        return
    if tp_size <= num_kv_heads:
        raise ConfigError(
            f"tensor parallel size {tp_size} must be greater than total num kv heads {num_kv_heads} when "
            "enable decode context parallel for GQA/MQA"
        )
    if (most := tp_size // num_kv_heads) % dcp_size:
        raise ConfigError(
            f"decode context parallel size must less than or equal to (tensor parallel size {tp_size} // "
            f"total num kv heads {num_kv_heads}) = {most}, and divide it, but got {dcp_size}"
        )


def check_device(asked: str, *, must_be_here: bool) -> None:
    """Raise ConfigError for an unknown device, and where there is no GPU.

    Where device files exist, torch has the last word.
    """
    if asked != "auto" and asked not in DEVICES:
        raise ConfigError(
            f"device={asked!r} is not one of auto, {', '.join(DEVICES.names())}. Other packages bring "
            "devices by entry points of the group octavo.platforms."
        )
    if must_be_here and asked == "cuda" and find_device() != "cuda" and not _exists(_WSL_GPU):
        raise ConfigError(
            f"device='cuda': there is no NVIDIA GPU here (no {_NVIDIA_DRIVER}). Use device='cpu' or 'auto'; "
            "in a container, hand it the GPUs (docker run --gpus all)."
        )
    if must_be_here and asked == "rocm" and not _exists(_AMD_DRIVER):
        raise ConfigError(
            f"device='rocm': there is no AMD GPU here (no {_AMD_DRIVER}). Use device='cpu' or 'auto'; in a "
            "container, hand it the GPUs (docker run --device=/dev/kfd --device=/dev/dri)."
        )


def find_device() -> str:
    """Return cuda when the driver's device files are there; torch itself is not imported for the question.

    Many a CPU has an AMD GPU built in: rocm takes a torch that is made for it.
    """
    if _exists(_NVIDIA_DRIVER):
        return "cuda"
    if not _exists(_AMD_DRIVER):
        return "cpu"
    from importlib.metadata import version  # takes as long to import as the rest of octavo's beginning

    return "rocm" if "rocm" in version("torch") else "cpu"


def _exists(path: str) -> bool:
    return os.path.exists(path)  # noqa: PTH110  # a device node
