"""`departures`: which models give way to one that comes. Plain arithmetic; the pool carries it out.

Models that may not run beside it sleep. Where memory is short the least recently used sleep, then go. One
that fits nowhere is refused before any gives way. Of too many engines the least recently used go.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from octavo.base.errors import ConfigError
from octavo.config.served_models import ServedModels
from octavo.serving.model_pool.footprint import Footprint

Departure = Literal["sleep", "unload"]


@dataclass(frozen=True, slots=True)
class Resident:
    """A model with an engine, or one that is to get one."""

    name: str
    footprint: Footprint
    is_awake: bool = True
    is_busy: bool = False
    is_fixed: bool = False
    """It is coming or going, or has been promised its place: it cannot be moved now."""
    last_used_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What there is for all models."""

    served: ServedModels
    host_bytes: int
    gpu_bytes: int = 0
    """Of each GPU."""

    def hold(self, awake: Sequence[Footprint], asleep: Sequence[Footprint]) -> bool:
        """Whether these fit together."""
        host = sum(f.host_awake for f in awake) + sum(f.host_asleep for f in asleep)
        gpu = sum(f.gpu_awake for f in awake) + sum(f.gpu_asleep for f in asleep)
        return host <= self.host_bytes and gpu <= self.gpu_bytes


def departures(
    arriving: Resident, residents: Sequence[Resident], limits: Limits
) -> Mapping[str, Departure] | None:
    """Return what the others must do before `arriving` can be awake, by name; None: a fixed one bars it.

    residents: all others that have an engine. Raises ConfigError for a model that is too big even alone.
    """
    if not limits.hold([arriving.footprint], []):
        raise ConfigError(_too_big(arriving.footprint, limits))
    others = sorted(residents, key=lambda r: (r.is_busy, r.last_used_s))
    strangers = [r for r in others if r.is_awake and not limits.served.may_share(r.name, arriving.name)]
    movable = [r for r in others if not r.is_fixed]
    leaving: dict[str, Departure] = {r.name: "sleep" for r in strangers}
    for r in movable:
        if r.is_awake and not _fit(arriving, others, leaving, limits):
            leaving.setdefault(r.name, "sleep")
    for r in sorted(movable, key=lambda r: r.is_awake and r.name not in leaving):
        if not _fit(arriving, others, leaving, limits):
            leaving[r.name] = "unload"
    is_barred = any(r.is_fixed for r in strangers) or not _fit(arriving, others, leaving, limits)
    return None if is_barred else leaving


def surplus(arrived: str, residents: Sequence[Resident], limits: Limits) -> list[str]:
    """Return who must go because there are too many engines, now that one has arrived; sleepers first.

    This is no reason to go before it is there: an engine that cannot start would have driven out a good one.
    """
    others = sorted(
        (r for r in residents if r.name != arrived), key=lambda r: (r.is_awake, r.is_busy, r.last_used_s)
    )
    return [r.name for r in others[: max(0, len(residents) - limits.served.max_loaded)]]


def _fit(
    arriving: Resident, others: Sequence[Resident], leaving: Mapping[str, Departure], limits: Limits
) -> bool:
    awake = [r.footprint for r in others if r.is_awake and r.name not in leaving]
    asleep = [
        r.footprint
        for r in others
        if leaving.get(r.name) == "sleep" or (not r.is_awake and r.name not in leaving)
    ]
    return limits.hold([arriving.footprint, *awake], asleep)


def _too_big(footprint: Footprint, limits: Limits) -> str:
    gib = 1 << 30
    needed = f"{footprint.host_awake / gib:.3g} GiB of host memory"
    allowed = f"{limits.host_bytes / gib:.3g} GiB"
    if footprint.gpu_awake:
        needed += f" and {footprint.gpu_awake / gib:.3g} GiB of each GPU"
        allowed += f" and {limits.gpu_bytes / gib:.3g} GiB"
    return (
        f"It is too big: it needs {needed}, {footprint.cache_bytes / gib:.3g} GiB of them for the KV cache; "
        f"all models may take {allowed}. Lower its kv_cache_memory_bytes or max_model_len, or raise `memory` "
        "in the file of models."
    )
