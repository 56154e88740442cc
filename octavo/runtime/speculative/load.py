"""`load_drafter` makes what `speculative_config` asks for, where that has weights."""

from octavo.config.engine import EngineConfig
from octavo.runtime.distributed.context import ParallelContext
from octavo.runtime.loader.loader import Reader, load_own
from octavo.runtime.models.interface import Model
from octavo.runtime.platforms.platform import Platform
from octavo.runtime.speculative.draft_model import DraftModel
from octavo.runtime.speculative.drafter import Drafter


def load_drafter(
    config: EngineConfig,
    target: Model,
    platform: Platform,
    parallel: ParallelContext,
    read: Reader | None = None,
) -> Drafter | None:
    """Load the drafter; None for none with weights. Raises ConfigError (BadCheckpoint), Unsupported.

    read: where weights come from, if not a file
    """
    if config.draft is None:
        return None
    return DraftModel(load_own(config.draft, platform, parallel, read), config)
