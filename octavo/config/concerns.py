"""The form of constructors that take one config object per concern, in any order (vLLM's early one)."""

from dataclasses import dataclass, fields

from octavo.base.errors import ConfigError
from octavo.base.log import get_logger
from octavo.config.args import EngineArgs
from octavo.config.cache import CacheConfig
from octavo.config.engine import EngineConfig
from octavo.config.front import FrontConfig
from octavo.config.lora import LoRAConfig
from octavo.config.media import MediaConfig
from octavo.config.model import ModelConfig
from octavo.config.observability import ObservabilityConfig
from octavo.config.option import options_elsewhere
from octavo.config.parallel import ParallelConfig
from octavo.config.resolve import resolve
from octavo.config.scheduling import SchedulerConfig

logger = get_logger(__name__)


@dataclass(frozen=True)
class DeviceConfig:
    """Where the model runs; the same as ParallelConfig.device and ModelConfig.seed."""

    device: str = "auto"
    seed: int = 0


Concern = (
    ModelConfig
    | CacheConfig
    | ParallelConfig
    | SchedulerConfig
    | FrontConfig
    | LoRAConfig
    | MediaConfig
    | ObservabilityConfig
)


def resolve_concerns(*configs: object, **named: object) -> EngineConfig:
    """An EngineConfig as it is; configs by concern, resolved. Raises ConfigError, Unsupported."""
    if len(configs) == 1 and not named and isinstance(configs[0], EngineConfig):
        return configs[0]
    return resolve(from_concerns(*configs, **named))


def from_concerns(*concerns: object, **named: object) -> EngineArgs:
    """The flat arguments that these configs make up; None counts as left out.

    What DeviceConfig sets wins, and an option that a config was given although it is another's.

    Raises ConfigError for anything that is no config of octavo's.
    """
    values: dict[str, object] = {}
    elsewhere: dict[str, object] = {}
    for concern in (*concerns, *named.values()):
        if isinstance(concern, str):
            logger.warning("distributed_init_method=%r has no effect: ranks find each other.", concern)
        elif isinstance(concern, DeviceConfig):
            given = {f: getattr(concern, f.name) for f in fields(concern)}
            values |= {f.name: value for f, value in given.items() if value != f.default}
        elif isinstance(concern, Concern):
            values = {f.name: getattr(concern, f.name) for f in fields(concern)} | values
            elsewhere |= options_elsewhere(concern)
        elif concern is not None:
            _refuse(concern)
    return EngineArgs(**values | elsewhere)  # type: ignore[arg-type]  # the fields of EngineArgs are those of the concerns


def _refuse(concern: object) -> None:
    kind = type(concern).__name__
    raise ConfigError(
        f"{kind} is no config of octavo's. Allowed: EngineConfig alone, or ModelConfig, CacheConfig, "
        "ParallelConfig, SchedulerConfig, DeviceConfig, FrontConfig, LoRAConfig, MediaConfig, "
        "ObservabilityConfig (octavo.config)."
    )
