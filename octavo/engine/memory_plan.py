"""`plan_memory`: where the memory of a deployment will go, told before anything is loaded.

Asked by name, for `octavo plan`. The runtime forecasts what its workers will report; what the core would make
of that report is decided by the function that the core itself calls.
"""

import msgspec

from octavo.base.errors import ConfigError
from octavo.base.registry import load_object
from octavo.config.engine import EngineConfig
from octavo.engine.startup import num_sequences, plan_cache
from octavo.messages.kv import CachePlan, Forecast

_FORECAST = "octavo.runtime.worker.memory_forecast:forecast"


class MemoryPlan(msgspec.Struct, kw_only=True):
    """Bytes are of one rank; lengths in tokens."""

    model: str
    architecture: str
    device: str
    num_ranks: int
    dtype: str
    kv_cache_dtype: str
    weight_bytes: int
    host_weight_bytes: int
    """Of these, what is kept in host memory."""
    step_bytes: int
    """Activations and logits of the largest step. On a CPU they are the system's to lend."""
    recorded_bytes: int
    """Of recorded steps, which keep memory of their own."""
    table_bytes: int
    """Of the batch's tables."""
    adapter_bytes: int
    """Of adapters on a GPU, all of the largest rank."""
    matrices: dict[str, int] = {}
    """How many packed matrices there are, by type and shape."""
    kv_available_bytes: int
    """What is left for the KV cache."""
    kv_bytes_per_token: int
    """Until windows pass."""
    kv_bytes_per_block: int
    state_bytes: int
    """Of the recurrent layers of one request, whatever its length."""
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    num_blocks: int = 0
    kv_bytes: int = 0
    num_tokens: int = 0
    """That fit into the cache, in requests of max_model_len."""
    max_model_len: int = 0
    num_sequences: float = 0.0
    """Of max_model_len, at once."""
    host_bytes: int = 0
    """Swap space in host memory."""
    problem: str = ""
    """Why the engine could not start, and what to change."""


def plan_memory(config: EngineConfig, device_bytes: int = 0) -> MemoryPlan:
    """Return the plan; `problem` says so if it cannot work. Raises ConfigError as loading the model would.

    device_bytes: of each device; 0 = what this machine has free now
    """
    forecast: Forecast = load_object(_FORECAST)(config, device_bytes)
    ready = forecast.ready
    num_ranks = config.parallel.decode_context_parallel_size
    one_block = CachePlan(ready.groups, 1, config.cache.block_size, context_ranks=num_ranks)
    plan = MemoryPlan(
        model=config.checkpoint.path,
        architecture=config.checkpoint.architecture,
        device=config.parallel.device,
        num_ranks=config.parallel.world_size,
        dtype=config.model.dtype,
        kv_cache_dtype=config.cache.kv_cache_dtype,
        weight_bytes=ready.weight_bytes,
        host_weight_bytes=ready.host_weight_bytes,
        step_bytes=forecast.step_bytes,
        recorded_bytes=forecast.recorded_bytes,
        table_bytes=forecast.table_bytes,
        adapter_bytes=forecast.adapter_bytes,
        matrices=forecast.matrices,
        kv_available_bytes=max(0, ready.available_bytes),
        kv_bytes_per_token=one_block.bytes_per_token,
        kv_bytes_per_block=one_block.bytes_per_block,
        state_bytes=one_block.state_bytes,
        block_size=one_block.block_size * num_ranks,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=config.model.max_model_len,
    )
    try:
        cache = plan_cache(config, ready)
    except ConfigError as error:
        plan.problem = str(error)
        return plan
    plan.num_blocks = cache.num_blocks
    plan.kv_bytes = cache.num_blocks * cache.bytes_per_block
    plan.max_model_len = cache.max_model_len
    plan.num_sequences = num_sequences(config, cache)
    plan.num_tokens = int(plan.num_sequences * cache.max_model_len)
    plan.host_bytes = cache.num_host_blocks * cache.bytes_per_block
    return plan
