"""`load_drafter` makes what `speculative_config` asks for, where that has weights."""

from octavo.config.engine import EngineConfig
from octavo.config.speculative import speculation
from octavo.runtime.distributed.context import ParallelContext
from octavo.runtime.loader.loader import Reader, dtype_of, load_own
from octavo.runtime.models.interface import Model
from octavo.runtime.platforms.platform import Platform
from octavo.runtime.speculative.draft_model import DraftModel
from octavo.runtime.speculative.drafter import Drafter
from octavo.runtime.speculative.heads import MedusaHeads, MLPSpeculator

_HEADS = {"medusa": MedusaHeads, "mlp_speculator": MLPSpeculator}


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
    wanted, draft = speculation(config.scheduler.speculative_config), config.draft
    if wanted is None or draft is None:
        return None
    if (heads := _HEADS.get(wanted.method)) is not None:
        return heads(config, platform.device, platform.compute_dtype(dtype_of(config.model.dtype)))
    return DraftModel(load_own(draft, platform, parallel, read), config)
