"""`PooledEngines`: the engines of several models. Made by the server's process."""

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager

from octavo.base.errors import EngineDead, Overloaded, wrong
from octavo.base.free_memory import free_bytes
from octavo.config.served_models import ServedModels
from octavo.frontend.async_engine import AsyncLLM, OnCrash
from octavo.frontend.observe.health import Health
from octavo.metrics import Metric
from octavo.metrics.nvml import read_gpus
from octavo.serving.adapters import Scales
from octavo.serving.engines import Engines, Listed
from octavo.serving.model_pool.model import PooledModel
from octavo.serving.model_pool.pool import ModelPool
from octavo.serving.model_pool.residency import Limits

_SHARE = 0.92
"""Of the memory that is free when the server starts."""
_SEATS = 256


class PooledEngines(Engines):
    """The models of a file or a folder."""

    def __init__(self, served: ServedModels, on_crash: OnCrash = "none") -> None:
        """Nothing is loaded before `start`. on_crash: of AsyncLLM, for each engine"""
        host = served.memory_bytes or int(_SHARE * free_bytes())
        gpu = min((gpu.total_bytes for gpu in read_gpus()), default=0)
        self.pool = ModelPool(served, Limits(served, host, gpu), on_crash)
        self._models = {
            name: model for model in self.pool.models.values() for name in (model.name, *model.entry.aliases)
        }
        self.names = list(self._models)
        self.metrics = _Metrics(self.pool)
        self.created = 0
        self.shutdown_timeout = served.entries[0].args.shutdown_timeout

    def model(self, name: str | None) -> PooledModel:
        """The model of a name. Raises UnknownModel."""
        return self._models[self.resolve(name)]

    def _knows(self, name: str) -> bool:
        return False

    def adapter_of(self, model: str, scales: Scales) -> tuple[None, None]:
        if scales is not None:
            raise wrong("lora", "is for servers of one model: leave it out")
        return None, None

    def of(self, model: str | None = None) -> AsyncLLM:
        found = self.model(model)
        if found.engine is None:
            raise Overloaded(f"The model {found.name!r} is not loaded.")
        return found.engine

    async def borrow(self, model: str | None, lora: Scales = None) -> AbstractContextManager[None]:
        return await self.pool.borrow(self.model(model))

    def check_admission(self) -> None:
        """Each model bounds its own queue."""

    def only(self) -> None:
        return None

    def loaded(self) -> Iterator[AsyncLLM]:
        yield from (model.engine for model in self.pool.models.values() if model.engine is not None)

    def listed(self) -> Iterator[Listed]:
        for name, model in self._models.items():
            yield Listed(
                name=name,
                root=model.entry.args.model,
                created=model.created,
                state=model.state,
                config=model.config,
                engine=model.engine if model.state == "loaded" else None,
                fault=model.fault,
                expires_in_s=model.expires_in_s(),
                is_alias=name != model.name,
            )

    def keep(self, model: str, seconds: float | None) -> None:
        if seconds is not None:
            self.model(model).keep_s = seconds

    async def refresh_metrics(self) -> None:
        """What adapters do is told where there is one model."""

    @property
    def num_seats(self) -> int:
        return _SEATS

    def health(self) -> Health:
        known = [engine.core.health() for engine in self.loaded()]
        return Health(
            state="ready",
            reason="",
            num_restarts=sum(health.num_restarts for health in known),
            last_step_age_s=min((health.last_step_age_s for health in known), default=0.0),
            num_running=sum(health.num_running for health in known),
            num_waiting=sum(health.num_waiting for health in known),
        )

    async def start(self) -> None:
        await self.pool.start()

    async def wait_until_dead(self) -> EngineDead:
        """Never return: another engine takes the place of one that is gone."""
        await asyncio.Event().wait()
        raise AssertionError

    async def shutdown(self, grace_s: float) -> None:
        await self.pool.shutdown(grace_s)


class _Metrics:
    """Of all models together."""

    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool
        self.labels = {"model_name": "", "engine": "0"}

    def snapshot(self) -> list[Metric]:
        return [metric for model in self._pool.models.values() for metric in model.snapshot()]
