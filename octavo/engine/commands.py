"""Control verbs of the core: name → handler. Called by `EngineCore.call`; results are plain types.

A new verb is a function and a line in HANDLERS. What concerns the workers goes to them by `collective_rpc`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from octavo.base.errors import RequestError
from octavo.base.log import get_logger
from octavo.engine.executor.interface import Executor
from octavo.engine.pause import PauseState
from octavo.engine.scheduler.scheduler import Scheduler

logger = get_logger(__name__)
KV_CACHE, WEIGHTS = "kv_cache", "weights"


class Parts(NamedTuple):
    """What verbs act on."""

    scheduler: Scheduler
    executor: Executor
    pause_state: PauseState


Handler = Callable[[Parts, dict[str, Any]], Any]


def run(verb: str, arguments: dict[str, Any], parts: Parts) -> Any:
    """Run one verb, between two steps and with none in flight. Raises RequestError for an unknown one."""
    handler = HANDLERS.get(verb)
    if handler is None:
        raise RequestError(f"Unknown command {verb!r}. Known: {', '.join(sorted(HANDLERS))}.", "verb")
    return handler(parts, arguments)


def _reset_prefix_cache(parts: Parts, arguments: dict[str, Any]) -> bool:
    """Forget all cached prompts; return whether everything that was asked for is forgotten.

    arguments: `reset_running_requests`, to have them computed anew too; `reset_connector`, to remove the
    files that engines share too, which takes an engine that writes them.
    """
    if arguments.get("reset_running_requests"):
        parts.scheduler.preempt_all()
    parts.scheduler.kv.reset_prefix_cache()
    if not arguments.get("reset_connector"):
        return True
    if not parts.scheduler.kv.shared.writes:
        logger.warning("reset_connector: this engine writes no blocks for others (kv_transfer_config).")
        return False
    parts.executor.call("drop_saves", {})
    parts.scheduler.kv.clear_shared_files()
    return True


def _collective_rpc(parts: Parts, arguments: dict[str, Any]) -> list[Any]:
    """Return one result per rank.

    arguments: `verb` for the workers, and their `arguments`; or, in the caller's process only, a `function`
    of the worker.
    """
    if (function := arguments.get("function")) is not None:
        return parts.executor.apply(function)
    verb = arguments.get("verb")
    if not isinstance(verb, str):
        text = f"collective_rpc needs 'verb', the name of a worker command; got {verb!r}."
        raise RequestError(text, "verb")
    return parts.executor.call(verb, arguments.get("arguments") or {})


def _pause(parts: Parts, arguments: dict[str, Any]) -> bool:
    """Pause; `freeze`: stop what runs too. Returns whether nothing is computed any more."""
    parts.pause_state.pause(freeze=bool(arguments.get("freeze")))
    return parts.pause_state.is_frozen


def _sleep(parts: Parts, arguments: dict[str, Any]) -> None:
    """Freeze, and have the workers give up memory; open requests will be computed anew.

    arguments: `parts`, of kv_cache and weights; `discard_weights`, to keep no copy of them.
    """
    wanted = set(arguments["parts"]) - parts.pause_state.asleep
    parts.pause_state.pause(freeze=True)
    if KV_CACHE in wanted:
        parts.scheduler.preempt_all()
        parts.scheduler.kv.reset_prefix_cache()
    orders = {"parts": sorted(wanted), "discard_weights": bool(arguments.get("discard_weights"))}
    if wanted:  # else no wake_up would follow, and what the workers let go would stay so
        parts.executor.call("sleep", orders)
    parts.pause_state.asleep |= wanted


def _wake_up(parts: Parts, arguments: dict[str, Any]) -> list[str]:
    """Take the memory back; once nothing sleeps, go on. Returns what still sleeps.

    arguments: `parts`, all when empty.
    """
    wanted = parts.pause_state.asleep.intersection(arguments.get("parts") or parts.pause_state.asleep)
    if wanted:
        parts.executor.call("wake_up", {"parts": sorted(wanted)})
    parts.pause_state.asleep -= wanted
    if not parts.pause_state.asleep:
        parts.pause_state.resume()
    return sorted(parts.pause_state.asleep)


def _num_adapter_users(parts: Parts, arguments: dict[str, Any]) -> int:
    """Return how many requests have the adapter of the folder `path`, alone or in a sum."""
    return sum(arguments["path"] in r.spec.adapter_paths for r in parts.scheduler.requests.values())


HANDLERS: dict[str, Handler] = {
    "collective_rpc": _collective_rpc,
    "is_paused": lambda parts, _: parts.pause_state.is_paused,
    "is_sleeping": lambda parts, _: sorted(parts.pause_state.asleep),
    "num_adapter_users": _num_adapter_users,
    "num_inside": lambda parts, _: parts.scheduler.num_open,  # those that a pause has queued are outside
    "pause": _pause,
    "reset_prefix_cache": _reset_prefix_cache,
    "resume": lambda parts, _: parts.pause_state.resume(),
    "sleep": _sleep,
    "stats": lambda parts, _: msgspec.structs.asdict(parts.scheduler.stats()),
    "wake_up": _wake_up,
}
