"""`ModelPool`: brings models when requests ask for them, and has others give way.

A request borrows its model. One that is not open is brought first: the request waits, and so do all that come
meanwhile. Each model comes and goes by a task of its own, so a slow load delays only who needs its memory.
Who may come is planned in the order of the arrivals: what an earlier one will take is taken, and a model that
is coming or going is not moved by another's plan. Models that must give way finish the requests they have;
new ones of theirs wait until they are back. If the arriving model cannot be loaded, those that gave way to it
return.
"""

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from octavo.base.errors import Overloaded
from octavo.base.log import get_logger
from octavo.config.served_models import ServedModels
from octavo.frontend.async_engine import OnCrash
from octavo.serving.model_pool.feed import Feed
from octavo.serving.model_pool.model import PooledModel
from octavo.serving.model_pool.residency import Departure, Limits, Resident, departures, surplus

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
        self._moved = asyncio.Event()
        """Set when a request has ended, nobody waits any more, or a model has come or gone."""
        self.feed = Feed()
        """Of changes of state."""
        self.models = {entry.name: PooledModel(entry, on_crash, self._tell) for entry in served.entries}
        self._served, self._limits = served, limits
        self._arrivals: list[PooledModel] = []
        """Models that are being brought, or wait for room, in the order in which they were asked for."""
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
        if model not in self._arrivals:
            self._arrivals.append(model)
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
            self._moved.set()
            if isinstance(error, TimeoutError):
                text = f"The model {model.name!r} was not there within {self._served.load_timeout_s:g} s."
                raise Overloaded(text) from None
            raise
        return Lease(self, model)

    def give_back(self, model: PooledModel) -> None:
        """A request has ended."""
        model.num_users -= 1
        model.last_used_s = time.monotonic()
        self._moved.set()

    async def load(self, model: PooledModel) -> None:
        """Have it loaded, as a request would; after a failure, too. Raises what `borrow` does."""
        model.forgive()
        with await self.borrow(model):
            pass

    async def unload(self, model: PooledModel) -> None:
        """End its engine when its requests have ended."""
        await self._rest(model)
        if model.engine is not None:
            self._dismiss(model, "unload")
            await self._rest(model)

    async def _bring(self, model: PooledModel) -> None:
        """Task: open a model once there is room for it, unless nobody waits for it any more."""
        gone: list[PooledModel] = []
        try:
            await model.prepare(self._limits)
            while model.waiters and not self._has_room(model, gone):
                await self._movement()
            if not model.waiters:
                for other in gone:
                    other.is_recalled = other.departure is not None
                return
            await model.open()
        except Exception as error:
            model.fail(error)
            for other in sorted(gone, key=lambda other: other.last_used_s):  # the one in use comes last
                logger.info("The model %s returns.", other.name)
                self._run(self._return(other))
        else:
            model.admit()
            self._retire_surplus(model)
        finally:
            self._arrivals.remove(model)
            self._moved.set()

    def _has_room(self, model: PooledModel, gone: list[PooledModel]) -> bool:
        """Return True if a model may be opened now; if not, have those leave that can.

        gone: who was told to leave for it, added to
        """
        if model.departure is not None:  # it has been asked for while it leaves
            return False
        leaving = departures(model.resident(), self._expected(model), self._limits)
        for name, departure in (leaving or {}).items():
            gone.append(self.models[name])
            self._dismiss(self.models[name], departure)
        present = [other.resident() for other in self._residents() if other is not model]
        return leaving == {} and departures(model.resident(), present, self._limits) == {}

    def _expected(self, model: PooledModel) -> list[Resident]:
        """Return the others as they will be when all changes under way are done."""
        ahead = self._arrivals[: self._arrivals.index(model)]
        expected = []
        for other in self.models.values():
            if other is model or other.footprint is None:
                continue
            is_opening = other in self._arrivals and other.occupies == "awake" and other.departure is None
            if other in ahead or is_opening:
                expected.append(replace(other.resident(), is_awake=True, is_fixed=True))
            elif other.departure == "sleep":
                expected.append(replace(other.resident(), is_awake=False, is_fixed=True))
            elif other.occupies and other.departure is None:
                expected.append(other.resident())
        return expected

    def _residents(self) -> list[PooledModel]:
        return [model for model in self.models.values() if model.occupies]

    def _retire_surplus(self, arrived: PooledModel) -> None:
        """Unload engines that are too many; `_look_after_idle` comes back to those that are in use.

        One that loads is none yet: it may fail.
        """
        there = [other.resident() for other in self._residents() if other.state != "loading"]
        for name in surplus(arrived.name, there, self._limits):
            if self._is_settled(self.models[name]):
                self._dismiss(self.models[name], "unload")

    async def _return(self, model: PooledModel) -> None:
        """Task: load again what has given way in vain."""
        try:
            await self.load(model)
        except Exception as error:
            logger.error("The model %s does not return: %s", model.name, error)

    def _dismiss(self, model: PooledModel, departure: Departure) -> None:
        model.departure = departure
        self._run(self._leave(model))

    async def _leave(self, model: PooledModel) -> None:
        """Task: a model gives way once its requests have ended, unless it is recalled before.

        Requests that come meanwhile have it brought back.
        """
        try:
            while model.num_users and not model.is_recalled:
                await self._movement()
            if not model.num_users:
                model.keep_s = None
                await (model.sleep() if model.departure == "sleep" else model.unload())
        except Exception:
            logger.exception("The model %s is unloaded: it could not go to sleep.", model.name)
            await model.unload()
        finally:
            model.departure, model.is_recalled = None, False
            self._moved.set()
        if model.is_open:
            model.admit()

    async def _rest(self, model: PooledModel) -> None:
        while model.departure is not None or model in self._arrivals:
            await self._movement()

    async def _movement(self) -> None:
        """Wait until something has changed that plans depend on."""
        self._moved.clear()
        await self._moved.wait()

    async def _look_after_idle(self) -> None:
        """Task: models that nobody has asked for a while sleep, then go."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for model in self.models.values():
                if self._is_settled(model) and (departure := self._due(model)):
                    self._dismiss(model, departure)
            if residents := self._residents():
                self._retire_surplus(max(residents, key=lambda model: model.last_used_s))

    def _is_settled(self, model: PooledModel) -> bool:
        is_moved = model.departure is not None or model in self._arrivals
        return model.engine is not None and model.is_idle and not is_moved

    def _due(self, model: PooledModel) -> Departure | None:
        if model.expires_in_s() <= 0:
            return "unload"
        sleep_s = model.entry.sleep_after_s
        is_due = sleep_s and model.state == "loaded" and time.monotonic() - model.last_used_s >= sleep_s
        return "sleep" if is_due else None

    def _tell(self, name: str, state: str) -> None:
        self.feed.tell(name, state)
        self._moved.set()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
