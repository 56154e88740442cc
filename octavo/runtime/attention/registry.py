"""The family of attention back ends, and the choice among them."""

from octavo.base.errors import Unsupported
from octavo.base.registry import Registry
from octavo.messages.kv import KVCacheSpec
from octavo.runtime.attention.interface import AttentionBackend
from octavo.runtime.platforms.platform import Platform

BACKENDS: Registry[type[AttentionBackend]] = Registry(
    "attention back end", {"paged": "octavo.runtime.attention.paged:PagedBackend"}
)


def choose_backend(specs: list[KVCacheSpec], platform: Platform, name: str = "auto") -> AttentionBackend:
    """The back end `name`, or with "auto" the first that serves all `specs` on `platform`.

    Raises ConfigError for an unknown name, Unsupported with every reason when none serves.
    """
    reasons = []
    for candidate in BACKENDS.names() if name == "auto" else [name]:
        kind = BACKENDS.load(candidate)
        refusals = [reason for spec in specs if (reason := kind.supports(spec, platform))]
        if not refusals:
            return kind(platform)
        reasons.append(f"{candidate}: {refusals[0]}")
    raise Unsupported(f"No attention back end serves this model on {platform.device}. {'; '.join(reasons)}")
