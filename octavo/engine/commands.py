"""Control verbs of the core: name → handler. Called by `EngineCore.call`; results are plain types.

A new verb is a function and a line in HANDLERS. What concerns the workers goes to them by `collective_rpc`.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from octavo.base.errors import RequestError
from octavo.engine.executor.interface import Executor
from octavo.engine.scheduler.scheduler import Scheduler

Handler = Callable[[Scheduler, Executor, dict[str, Any]], Any]


def run(verb: str, arguments: dict[str, Any], scheduler: Scheduler, executor: Executor) -> Any:
    """Run one verb. Raises RequestError for an unknown one."""
    handler = HANDLERS.get(verb)
    if handler is None:
        raise RequestError(f"Unknown command {verb!r}. Known: {', '.join(sorted(HANDLERS))}.", "verb")
    return handler(scheduler, executor, arguments)


def _reset_prefix_cache(scheduler: Scheduler, executor: Executor, arguments: dict[str, Any]) -> bool:
    scheduler.reset_prefix_cache()
    return True


def _stats(scheduler: Scheduler, executor: Executor, arguments: dict[str, Any]) -> dict[str, Any]:
    return msgspec.structs.asdict(scheduler.stats())


def _collective_rpc(scheduler: Scheduler, executor: Executor, arguments: dict[str, Any]) -> list[Any]:
    """arguments: `verb` for the workers, and their `arguments`; one result per rank."""
    verb = arguments.get("verb")
    if not isinstance(verb, str):
        raise RequestError(
            f"collective_rpc needs 'verb', the name of a worker command; got {verb!r}.", "verb"
        )
    return executor.call(verb, arguments.get("arguments") or {})


HANDLERS: dict[str, Handler] = {
    "collective_rpc": _collective_rpc,
    "reset_prefix_cache": _reset_prefix_cache,
    "stats": _stats,
}
