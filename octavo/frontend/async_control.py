"""The verbs of `control` on an event loop: the half of AsyncLLM that an operator uses."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from octavo.base.errors import Unsupported
from octavo.config.engine import EngineConfig
from octavo.frontend.control import (
    TASKS,
    PauseMode,
    check_mode,
    check_profiler,
    rpc_orders,
    sleep_orders,
    sleep_state,
    wake_orders,
)
from octavo.frontend.core_link import CoreLink
from octavo.frontend.engine_metrics import EngineMetrics
from octavo.frontend.later import LORA
from octavo.messages.request import FinishReason
from octavo.metrics import Metric

_POLL_S = 0.01


class AsyncEngineControl:
    """The verbs, one call of the core each."""

    config: EngineConfig
    metrics: EngineMetrics
    core: CoreLink

    async def pause_generation(self, *, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Compute nothing until `resume_generation`; requests that come meanwhile wait.

        mode: what becomes of those open now
        clear_cache: forget cached prompts too; requests that stand still are then computed anew
        """
        check_mode(mode)
        keys = self.core.processor.open_keys()
        await self.core.call("pause", {"freeze": mode != "wait"})
        if mode == "abort":
            self.core.end(keys, FinishReason.ABORT)
            self.core.tell_fronts(None)
        elif mode == "wait":
            await self.core.finish(keys)
            while await self.core.call("num_inside"):  # of other fronts
                await asyncio.sleep(_POLL_S)
            await self.core.call("pause", {"freeze": True})
        if clear_cache:
            await self.reset_prefix_cache(reset_running_requests=True)

    async def resume_generation(self) -> None:
        """Go on. Raises OctavoError while the engine sleeps."""
        await self.core.call("resume")

    async def is_paused(self) -> bool:
        """True from pause to resume, and while asleep."""
        return bool(await self.core.call("is_paused"))

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pause, and give up memory until `wake_up`; levels as in EngineControl.sleep."""
        orders = sleep_orders(level)
        await self.pause_generation(mode=mode, clear_cache=False)
        await self.core.call("sleep", orders)
        self.metrics.note_sleep_state(sleep_state(level))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory back: of "weights", of "kv_cache", of all that sleeps when None; then go on."""
        if not await self.core.call("wake_up", wake_orders(tags)):
            self.metrics.note_sleep_state("awake")

    async def is_sleeping(self) -> bool:
        """True while anything is given up."""
        return bool(await self.core.call("is_sleeping"))

    async def release_kv_cache_memory(self) -> None:
        """Give up the KV cache alone, until wake_up(["kv_cache"]); open requests end."""
        await self.pause_generation(mode="abort", clear_cache=False)
        await self.core.call("sleep", {"parts": ["kv_cache"]})

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all cached prompts, of running requests too if asked; always True."""
        del reset_connector  # there is no cache outside this engine
        return bool(
            await self.core.call("reset_prefix_cache", {"reset_running_requests": reset_running_requests})
        )

    async def reset_mm_cache(self) -> None:
        """Nothing to forget: octavo serves text only."""

    async def reset_encoder_cache(self) -> None:
        """Nothing to forget: octavo serves text only."""

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record on every rank what the device does. Raises Unsupported without profiler_dir."""
        check_profiler(self.config)
        await self.collective_rpc("start_profile", kwargs={"prefix": profile_prefix or ""})

    async def stop_profile(self) -> list[str]:
        """End the recording; the paths of the traces, one per rank."""
        check_profiler(self.config)
        return await self.collective_rpc("stop_profile")

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Run a command of the workers on every rank; one result per rank. Raises TimeoutError."""
        if callable(method):
            raise Unsupported(
                "The engine runs in a process of its own, and functions are not sent to processes (that "
                "takes pickle, which runs whatever it is given): name a command of the worker, or use LLM."
            )
        result: list[Any] = await asyncio.wait_for(
            self.core.call("collective_rpc", rpc_orders(method, args, kwargs)), timeout
        )
        return result

    async def add_lora(self, lora_request: Any) -> NoReturn:
        """Not yet: Unsupported."""
        raise Unsupported(LORA)

    async def remove_lora(self, lora_id: int) -> NoReturn:
        """Not yet: Unsupported."""
        raise Unsupported(LORA)

    async def pin_lora(self, lora_id: int) -> NoReturn:
        """Not yet: Unsupported."""
        raise Unsupported(LORA)

    async def list_loras(self) -> set[int]:
        """None are loaded."""
        return set()

    async def get_metrics(self) -> list[Metric]:
        """Everything counted so far, as objects with name, labels and value."""
        return self.metrics.snapshot()

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """What the model can do."""
        return TASKS

    async def is_tracing_enabled(self) -> bool:
        """False: trace headers are accepted, spans are not sent yet."""
        return False
