"""`Engines`: the engines of one server, by the names of their models. The only reader of what is served.

Made with the app, and by what answers requests without one; asked by `Caller`. This one has one engine, which
is always there; `model_pool.engines` has several.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Literal, Protocol

from octavo.base.errors import EngineDead, UnknownModel, wrong
from octavo.config.engine import EngineConfig
from octavo.config.server import ServerConfig
from octavo.frontend.async_engine import AsyncLLM
from octavo.frontend.observe.health import Health
from octavo.messages.adapters import LoRARequest, LoRASum, PromptAdapterRequest
from octavo.metrics import Metric
from octavo.serving.adapters import Scales, ServedAdapters

State = Literal["unloaded", "loading", "loaded", "sleeping", "failed"]
"""Of a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One name under which a model may be asked for, and how that model is."""

    name: str
    root: str
    """What it was loaded from, or is to be."""
    created: int
    state: State
    config: EngineConfig | None = None
    """None: nobody has asked for it yet."""
    engine: AsyncLLM | None = None
    """None: it is not loaded."""
    fault: str = ""
    """Why it could not be loaded."""
    expires_in_s: float = float("inf")
    """Until it is unloaded, if nobody asks for it."""
    is_alias: bool = False
    parent: str | None = None
    """The base model of an adapter."""


class MetricsSource(Protocol):
    """What the metrics page reads of engines."""

    @property
    def labels(self) -> dict[str, str]:
        """Of series of the whole server."""

    def snapshot(self) -> list[Metric]:
        """Copies of all metrics."""


class Engines:
    """One engine, under all its names, with adapters that have names of their own."""

    metrics: MetricsSource
    names: Sequence[str]
    """Of models that may be asked for; the first is meant where a request gives none."""

    def __init__(self, engine: AsyncLLM, config: ServerConfig) -> None:
        self._engine = engine
        self.names = engine.config.served_names
        self.adapters = ServedAdapters(engine, config, self.names)
        self.created = int(time.time())
        self.metrics = engine.metrics
        self.shutdown_timeout = engine.config.front.shutdown_timeout

    def resolve(self, asked: str | None) -> str:
        """The name to answer with. Raises UnknownModel."""
        if not asked:
            return self.names[0]
        if asked not in self.names:
            asked = asked.removesuffix(":latest")  # Ollama's clients add it
        if asked not in self.names and not self._knows(asked):
            served = ", ".join(listed.name for listed in islice(self.listed(), len(self.names) + 20))
            raise UnknownModel(f"The model {asked[:200]!r} does not exist. Served here: {served}.", "model")
        return asked

    def _knows(self, name: str) -> bool:
        return self.adapters.known(name) is not None

    def adapter_of(
        self, model: str, scales: Scales
    ) -> tuple[LoRARequest | LoRASum | None, PromptAdapterRequest | None]:
        """What answers under a resolved name, and the prompt before its own; scales: of adapters to add up.

        Raises as `resolve`.
        """
        found = None if model in self.names else self.adapters.known(model)
        request = None if found is None else found.request
        prompt = request if isinstance(request, PromptAdapterRequest) else None
        lora = None if isinstance(request, PromptAdapterRequest) else request
        if scales is None:
            return lora, prompt
        if lora is not None:
            raise wrong("lora", f"is for requests to the base model, not to the adapter {model!r}")
        return self.adapters.sum_of(scales), prompt

    def of(self, model: str | None = None) -> AsyncLLM:
        """The engine of a model whose name is `resolve`d; without a name, of the first. Raises Overloaded."""
        return self._engine

    async def borrow(self, model: str | None, lora: Scales = None) -> AbstractContextManager[None]:
        """Have the engine of a model, and adapters of it, there as long as the returned manager is open.

        Raises UnknownModel, Overloaded, HTTPError, RequestError for an adapter that cannot be loaded.
        """
        if model and model not in self.names:
            await self.adapters.look_for(model.removesuffix(":latest"))
        for entry in lora or ():
            await self.adapters.look_for(entry.name or "")
        self.resolve(model)
        return nullcontext()

    def check_admission(self) -> None:
        """Raise Overloaded or EngineDead where no request is taken, whatever it asks."""
        self._engine.check_admission()

    def only(self) -> AsyncLLM | None:
        """The engine, if there is one alone."""
        return self._engine

    def loaded(self) -> Iterator[AsyncLLM]:
        """All engines that are there."""
        yield self._engine

    def listed(self) -> Iterator[Listed]:
        """All names."""
        config = self._engine.config
        state: State = "loaded" if self._engine.metrics.sleep_state == "awake" else "sleeping"
        for name in self.names:
            yield Listed(
                name=name,
                root=config.model.model,
                created=self.created,
                state=state,
                config=config,
                engine=self._engine,
                is_alias=name != self.names[0],
            )
        for adapter in self.adapters.listed():
            yield Listed(
                name=adapter.name,
                root=adapter.path,
                created=self.created,
                state=state,
                config=config,
                engine=self._engine,
                parent=adapter.parent or self.names[0],
                is_alias=True,
            )

    def keep(self, model: str, seconds: float | None) -> None:
        """A request wants its model to stay so long after it; one that is always there stays anyway."""

    async def refresh_metrics(self) -> None:
        """Have engines tell what they tell only when asked."""
        if self._engine.config.lora.enable_lora:
            await self._engine.get_metrics()

    @property
    def num_seats(self) -> int:
        """About how many sequences run at once."""
        return self._engine.config.scheduler.max_num_seqs

    def health(self) -> Health:
        """How they are."""
        return self._engine.core.health()

    async def start(self) -> None:
        """Load what is to be there from the start. Raises ConfigError, EngineDead."""
        await self._engine.start()

    async def wait_until_dead(self) -> EngineDead:
        """Return when the server cannot go on: why."""
        return await self._engine.core.wait_until_dead()

    async def shutdown(self, grace_s: float) -> None:
        """End all."""
        await self._engine.shutdown(timeout=0, grace_s=grace_s)
