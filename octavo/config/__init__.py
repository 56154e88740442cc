"""What the user may set, one frozen dataclass per concern, and what the engine decided (`resolve`)."""

from octavo.config.args import EngineArgs
from octavo.config.engine import EngineConfig
from octavo.config.resolve import resolve

__all__ = ["EngineArgs", "EngineConfig", "resolve"]
