"""`ModelPool`: brings models when requests ask for them, one after the other, and has others give way.

A request borrows its model. One that is not open is brought first: the request waits, and so do all that come
meanwhile. Models that must give way finish the requests they have; new ones of theirs wait until they are
back. If the arriving model cannot be loaded, those that gave way to it return.
"""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from octavo.base.errors import Overloaded
from octavo.base.log import get_logger
from octavo.config.served_models import ServedModels
from octavo.frontend.async_engine import OnCrash
from octavo.serving.model_pool.feed import Feed
from octavo.serving.model_pool.model import PooledModel
from octavo.serving.model_pool.residency import Departure, Limits, departures, surplus

logger = get_logger(__name__)
_LOOK_S = 0.5
"""Between looks for models that nobody has asked for a while."""


class Lease:
    """One request's use of a model; a context manager."""

    def __init__(self, pool: "ModelPool", model: PooledModel) -> None:
        self._pool, self._model = pool, model

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: object) -> None:
        self._pool.give_back(self._model)


class ModelPool:
    """All models of a server, used from one event loop."""

    def __init__(self, served: ServedModels, limits: Limits, on_crash: OnCrash) -> None:
        self.feed = Feed()
        """Of changes of state."""
        self.models = {entry.name: PooledModel(entry, on_crash, self.feed.tell) for entry in served.entries}
        self._served, self._limits = served, limits
        self._changing = asyncio.Lock()
        """Held by what has models come and go: one change at a time, in the order of the requests."""
        self._given_back = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Load what is to be there from the start; one that fails is told by its state."""
        self._run(self._look_after_idle())
        wanted = [model for model in self.models.values() if model.entry.preload]
        await asyncio.gather(*(self.load(model) for model in wanted), return_exceptions=True)

    async def shutdown(self, grace_s: float) -> None:
        """End all engines; who waits learns of it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for model in self.models.values():
            model.refuse(lambda: Overloaded("The server is shutting down."))
        await asyncio.gather(*(model.unload(grace_s) for model in self.models.values()))

    async def borrow(self, model: PooledModel) -> Lease:
        """Use a model until the lease is given back; it is loaded if need be.

        Raises HTTPError when it cannot be loaded, Overloaded when too many wait, or for too long.
        """
        if model.is_open:
            model.num_users += 1
            return Lease(self, model)
        model.check()
        if len(model.waiters) >= self._served.max_waiting:
            raise Overloaded(f"{len(model.waiters)} requests wait for the model {model.name!r} already.")
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        model.waiters.append(waiter)
        self._run(self._bring(model))
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(self._served.load_timeout_s):
                await waiter
            model.board.histogram("model_wait_seconds").observe(time.monotonic() - began_s)
        except BaseException as error:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.give_back(model)
            elif waiter in model.waiters:
                model.waiters.remove(waiter)
            self._given_back.set()
            if isinstance(error, TimeoutError):
                text = f"The model {model.name!r} was not there within {self._served.load_timeout_s:g} s."
                raise Overloaded(text) from None
            raise
        return Lease(self, model)

    def give_back(self, model: PooledModel) -> None:
        """A request has ended."""
        model.num_users -= 1
        model.last_used_s = time.monotonic()
        self._given_back.set()

    async def load(self, model: PooledModel) -> None:
        """Have it loaded, as a request would; after a failure, too. Raises what `borrow` does."""
        model.forgive()
        with await self.borrow(model):
            pass

    async def unload(self, model: PooledModel) -> None:
        """End its engine when its requests have ended."""
        async with self._changing:
            if model.engine is not None:
                await self._drained([model])
                await self._depart(model, "unload")

    async def _bring(self, model: PooledModel) -> None:
        """Task: open a model, if still somebody waits for it."""
        async with self._changing:
            if model.waiters and not model.is_open:
                await self._make_room_and_open(model)
            elif model.is_open:
                model.admit()

    async def _make_room_and_open(self, model: PooledModel) -> None:
        gone: list[PooledModel] = []
        try:
            await model.prepare(self._limits)
            others = [other.resident() for other in self._residents() if other is not model]
            leaving = departures(model.resident(), others, self._limits)
            if not await self._drained([self.models[name] for name in leaving], until_nobody_waits_for=model):
                return
            for name, departure in leaving.items():
                gone.append(self.models[name])
                await self._depart(self.models[name], departure)
            await model.open()
        except Exception as error:
            model.fail(error)
            for other in sorted(gone, key=lambda other: other.last_used_s):  # the one in use comes last
                logger.info("The model %s returns.", other.name)
                self._run(self._return(other))
        else:
            model.admit()
            await self._retire_surplus(model)

    async def _retire_surplus(self, arrived: PooledModel) -> None:
        """Unload engines that are too many; `_look_after_idle` comes back to those that are in use."""
        for name in surplus(arrived.name, [other.resident() for other in self._residents()], self._limits):
            if self.models[name].is_idle:
                await self._depart(self.models[name], "unload")

    def _residents(self) -> list[PooledModel]:
        return [model for model in self.models.values() if model.engine is not None]

    async def _return(self, model: PooledModel) -> None:
        """Task: load again what has given way in vain."""
        try:
            await self.load(model)
        except Exception as error:
            logger.error("The model %s does not return: %s", model.name, error)

    async def _drained(
        self, leaving: list[PooledModel], until_nobody_waits_for: PooledModel | None = None
    ) -> bool:
        """Let these finish their requests; False: they need not leave any more, and go on."""
        for model in leaving:
            model.is_leaving = True
        while any(model.num_users for model in leaving):
            if until_nobody_waits_for is not None and not until_nobody_waits_for.waiters:
                for model in leaving:
                    model.is_leaving = False
                    model.admit() if model.is_open else None
                return False
            self._given_back.clear()
            await self._given_back.wait()
        return True

    async def _depart(self, model: PooledModel, departure: Departure) -> None:
        """A model without requests gives way; those that come meanwhile have it brought back."""
        model.is_leaving = True
        try:
            if departure == "sleep":
                await model.sleep()
            else:
                await model.unload()
        except Exception:
            logger.exception("The model %s is unloaded: it could not go to sleep.", model.name)
            await model.unload()
        finally:
            model.is_leaving = False
            model.keep_s = None

    async def _look_after_idle(self) -> None:
        """Task: models that nobody has asked for a while sleep, then go."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for model in self.models.values():
                if model.engine is not None and self._due(model):
                    async with self._changing:
                        if model.engine is not None and (departure := self._due(model)):
                            await self._depart(model, departure)
            if len(residents := self._residents()) > self._served.max_loaded:
                async with self._changing:
                    await self._retire_surplus(max(residents, key=lambda model: model.last_used_s))

    def _due(self, model: PooledModel) -> Departure | None:
        if not model.is_idle:
            return None
        if model.expires_in_s() <= 0:
            return "unload"
        sleep_s = model.entry.sleep_after_s
        is_due = sleep_s and model.state == "loaded" and time.monotonic() - model.last_used_s >= sleep_s
        return "sleep" if is_due else None

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
