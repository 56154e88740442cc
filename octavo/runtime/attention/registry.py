"""`choose_backend` chooses among the family of attention back ends."""

import logging

from octavo.base.errors import Unsupported
from octavo.base.log import get_logger
from octavo.base.registry import Registry
from octavo.messages.kv import KVCacheSpec
from octavo.runtime.attention.interface import AttentionBackend
from octavo.runtime.kernels.precision import InputPrecision
from octavo.runtime.platforms.platform import Platform

logger = get_logger(__name__)

BACKENDS: Registry[type[AttentionBackend]] = Registry(
    "attention back end",
    {
        "cudnn": "octavo.runtime.attention.cudnn:CuDNNBackend",
        "paged": "octavo.runtime.attention.paged:PagedBackend",
    },
)


def choose_backend(
    specs: list[KVCacheSpec],
    platform: Platform,
    name: str = "auto",
    input_precision: InputPrecision = "float32",
) -> AttentionBackend:
    """Return the back end `name`; for "auto" the first that serves all `specs`, or "paged" if there are none.

    Raises ConfigError for an unknown name, Unsupported with every reason when none serves.
    """
    reasons: list[str] = []
    if name == "auto" and not specs:
        name = "paged"
    for candidate in BACKENDS.names() if name == "auto" else [name]:
        kind = BACKENDS.load(candidate)
        refusals = [reason for spec in specs if (reason := kind.supports(spec, platform))]
        if not refusals:
            level = logging.INFO if platform.device.type == "cuda" else logging.DEBUG
            logger.log(level, "Attention by the back end %s. %s", candidate, "; ".join(reasons))
            return kind(platform, input_precision)
        reasons.append(f"{candidate}: {refusals[0]}")
    raise Unsupported(f"No attention back end serves this model on {platform.device}. {'; '.join(reasons)}")
