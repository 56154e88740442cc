"""`plan_cache`: how many blocks the KV cache gets, and how long a request may be.

Called once by the core, after the model is loaded.
"""

import logging
import os
import weakref
from pathlib import Path
from secrets import token_hex

import msgspec

from octavo.base.errors import ConfigError
from octavo.base.log import get_logger
from octavo.base.transport import Mailbox
from octavo.config.engine import EngineConfig
from octavo.config.kv_transfer import kv_store
from octavo.engine.fingerprint import fingerprint
from octavo.engine.kvcache.groups import CacheGroup
from octavo.engine.kvcache.offload import swapping_pays
from octavo.messages.kv import CachePlan, ModelReady, StorePlan

logger = get_logger(__name__)

_SHORTEST = 2
"""A max_model_len of any use: one token in, one out."""
CPU_CACHE_BYTES = 4 << 30
"""Most that is taken of a CPU's memory without being told to: other programs live there too."""


def plan_cache(config: EngineConfig, ready: ModelReady) -> CachePlan:
    """Decide the number of blocks, the null block included, and the longest request; log them.

    Raises ConfigError when not even one request of max_model_len fits (of any length, where it may be
    lowered): what it needs, what there is, what to change. It is lowered where the user asked for that, or
    chose the number of blocks.
    """
    longest, num_result_tokens = config.model.max_model_len, int(config.pooling is not None)
    one_block = CachePlan(
        groups=ready.groups,
        num_blocks=1,
        block_size=config.cache.block_size,
        max_model_len=longest,
        num_result_tokens=num_result_tokens,
        # Where nobody looks for states, none but the last is kept.
        state_interval=config.cache.mamba_block_size if config.cache.enable_prefix_caching else longest + 1,
        context_ranks=config.parallel.decode_context_parallel_size,
    )
    if not ready.groups:
        logger.info("No layer keeps keys and values: there is no KV cache")
        return one_block
    needed = _blocks_for(config, one_block, one_block.max_total_tokens)
    num_blocks = _num_blocks(config, ready, one_block.bytes_per_block, needed)
    num_host_blocks = _num_host_blocks(config, ready, one_block)
    plan = msgspec.structs.replace(one_block, num_blocks=num_blocks, num_host_blocks=num_host_blocks)
    if needed > num_blocks - 1:
        plan.max_model_len = longest = _longest_that_fits(config, plan)
        chosen = bool(config.cache.num_gpu_blocks_override)
        if not (config.fit_max_model_len or chosen) or longest < _SHORTEST:
            raise ConfigError(_too_small(config, plan, needed, ready))
        level = logging.WARNING if chosen else logging.INFO
        logger.log(level, "max_model_len: %d, as much as the KV cache has room for", longest)
    concurrency = num_sequences(config, plan)
    logger.info(
        "KV cache: %d blocks, %d tokens, %s, max concurrency %.1f at %d tokens per request",
        num_blocks,
        int(concurrency * longest),
        _gib(plan, num_blocks),
        concurrency,
        longest,
    )
    if plan.num_host_blocks:
        logger.info("Swap space: %d blocks, %s", plan.num_host_blocks, _gib(plan, plan.num_host_blocks))
    return plan


def plan_store(config: EngineConfig, plan: CachePlan) -> StorePlan | None:
    """Return where engines find each other's blocks, if they are to. Raises ConfigError."""
    storage = kv_store(config.cache.kv_transfer_config)
    if storage is None:
        return None
    if not config.cache.enable_prefix_caching:
        raise ConfigError("kv_transfer_config needs enable_prefix_caching, by which blocks are found.")
    try:
        kind = fingerprint(config, plan, with_times=storage.path is not None)
    except OSError as error:
        raise ConfigError(f"The model's files cannot be read: {error}") from error
    store = StorePlan(
        "" if storage.path is None else str(storage.path.absolute()),
        kind,
        storage.max_bytes,
        config.parallel.world_size,
        storage.reads,
        storage.writes,
    )
    if storage.path is None:
        memory = Path("/dev/shm")
        mailbox = Mailbox.create(memory if memory.is_dir() else None)
        weakref.finalize(store, mailbox.close)
        store.folder = str(mailbox.path / "blocks")
        number = max(0, config.parallel.data_parallel_rank) if storage.port else 0
        store.host, store.port = storage.host, storage.port + number
        store.engine_id = storage.engine_id or token_hex(8)
        store.may_recompute, store.silence_s = storage.may_recompute, config.parallel.node_timeout
    return store


