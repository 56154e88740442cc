"""`choose_backend` chooses among the family of attention back ends."""

import logging

from octavo.base.errors import Unsupported
from octavo.base.log import get_logger
from octavo.base.registry import Registry
from octavo.messages.kv import HeadsKV, KVCacheSpec
from octavo.runtime.attention.interface import AttentionBackend
from octavo.runtime.attention.library import LibraryBackend
from octavo.runtime.attention.paged import PagedBackend
from octavo.runtime.attention.shared_context import SharedContext
from octavo.runtime.distributed.group import ONE, Group
from octavo.runtime.kernels.precision import InputPrecision
from octavo.runtime.platforms.platform import Platform

logger = get_logger(__name__)

BACKENDS: Registry[type[AttentionBackend]] = Registry(
    "attention back end",
    {
        "cudnn": "octavo.runtime.attention.cudnn:CuDNNBackend",
        "flash_attn": "octavo.runtime.attention.flash_attention:FlashAttentionBackend",
        "flashinfer": "octavo.runtime.attention.flashinfer:FlashInferBackend",
        "paged": "octavo.runtime.attention.paged:PagedBackend",
    },
)
_OWN = "cudnn", "paged"
_LIBRARIES = "flash_attn", "flashinfer"
"""Used where they are faster by a measurement."""
_OTHER_NAMES = {"triton_attn": "paged"}


def choose_backend(
    specs: list[KVCacheSpec],
    platform: Platform,
    name: str = "auto",
    input_precision: InputPrecision = "float32",
    num_heads: int = 0,
    context: tuple[Group, int] = (ONE, 1),
) -> AttentionBackend:
    """Return the back end `name`; for "auto" the first that serves all `specs`, or a library that is faster.

    Raises ConfigError for an unknown name, Unsupported with every reason when none serves.

    num_heads: of queries, on one rank; 0 = not known: libraries are not tried
    context:   the ranks that divide the tokens of the cache, and how many of these stay side by side
    """
    name = _OTHER_NAMES.get(name.lower(), name.lower())
    if (size := context[0].size) > 1:
        if reason := _refusal(SharedContext, specs, platform):
            raise Unsupported(f"decode_context_parallel_size={size}: {reason}")
        if name not in ("auto", "paged"):
            raise Unsupported(
                f"decode_context_parallel_size={size}: attention_backend={name!r} cannot do it."
            )
        if all(spec.sliding_window for spec in specs):
            raise Unsupported(f"decode_context_parallel_size={size}: no layer keeps more than a window.")
        return SharedContext(platform, input_precision, *context)
    if name == "auto" and not specs:
        name = "paged"
    reasons: list[str] = []
    for candidate in _OWN if name == "auto" else [name]:
        kind = BACKENDS.load(candidate)
        if reason := _refusal(kind, specs, platform):
            reasons.append(f"{candidate}: {reason}")
            continue
        chosen = kind(platform, input_precision)
        if name == "auto" and num_heads and isinstance(chosen, PagedBackend):
            for library in _LIBRARIES:
                chosen = _if_faster(library, chosen, specs, num_heads, reasons)
        level = logging.INFO if platform.device.type == "cuda" else logging.DEBUG
        logger.log(level, "Attention by %s. %s", type(chosen).__name__, "; ".join(reasons))
        return chosen
    raise Unsupported(f"No attention back end serves this model on {platform.device}. {'; '.join(reasons)}")


def _refusal(kind: type[AttentionBackend], specs: list[KVCacheSpec], platform: Platform) -> str | None:
    return next((reason for spec in specs if (reason := kind.supports(spec, platform))), None)


def _if_faster(
    name: str, own: PagedBackend, specs: list[KVCacheSpec], num_heads: int, reasons: list[str]
) -> PagedBackend:
    """Return the library's back end over `own`, if it takes some kind of step from it; say why or why not."""
    kind = BACKENDS.load(name)
    assert issubclass(kind, LibraryBackend)
    if reason := _refusal(kind, specs, own.platform) or kind.why_not_tried():
        reasons.append(f"{name}: {reason}")
        return own
    assert isinstance(specs[0], HeadsKV)
    try:
        made = kind(own.platform, own.input_precision, own)
        told = made.measure(specs[0], num_heads, len(specs))
    except Unsupported as error:
        reasons.append(str(error))
        return own
    except Exception as error:
        logger.warning("The attention back end %s fails: %s", name, error)
        reasons.append(f"{name}: it fails")
        return own
    reasons.append(f"{name}: {told}")
    return made if made.kinds else own
