"""`eplb_config`: how experts are moved between ranks by their load (vLLM's names).

{"num_redundant_experts": 8, "step_interval": 3000, "window_size": 1000, "log_balancedness": true}
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from octavo.base.errors import ConfigError, Unsupported
from octavo.base.log import get_logger
from octavo.config.checkpoint import Checkpoint
from octavo.config.kv_transfer import known_values
from octavo.config.parallel import ParallelConfig

logger = get_logger(__name__)

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_WITHOUT_EFFECT = ("use_async", "policy", "communicator", "log_balancedness_interval")
"""Layers are moved one per step; there is one policy."""

_NOT_BESIDE = """data_parallel_hybrid_lb data_parallel_start_rank enable_elastic_ep enable_lora
    speculative_config cpu_offload_gb offload_group_size cpu_offload_experts"""


class ExpertLoad(NamedTuple):
    """The option's values.

    window_size:   steps before a rearrangement whose tokens count
    step_interval: steps between two of them
    num_redundant_experts: copies of experts in each layer, on all ranks together
    """

    window_size: int = 1000
    step_interval: int = 3000
    num_redundant_experts: int = 0
    log_balancedness: bool = False


def expert_load(parallel: ParallelConfig) -> ExpertLoad | None:
    """Return what the options ask for; None where experts stay. Raises ConfigError."""
    given: Mapping[str, Any] = parallel.eplb_config
    values = known_values(given, "eplb_config", (*ExpertLoad._fields, *_WITHOUT_EFFECT))
    pairs = zip(ExpertLoad._fields, values, strict=False)
    found = ExpertLoad(**{name: value for name, value in pairs if value is not None})
    for name, least in (("window_size", 1), ("step_interval", 1), ("num_redundant_experts", 0)):
        number = getattr(found, name)
        if type(number) is not int or number < least:
            raise ConfigError(f"eplb_config: {name} must be a whole number from {least} on, got {number!r}.")
    if not parallel.enable_eplb:
        if found.num_redundant_experts:
            raise ConfigError("eplb_config: num_redundant_experts needs enable_eplb.")
        return None
    return found


def check_expert_load(parallel: ParallelConfig, checkpoint: Checkpoint) -> None:
    """Refuse what cannot be balanced. Raises ConfigError."""
    found = expert_load(parallel)
    if found is None:
        return
    size = parallel.tensor_parallel_size * (parallel.data_parallel_size if parallel.shares_experts else 1)
    if not parallel.enable_expert_parallel or size == 1:
        raise ConfigError(
            "enable_eplb requires enable_expert_parallel to be set, and tensor_parallel_size or "
            "data_parallel_size of at least 2."
        )
    if checkpoint.is_snapshot:
        raise ConfigError("enable_eplb: a snapshot keeps experts where they are; name the model itself.")
    if parallel.cpu_offload_gb or parallel.offload_group_size or parallel.cpu_offload_experts:
        raise ConfigError("enable_eplb moves experts between GPUs: leave cpu_offload_* and offload_* out.")
    count = _num_experts(checkpoint)
    if not count:
        raise ConfigError("enable_eplb: the model has no experts.")
    if found.num_redundant_experts % size or found.num_redundant_experts > count * (size - 1):
        raise ConfigError(
            f"num_redundant_experts ({found.num_redundant_experts}) must be a multiple of "
            f"tensor_parallel_size x data_parallel_size ({size}), and at most {count * (size - 1)}: no rank "
            "has an expert twice."
        )


def share_experts(parallel: ParallelConfig, checkpoint: Checkpoint, args: Any) -> ParallelConfig:
    """Return it for replicas that share experts, if they are to and the model has some.

    Raises ConfigError, Unsupported. args: all options
    """
    if not parallel.shares_experts:
        return parallel
    count, size = _num_experts(checkpoint), parallel.data_parallel_size * parallel.tensor_parallel_size
    if not count:
        logger.warning("enable_expert_parallel has no effect: the model has no experts.")
        return replace(parallel, enable_expert_parallel=False)
    if count % size:
        raise ConfigError(
            f"enable_expert_parallel: data_parallel_size x tensor_parallel_size ({size}) does not divide the "
            f"model's {count} experts; use sizes that do."
        )
    given = [name for name in _NOT_BESIDE.split() if getattr(args, name)]
    least = {"data_parallel_rank": 0, "pipeline_parallel_size": 2, "nnodes": 2}
    given += [name for name, number in least.items() if getattr(args, name) >= number]
    if parallel.distributed_executor_backend not in ("inproc", "mp"):
        given.append("distributed_executor_backend")
    if given:
        raise Unsupported(
            f"enable_expert_parallel with data_parallel_size={parallel.data_parallel_size} shares experts "
            f"between the replicas of one server; this does not work with {', '.join(given)}. Leave it out, "
            "or use tensor_parallel_size instead of replicas."
        )
    return replace(parallel, distributed_executor_backend="mp")


def _num_experts(checkpoint: Checkpoint) -> int:
    config = checkpoint.text_config
    return next((int(config[name]) for name in _EXPERT_COUNTS if config.get(name)), 0)