def num_sequences(config: EngineConfig, plan: CachePlan) -> float:
    """Return how many requests of the plan's max_model_len fit at once."""
    return (plan.num_blocks - 1) / max(1, _blocks_for(config, plan, plan.max_total_tokens))


def _num_blocks(config: EngineConfig, ready: ModelReady, bytes_per_block: int, needed: int) -> int:
    """Return the user's number, or what fits the user's bytes or what the device has left.

    On CPU no more is taken than max_num_seqs requests of full length can use, nor than CPU_CACHE_BYTES,
    unless a length that must be served needs it.
    """
    if config.cache.num_gpu_blocks_override:
        return config.cache.num_gpu_blocks_override
    if config.cache.kv_cache_memory_bytes:
        return config.cache.kv_cache_memory_bytes // bytes_per_block
    num_blocks = max(0, ready.available_bytes) // bytes_per_block
    if config.parallel.device == "cpu":
        enough = config.scheduler.max_num_seqs * needed + 1
        least = 0 if config.fit_max_model_len else needed + 1
        return min(num_blocks, enough, max(least, CPU_CACHE_BYTES // bytes_per_block))
    return num_blocks


def _num_host_blocks(config: EngineConfig, ready: ModelReady, one_block: CachePlan) -> int:
    """Return how many fill swap_space on each rank, if copying blocks is any use. Raises ConfigError."""
    space = int(config.cache.swap_space * (1 << 30))
    if not space:
        return 0
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if space * config.parallel.world_size > memory:
        raise ConfigError(
            f"Too large swap space: {config.parallel.world_size} x {config.cache.swap_space:g} GiB "
            f"out of the machine's {memory / (1 << 30):.3g} GiB. Lower swap_space."
        )
    if not config.cache.enable_prefix_caching:
        logger.warning("swap_space is not used: it needs enable_prefix_caching, by which blocks are found.")
        return 0
    if not swapping_pays(one_block.bytes_per_token, ready.weight_bytes, config.parallel.device):
        logger.info("swap_space is not used: computing tokens anew takes less time than copying them.")
        return 0
    return space // one_block.bytes_per_block


def _blocks_for(config: EngineConfig, plan: CachePlan, num_tokens: int) -> int:
    """Return the most blocks of one request that grows to `num_tokens`; the last is never computed."""
    chunk = config.scheduler.max_chunk
    return sum(group.peak_blocks(max(1, num_tokens - 1), chunk) for group in CacheGroup.all_of(plan))


def _longest_that_fits(config: EngineConfig, plan: CachePlan) -> int:
    """Return the most tokens of one request whose blocks there are; 1 if there is none."""
    low, high = 1, config.model.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if _blocks_for(config, plan, middle) <= plan.num_blocks - 1:
            low = middle
        else:
            high = middle - 1
    return low


def _too_small(config: EngineConfig, plan: CachePlan, needed: int, ready: ModelReady) -> str:
    longest = plan.max_model_len
    advice = f"Lower max_model_len to {longest} or less, or give" if longest >= _SHORTEST else "Give"
    return (
        f"One request of max_model_len={config.model.max_model_len} tokens needs {needed + 1} blocks of KV "
        f"cache ({_gib(plan, needed + 1)}, the null block included); there is room for {plan.num_blocks} "
        f"({_gib(plan, plan.num_blocks)}). {advice} the cache more memory: gpu_memory_utilization "
        f"(now {config.cache.gpu_memory_utilization:g}), kv_cache_memory_bytes or num_gpu_blocks_override."
        + _other_uses(ready)
    )


def _other_uses(ready: ModelReady) -> str:
    """Return what else takes memory, where it is kept back."""
    if not ready.workspace_bytes:
        return ""
    sizes = ready.weight_bytes - ready.host_weight_bytes, ready.workspace_bytes
    weights, steps = (f"{size / (1 << 30):.3g} GiB" for size in sizes)
    return (
        f" The weights take {weights}, the largest step {steps}: a lower max_num_batched_tokens or "
        "max_num_seqs makes it smaller."
    )


def _gib(plan: CachePlan, num_blocks: int) -> str:
    return f"{num_blocks * plan.bytes_per_block / (1 << 30):.3g} GiB"
