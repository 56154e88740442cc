"""`Operator`: what an operator asks of a running engine: pause, sleep, caches, profiles, workers.

Each verb is written once, as a coroutine over a `Core` (pausing, weight_updates, here). `operated` makes it a
method of engines; serving/admin lists the routes.
To add a verb: a method here, its handler in engine/commands, and a line in each API that shall have it.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

import msgspec

from octavo.base.errors import EngineDead, RequestError, Unsupported, wrong
from octavo.config.engine import EngineConfig
from octavo.frontend.observe.engine_metrics import SLEEP_STATES, EngineMetrics
from octavo.frontend.pausing import Core, PauseMode
from octavo.frontend.requests.adapters import AdapterFiles
from octavo.frontend.weight_updates import WeightUpdates
from octavo.messages.adapters import AdapterRef, LoRARequest, PromptAdapterRequest, SoftPromptRef
from octavo.metrics import Metric, in_vectors

P = ParamSpec("P")
T = TypeVar("T")
_PARTS = ("weights", "kv_cache")
_TAGS = (*_PARTS, "scheduling")
_COUNT_S = 1.0
_NO_SCALING = "One replica stays one: start the server with data_parallel_size > 1 or enable_elastic_ep."
_LOOK_S = 0.005  # between looks whether an adapter is loaded


class Operator(WeightUpdates):
    """The verbs of one engine."""

    def __init__(
        self, config: EngineConfig, metrics: EngineMetrics, core: Core, adapter_files: AdapterFiles
    ) -> None:
        super().__init__(config, core)
        self._metrics = metrics
        self._adapter_files = adapter_files
        self._adapters: dict[int, AdapterRef] = {}
        """Those that were added, by id."""
        self.on_scale: Callable[[int], None] = lambda _: None
        """Called when there are so many replicas."""

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pause, and give up memory until `wake_up`.

        level: 0 none; 1 the KV cache, and of a GPU the weights, which wait in host memory; 2 all weights,
        which are then read from the checkpoint again
        mode: what becomes of open requests (abort, wait, keep); those kept are computed anew
        """
        if level not in (0, 1, 2):
            raise wrong("level", f"must be 0, 1 or 2, got {level!r}")
        await self.pause_generation(mode, clear_cache=False)
        await self._core.call(
            "sleep", {"parts": list(_PARTS) if level else [], "discard_weights": level == 2}
        )
        self._metrics.note_sleep_state(SLEEP_STATES[level])

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory back: of "weights", of "kv_cache", of all that sleeps when None; then go on."""
        if unknown := [tag for tag in tags or () if tag not in _TAGS]:
            raise RequestError(f"Unknown tags {', '.join(unknown)}. Known: {', '.join(_TAGS)}.", "tags")
        parts = [tag for tag in tags or () if tag in _PARTS]  # scheduling goes on once nothing sleeps
        if not await self._core.call("wake_up", {"parts": parts}):
            self.is_frozen = False
            self._metrics.note_sleep_state("awake")

    async def is_sleeping(self) -> bool:
        """Return True while anything is given up."""
        return bool(await self._core.call("is_sleeping"))

    async def release_kv_cache_memory(self) -> None:
        """Give up the KV cache alone, until wake_up(["kv_cache"]); open requests end."""
        await self.pause_generation("abort", clear_cache=False)
        await self._core.call("sleep", {"parts": ["kv_cache"]})

    async def reset_mm_cache(self) -> None:
        """Forget the images that are prepared."""
        self.forget_media()

    async def reset_encoder_cache(self) -> None:
        """Forget what the model's encoder made of images."""
        await self._core.call("collective_rpc", {"verb": "reset_encoder_cache"})

    async def start_profile(
        self,
        profile_prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Record on every rank what the device does. Raises Unsupported without the option profiler_dir.

        delay_iterations: steps before the first that is recorded
        max_iterations: most steps that are recorded; None or 0 = all until stop_profile
        """
        self._check_profiler()
        counts = {"delay_iterations": delay_iterations or 0, "max_iterations": max_iterations or 0}
        for name, count in counts.items():
            if count < 0:
                raise RequestError(f"{name} must be at least 0, got {count}", name)
        await self.collective_rpc("start_profile", kwargs={"prefix": profile_prefix or "", **counts})

    async def stop_profile(self) -> list[str]:
        """End the recording; return the paths of the traces (Chrome's format), one per rank; "" = no step."""
        self._check_profiler()
        return await self.collective_rpc("stop_profile")

    async def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call `func` with the model of each rank, if the workers are in this process; else Unsupported."""
        return await self.collective_rpc(lambda worker: func(worker.model))

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter before its first request; return False if it was added before, and has not changed.

        Requests need not wait for this. Raises RequestError for what cannot be loaded, and for an id that
        another adapter has, unless load_inplace is set.
        """
        if not isinstance(lora_request, LoRARequest):
            raise RequestError(f"add_lora takes a LoRARequest, got {type(lora_request).__name__}.", "lora")
        ref = await self._core.aside(partial(self._adapter_files.resolve, lora_request))
        assert ref is not None
        known = self._adapters.get(lora_request.lora_int_id)
        if known is not None and known.key == ref.key:
            return False
        if known is not None and not lora_request.load_inplace:
            raise RequestError(
                f"lora_int_id {lora_request.lora_int_id} belongs to {known.name!r}: use another id, or set "
                "load_inplace.",
                "lora_int_id",
            )
        await self._load(ref, "load_adapter")
        if known is not None:
            await self.collective_rpc("drop_adapter", kwargs={"key": known.key})
        self._adapters[lora_request.lora_int_id] = ref
        return True

    async def add_prompt_adapter(self, prompt_adapter_request: PromptAdapterRequest) -> bool:
        """Load a learned prompt before its first request, which need not wait for this; return True.

        Raises RequestError for what cannot be loaded.
        """
        look = partial(self._adapter_files.resolve_prompt, prompt_adapter_request)
        ref = await self._core.aside(look)
        assert ref is not None
        await self._load(ref, "load_soft_prompt")
        return True

    async def _load(self, ref: AdapterRef | SoftPromptRef, verb: str) -> None:
        """Have every rank load an adapter, while steps go on."""
        arguments = {"ref": msgspec.to_builtins(ref, builtin_types=(bytes,)), "waits": False}
        await self.collective_rpc(verb, kwargs=arguments)
        arguments["waits"] = True
        while None in (found := await self.collective_rpc(verb, kwargs=arguments)):
            await self._core.rest(_LOOK_S)
        if reasons := [reason for reason in found if reason]:
            raise RequestError(f"Loading lora {ref.name} failed: {reasons[0]}", "lora_path")

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter that was added; open requests keep it. Return False for an unknown id."""
        ref = self._adapters.pop(lora_id, None)
        if ref is not None:
            await self.collective_rpc("drop_adapter", kwargs={"key": ref.key})
        return ref is not None

    async def num_lora_users(self, lora_path: str) -> int:
        """Return how many sequences compute with the adapter of a folder, alone or in a sum, or wait to."""
        return int(await self._core.call("num_adapter_users", {"path": lora_path}))

    async def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter that was added in memory, until it is removed. Raises RequestError."""
        ref = self._adapters.get(lora_id)
        if ref is None:
            raise RequestError(f"Pinning failed. LoRA {lora_id} is not registered.", "lora_id")
        await self._load(ref, "load_adapter")
        return all(await self.collective_rpc("pin_adapter", kwargs={"key": ref.key}))

    async def scale_elastic_ep(self, new_data_parallel_size: int, drain_timeout: int = 300) -> None:
        """Have so many replicas here: others are started while these serve, or the last ones are drained.

        drain_timeout: seconds after which requests of a replica that ends go on in others, or end with errors
        Raises RequestError, and what keeps a new replica from starting; nothing has changed then.
        """
        parallel = self._config.parallel
        if parallel.num_replicas == 1 and not parallel.enable_elastic_ep:
            raise Unsupported(_NO_SCALING)
        if parallel.shares_experts:
            raise Unsupported("Replicas that share experts stay as many: every one has some of the experts.")
        for name, number, least in (
            ("new_data_parallel_size", new_data_parallel_size, 1),
            ("drain_timeout", drain_timeout, 0),
        ):
            if type(number) is not int or number < least:
                raise wrong(name, f"must be at least {least}, got {number!r}")
        if self.is_frozen:
            raise RequestError("The engine is paused: replicas would not stand still with the others.")
        now, first = await self.get_weight_version(), self._config.checkpoint.weight_version or "default"
        if now != first:
            raise RequestError(f"The weights are {now!r}; a new replica would begin with {first!r}.")
        arguments = {"count": new_data_parallel_size, "drain_timeout_s": drain_timeout}
        await self._core.call("scale", arguments)
        self._metrics.num_replicas = new_data_parallel_size
        self.on_scale(new_data_parallel_size)

    async def list_loras(self) -> set[int]:
        """Return the ids of the adapters that were added."""
        return set(self._adapters)

    async def get_metrics(self) -> list[Metric]:
        """Return everything counted so far, as objects with name, labels and value."""
        await self._count_adapters()
        return in_vectors(self._metrics.snapshot())

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """Return what the model can do."""
        return self._config.pooling.tasks if self._config.pooling else ("generate",)

    async def is_tracing_enabled(self) -> bool:
        """Return whether a span of each request is sent to an otlp_traces_endpoint."""
        return bool(self._config.observability.otlp_traces_endpoint)

    async def _count_adapters(self) -> None:
        """Have the metrics say how often adapters were loaded, found and evicted, as far as that is heard."""
        if self._config.lora.enable_lora:
            with suppress(TimeoutError, EngineDead):
                counts = await self.collective_rpc("adapter_counts", timeout=_COUNT_S)
                firsts = counts[:: self._config.parallel.world_size]  # of each replica: its ranks do the same
                self._metrics.note_adapters({name: sum(c[name] for c in firsts) for name in firsts[0]})

    def _check_profiler(self) -> None:
        if not self._config.observability.profiler_dir:
            raise Unsupported("Profiling is off: name a folder for its traces, profiler_dir=…")
