"""Control verbs of the core: name → handler. Called by `EngineCore.call`; results are plain types.

A new verb is a function and a line in HANDLERS. What concerns the workers goes to them by `collective_rpc`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from octavo.base.errors import RequestError, Unsupported
from octavo.base.log import get_logger
from octavo.engine.executor.interface import Executor
from octavo.engine.kvcache.pins import Pin
from octavo.engine.kvcache.prefix import HashChain
from octavo.engine.pause import PauseState
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.messages.request import Retention

logger = get_logger(__name__)
KV_CACHE, WEIGHTS = "kv_cache", "weights"


@dataclass(slots=True)
class WeightsInUse:
    """What the weights are called, where they can be read, and what those at that place are called."""

    version: str = ""
    path: str = ""
    version_on_disk: str = ""

    def replace(self, version: str, path: str) -> None:
        """Other weights are in use. path: "" = in no file"""
        self.version, self.path = version, path
        if path:
            self.version_on_disk = version

    def are_lost(self) -> None:
        """Those on disk have been read again."""
        if self.version != self.version_on_disk:
            logger.warning(
                "The weights %r are lost: those in use are %r.",
                self.version,
                self.version_on_disk or "default",
            )
            self.version = self.version_on_disk


class Parts(NamedTuple):
    """What verbs act on."""

    scheduler: Scheduler
    executor: Executor
    pause_state: PauseState
    weights: WeightsInUse


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
    parts.scheduler.pins.clear()
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
    if wanted and any(parts.executor.call("wake_up", {"parts": sorted(wanted)})):
        parts.weights.are_lost()
    parts.pause_state.asleep -= wanted
    if not parts.pause_state.asleep:
        parts.pause_state.resume()
    return sorted(parts.pause_state.asleep)


def _check_update(parts: Parts) -> None:
    """Raise where there can be no other weights now."""
    if WEIGHTS in parts.pause_state.asleep:
        raise RequestError("The engine sleeps: wake_up comes before new weights.", "path")
    if parts.scheduler.kv.shared.writes:
        raise Unsupported(
            "Blocks shared with other engines (kv_transfer_config) belong to the first weights."
        )


def _stage_weights(parts: Parts, arguments: dict[str, Any]) -> None:
    """Load other weights on all ranks, beside those in use. arguments: `path` of their folder or file."""
    _check_update(parts)
    parts.executor.call("stage_weights", {"path": arguments["path"]})


def _start_weight_update(parts: Parts, _: dict[str, Any]) -> None:
    """Have all ranks take weights from a trainer, beside those in use."""
    _check_update(parts)
    parts.executor.call("start_weight_update", {})


def _use_staged_weights(parts: Parts, arguments: dict[str, Any]) -> None:
    """Compute with the weights that wait on all ranks; open requests will be computed anew.

    arguments: `version`, their name
    """
    parts.scheduler.preempt_all()
    parts.scheduler.kv.reset_prefix_cache()
    path = parts.executor.call("use_staged_weights", {})[0]
    parts.weights.replace(arguments["version"], path)


def _num_adapter_users(parts: Parts, arguments: dict[str, Any]) -> int:
    """Return how many requests, queued ones too, have the adapter of the folder `path`, alone or in a sum."""
    specs = [request.spec for request in parts.scheduler.requests.values()]
    specs += [request.spec for request in parts.pause_state.queued.values()]
    return sum(arguments["path"] in spec.adapter_paths for spec in specs)


def _pin_prefix(parts: Parts, arguments: dict[str, Any]) -> dict[str, Any] | None:
    """Pin a beginning that is in the cache: what `list_pins` says of it; None while not all of it is there.

    arguments: `token_ids`, `cache_salt`, `seconds`, `priority`. Raises RequestError over the budget.
    """
    kv, pins, token_ids = parts.scheduler.kv, parts.scheduler.pins, arguments["token_ids"]
    num_tokens = kv.sharable_tokens(len(token_ids))
    if not num_tokens:
        raise RequestError(f"A prefix of {len(token_ids)} tokens fills no block of the cache.", "prompt")
    chain = HashChain(kv.hash_block_size, arguments["cache_salt"])
    if kv.match(chain, token_ids, 0).num_tokens < num_tokens:
        pins.check(num_tokens)
        return None
    retention = Retention(arguments["seconds"], arguments["priority"], is_firm=True)
    pin = pins.keep(chain, token_ids, retention)
    if pin is None:
        pins.check(num_tokens)
        raise RequestError("There is no room for this pin beside those of more worth.", "prompt")
    return _describe(pin, parts)


def _describe(pin: Pin, parts: Parts) -> dict[str, Any]:
    return {
        "id": pin.digest.hex()[:32],
        "num_tokens": pin.num_tokens,
        "num_blocks": len(pin.blocks),
        "prefix_priority": pin.retention.priority,
        "is_firm": pin.retention.is_firm,
        "expires_in_s": parts.scheduler.pins.seconds_left(pin),
    }


def _unpin_prefix(parts: Parts, arguments: dict[str, Any]) -> bool:
    """Let go of a pin; return whether there was one. arguments: `id`"""
    pins = parts.scheduler.pins
    found = [pin for pin in pins.all() if _describe(pin, parts)["id"] == arguments["id"]]
    for pin in found:
        pins.drop(pin.digest)
    return bool(found)


HANDLERS: dict[str, Handler] = {
    "collective_rpc": _collective_rpc,
    "is_paused": lambda parts, _: parts.pause_state.is_paused,
    "is_sleeping": lambda parts, _: sorted(parts.pause_state.asleep),
    "list_pins": lambda parts, _: [_describe(pin, parts) for pin in parts.scheduler.pins.all()],
    "num_adapter_users": _num_adapter_users,
    "num_inside": lambda parts, _: parts.scheduler.num_open,  # those that a pause has queued are outside
    "pause": _pause,
    "pin_prefix": _pin_prefix,
    "reset_prefix_cache": _reset_prefix_cache,
    "resume": lambda parts, _: parts.pause_state.resume(),
    "sleep": _sleep,
    "stage_weights": _stage_weights,
    "start_weight_update": _start_weight_update,
    "stats": lambda parts, _: msgspec.structs.asdict(parts.scheduler.stats()),
    "unpin_prefix": _unpin_prefix,
    "update_weight_version": lambda parts, given: parts.weights.replace(given["version"], parts.weights.path),
    "use_staged_weights": _use_staged_weights,
    "wake_up": _wake_up,
    "weight_version": lambda parts, _: parts.weights.version or "default",
}
