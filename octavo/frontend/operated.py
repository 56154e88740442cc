"""Verbs of an `Operator` as methods of engines: `in_thread` of LLM and LLMEngine, `on_loop` of AsyncLLM."""

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from octavo.frontend.operator import Operator

P = ParamSpec("P")
T = TypeVar("T")


class Operated(Protocol):
    """An engine that has an operator."""

    @property
    def operator(self) -> Operator:
        """The one who answers its verbs."""


def in_thread(
    verb: Callable[Concatenate[Operator, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Operated, P], T]:
    """Return a verb as a method of an engine whose core answers in the caller's thread."""

    @wraps(verb)
    def method(engine: Operated, /, *args: P.args, **kwargs: P.kwargs) -> T:
        asked = verb(engine.operator, *args, **kwargs)
        try:
            asked.send(None)
        except StopIteration as end:
            result: T = end.value
            return result
        raise RuntimeError(f"{verb.__name__} waited for an event loop.")

    return method


def on_loop(
    verb: Callable[Concatenate[Operator, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Operated, P], Coroutine[Any, Any, T]]:
    """Return a verb as a method of an engine on an event loop."""

    @wraps(verb)
    async def method(engine: Operated, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await verb(engine.operator, *args, **kwargs)

    return method


class VerbsInThread:
    """What `LLM` and `LLMEngine` have of an operator: their core answers in the caller's thread."""

    get_metrics = in_thread(Operator.get_metrics)
    collective_rpc = in_thread(Operator.collective_rpc)
    apply_model = in_thread(Operator.apply_model)
    add_lora = in_thread(Operator.add_lora)
    remove_lora = in_thread(Operator.remove_lora)
    pin_lora = in_thread(Operator.pin_lora)
    list_loras = in_thread(Operator.list_loras)
    add_prompt_adapter = in_thread(Operator.add_prompt_adapter)
    sleep = in_thread(Operator.sleep)
    wake_up = in_thread(Operator.wake_up)
    is_sleeping = in_thread(Operator.is_sleeping)
    release_kv_cache_memory = in_thread(Operator.release_kv_cache_memory)
    reset_prefix_cache = in_thread(Operator.reset_prefix_cache)
    reset_mm_cache = in_thread(Operator.reset_mm_cache)
    start_profile = in_thread(Operator.start_profile)
    stop_profile = in_thread(Operator.stop_profile)
    update_weights_from_disk = in_thread(Operator.update_weights_from_disk)
    init_weight_transfer_engine = in_thread(Operator.init_weight_transfer_engine)
    shutdown_weight_transfer_engine = in_thread(Operator.shutdown_weight_transfer_engine)
    start_weight_update = in_thread(Operator.start_weight_update)
    update_weights = in_thread(Operator.update_weights)
    finish_weight_update = in_thread(Operator.finish_weight_update)
    update_weight_version = in_thread(Operator.update_weight_version)
    get_weight_version = in_thread(Operator.get_weight_version)


class WeightsOnLoop:
    """Verbs about weights of an engine on an event loop."""

    update_weights_from_disk = on_loop(Operator.update_weights_from_disk)
    init_weight_transfer_engine = on_loop(Operator.init_weight_transfer_engine)
    shutdown_weight_transfer_engine = on_loop(Operator.shutdown_weight_transfer_engine)
    start_weight_update = on_loop(Operator.start_weight_update)
    update_weights = on_loop(Operator.update_weights)
    finish_weight_update = on_loop(Operator.finish_weight_update)
    update_weight_version = on_loop(Operator.update_weight_version)
    get_weight_version = on_loop(Operator.get_weight_version)
