"""The paged KV cache."""

from dataclasses import dataclass
from typing import Any

from octavo.config.option import Concern, option


@dataclass(frozen=True, kw_only=True)
class CacheConfig(metaclass=Concern):
    """Size and behaviour of the KV cache."""

    block_size: int = option(0, "Slots per block; 0 = 16 on CPU, 64 on GPU.")
    mamba_block_size: int = option(
        512, "Tokens between states of recurrent layers kept for prefix caching, rounded up to blocks."
    )
    gpu_memory_utilization: float = option(
        0.92, "Share of the device's memory that weights, work space and KV cache may take together."
    )
    kv_cache_memory_bytes: int = option(0, "Bytes for the KV cache; 0 = planned from the memory.")
    num_gpu_blocks_override: int = option(0, "Number of blocks, whatever the memory says; 0 = planned.")
    enable_prefix_caching: bool = option(True, "Reuse the blocks of a prompt's known beginning.")
    prefix_pin_share: float = option(
        0.5, "Share of the cache's blocks that may be pinned, by retention_s or by operators, 0 … 1."
    )
    prefix_caching_hash_algo: str = option("sha256", "Digest that names a block's content.", ("sha256",))
    kv_cache_dtype: str = option(
        "auto",
        "Type of keys and values; auto = the model's dtype. 8 bits for twice the context: fp8 on a GPU; int8 "
        "on a CPU, with a scale per token and head.",
        ("auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "int8", "int8_per_token_head"),
    )
    swap_space: float = option(0.0, "GiB of host memory for preempted and evicted blocks; 0 = none.")
    kv_transfer_config: dict[str, Any] = option(
        {},
        "Share blocks with other engines through a folder: kv_connector "
        "SharedStorageConnector; kv_role kv_both, kv_producer (writes) or kv_consumer (reads); "
        "kv_connector_extra_config with shared_storage_path and max_bytes.",
    )
