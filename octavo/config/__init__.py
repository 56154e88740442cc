"""What the user may set, one frozen dataclass per concern, and what the engine decided (`resolve`)."""

from octavo.config.args import EngineArgs
from octavo.config.cache import CacheConfig
from octavo.config.concerns import DeviceConfig
from octavo.config.engine import EngineConfig
from octavo.config.front import FrontConfig
from octavo.config.kv_transfer import KVTransferConfig
from octavo.config.lora import LoRAConfig
from octavo.config.model import ModelConfig
from octavo.config.observability import ObservabilityConfig
from octavo.config.parallel import ParallelConfig
from octavo.config.resolve import resolve
from octavo.config.scheduling import SchedulerConfig
from octavo.names.modules import names_of

__all__ = [
    "CacheConfig",
    "DeviceConfig",
    "EngineArgs",
    "EngineConfig",
    "FrontConfig",
    "KVTransferConfig",
    "LoRAConfig",
    "ModelConfig",
    "ObservabilityConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "resolve",
]

__getattr__ = names_of(__name__)
"""vLLM's names of this path that are not octavo's own."""
