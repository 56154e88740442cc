"""`BalancedDoor`: several engine cores that share nothing (data parallel), seen as one. Used by CoreLink.

Each replica has a door of its own. When one is lost, its requests end with an error and the others serve on;
whether another core follows is that door's business. Control verbs go to all replicas that are there.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from octavo.base.errors import ConfigError, EngineDead
from octavo.base.link import free_port
from octavo.base.log import get_logger
from octavo.config.engine import EngineConfig
from octavo.frontend.client.balancer import Balancer
from octavo.frontend.client.door import Door
from octavo.frontend.client.restart import RestartPolicy
from octavo.frontend.client.zmq import AsyncClient
from octavo.messages.control import TOGETHER, EndRequests, Ready
from octavo.messages.request import EngineOutput, EngineOutputs, EngineRequest, SchedulerStats

logger = get_logger(__name__)
_RETRY_S = 2.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class LostReplica:
    """What was open at a replica that has ended. Its outputs have all been handed out before."""

    request_ids: list[str]
    error: str
    replica: int
    is_crash: bool = True
    """Otherwise it was drained."""

    def to_outputs(self) -> EngineOutputs:
        """Return the end of these requests."""
        ends = [EngineOutput.failed(request_id, self.error) for request_id in self.request_ids]
        return EngineOutputs(ends, SchedulerStats(), self.replica)


_News = EngineOutputs | EndRequests | LostReplica


class BalancedDoor:
    """The doors of all replicas, used from one event loop; the verbs of a Door."""

    def __init__(self, config: EngineConfig, make_door: Callable[[EngineConfig], AsyncClient]) -> None:
        """Start nothing yet. make_door: makes the door of a replica, with that replica's config"""
        if config.parallel.shares_experts and not config.parallel.data_parallel_rpc_port:
            port = free_port("127.0.0.1")
            config = replace(config, parallel=replace(config.parallel, data_parallel_rpc_port=port))
        self._config, self._make_door = config, make_door
        self.doors = [self._make(index) for index in range(config.parallel.num_replicas)]
        self.on_return: Callable[[int], None] = lambda _: None
        """Called when another core has taken the place of a lost replica."""
        self.keeps_requests = False
        """Whether requests that no replica can take now wait for one, instead of being refused."""
        self._unplaced: dict[str, EngineRequest] = {}
        self._balancer = Balancer(
            len(self.doors),
            block_size=config.tokens_per_block,
            shares_prefixes=config.cache.enable_prefix_caching and config.pooling is None,
        )
        self._news: asyncio.Queue[_News | EngineDead | None] = asyncio.Queue(1)
        self._tasks: list[asyncio.Task[None]] = []
        self._scaling = asyncio.Lock()
        self._restarting = asyncio.Lock()
        self._num_restarts = 0
        """Of all replicas, where they share experts."""
        self._num_wanted = len(self.doors)
        self._closing = False
        self._gone: set[int] = set()
        """Replicas that stay away."""

    @property
    def mailbox_path(self) -> Path:
        """A directory that goes with the engine: the first replica's."""
        return self.doors[0].mailbox_path

    @property
    def is_stalled(self) -> bool:
        """True while no replica is there and one of them hangs."""
        return any(door.is_stalled for door in self.doors) and not any(x.is_up for x in self._balancer.loads)

    async def start(self) -> Ready:
        """Start all replicas at once; return what the smallest has decided. Raises what keeps one from it."""
        starts = await asyncio.gather(*(door.start() for door in self.doors), return_exceptions=True)
        for error in starts:
            if isinstance(error, BaseException):
                await self.close()
                raise error
        self._tasks = [asyncio.create_task(self._follow(index)) for index in range(len(self.doors))]
        ready = [start for start in starts if isinstance(start, Ready)]
        self._ready = min(ready, key=lambda answer: (answer.max_model_len, answer.plan.num_blocks))
        return self._ready

    async def scale(self, count: int, drain_timeout_s: float) -> None:
        """Have so many replicas: start others while those that are there serve, or drain the last ones.

        What is open at a replica after `drain_timeout_s` goes on in the others, or ends with an error.
        Raises what keeps a new one from starting; then nothing has changed.
        """
        async with self._scaling:
            self._num_wanted = count
            if count > len(self.doors):
                try:
                    await self._add_replicas(count)
                except BaseException:
                    self._num_wanted = len(self.doors)
                    raise
            while count < len(self.doors) and not self._closing:
                await self._drain_last(drain_timeout_s)

    def _make(self, index: int) -> AsyncClient:
        return self._make_door(_of_replica(self._config, index))

    async def _add_replicas(self, count: int) -> None:
        added = [self._make(index) for index in range(len(self.doors), count)]
        starts = await asyncio.gather(*(door.start() for door in added), return_exceptions=True)
        errors = [start for start in starts if isinstance(start, BaseException)]
        shortest = min((x.max_model_len for x in starts if isinstance(x, Ready)), default=0)
        if not errors and shortest < (promised := self._ready.max_model_len):
            text = f"A new replica has room for {shortest} tokens per request; the others have {promised}."
            errors = [ConfigError(text)]
        if errors:
            await asyncio.gather(*(door.close() for door in added))
            raise errors[0]
        first = len(self.doors)
        self.doors += added
        self._balancer.resize(count)
        self._tasks += [asyncio.create_task(self._follow(index)) for index in range(first, count)]

    async def _drain_last(self, timeout_s: float) -> None:
        index = len(self.doors) - 1
        self._balancer.loads[index].is_up = False
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._balancer.num_open(index) and not self._closing:
                    await asyncio.sleep(_POLL_S)
        if self._closing:
            return
        task = self._tasks.pop()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        left = self._balancer.lose(index)
        await self.doors.pop().close()
        self._balancer.resize(index)
        self._gone.discard(index)
        logger.info("Replica %d has gone; %d requests were open there.", index, len(left))
        error = "The replica was drained, and this request was not done in time."
        await self._news.put(LostReplica(left, error, index, is_crash=False))

    async def close(self, timeout_s: float = 5.0) -> None:
        """End all replicas. May be called twice."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await asyncio.gather(*(door.close(timeout_s) for door in self.doors))
        with suppress(asyncio.QueueFull):
            self._news.put_nowait(None)

    def add(self, request: EngineRequest) -> None:
        """Hand a request to the replica that can begin it first. Raises Overloaded, EngineDead."""
        replica = self._balancer.place(request)
        if replica is None:
            if self.keeps_requests and self._may_return(request):
                self._unplaced[request.request_id] = request
                return
            raise EngineDead("The engine that this request is for is being restarted.", _RETRY_S)
        try:
            self.doors[replica].add(request)
        except EngineDead:  # it is about to be lost, and this request with it
            if not self.keeps_requests:
                self._balancer.forget(request.request_id)
                raise
        except BaseException:
            self._balancer.forget(request.request_id)
            raise

    def abort(self, request_ids: list[str]) -> None:
        """End these requests; unknown and finished ids are skipped."""
        by_replica: dict[int, list[str]] = {}
        for request_id in request_ids:
            self._unplaced.pop(request_id, None)
            if (replica := self._balancer.forget(request_id)) is not None:
                by_replica.setdefault(replica, []).append(request_id)
        for replica, ids in by_replica.items():
            with suppress(EngineDead):  # then they have ended
                self.doors[replica].abort(ids)

    def detach(self, front: int) -> None:
        """Drop what another front has: there is none."""

    def tell_fronts(self, request_ids: list[str] | None, tenant: str | None) -> None:
        """Have other fronts end requests of theirs: there are none."""

    async def outputs(self) -> AsyncIterator[_News]:
        """Yield what the steps of all replicas bring. Raises EngineDead when none is left."""
        while not self._closing and (news := await self._news.get()) is not None:
            if isinstance(news, EngineDead):
                raise copy(news)
            yield news

    async def call(self, verb: str, arguments: dict[str, Any] | None = None) -> Any:
        """Run a command on every replica that is there: their results as one. Raises what one raises.

        Where others obey a command of `TOGETHER`, a replica that refuses it starts again, as they are.
        "scale" is this door's own.
        """
        if verb == "scale":
            return await self.scale(**arguments or {})
        if not (doors := self._doors_up()):
            raise EngineDead("No engine is there.", _RETRY_S)
        calls = (door.call(verb, arguments) for door in doors)
        results = await asyncio.gather(*calls, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if not errors:
            return _merge(results)
        if verb in TOGETHER and len(errors) < len(doors):
            for door, result in zip(doors, results, strict=True):
                if isinstance(result, BaseException):
                    door.fail(EngineDead(f"Replicas differ after {verb}: {result}"))
        raise errors[0]

    def _doors_up(self) -> list[AsyncClient]:
        return [door for door, load in zip(self.doors, self._balancer.loads, strict=True) if load.is_up]

    def _may_return(self, request: EngineRequest) -> bool:
        """Return True if a replica that may take this request is there, or will be."""
        rank = request.standing.data_parallel_rank
        if rank is None:
            return len(self._gone) < len(self.doors)
        return rank < self._num_wanted and rank not in self._gone

    async def _follow(self, index: int) -> None:
        """Task: one core of this replica after the other."""
        while True:
            life = self._num_restarts
            try:
                async for outputs in self.doors[index].outputs():
                    if isinstance(outputs, EngineOutputs):
                        outputs.engine = index
                        self._balancer.note(index, outputs.outputs, outputs.stats, time.monotonic())
                    await self._news.put(outputs)
                return
            except EngineDead as dead:
                error = dead
            if not await self._restart(index, error, life):
                self._gone.add(index)
                hopeless = [i for i, request in self._unplaced.items() if not self._may_return(request)]
                if len(self._gone) == len(self.doors):
                    await self._news.put(EngineDead(str(error)))
                elif hopeless:
                    await self._news.put(LostReplica(hopeless, str(error), index).to_outputs())
                return
            self._balancer.loads[index].is_up = index < self._num_wanted
            self.on_return(index)
            unplaced, self._unplaced = self._unplaced, {}
            for request in unplaced.values():
                self.add(request)

    async def _restart(self, index: int, error: EngineDead, life: int) -> bool:
        """End what was open at a lost replica and wait for its next core; False if none comes."""
        while True:
            logger.error("Replica %d: %s", index, error)
            await self._news.put(LostReplica(self._balancer.lose(index), str(error), index))
            shares = self._config.parallel.shares_experts
            if error.retry_after_s is None:
                logger.error("Replica %d stays away%s.", index, "" if shares else "; the others serve on")
                if shares:
                    await asyncio.gather(*(door.give_up(error) for door in self.doors))
                return False
            try:
                if shares:
                    await self._restart_all(life, error)
                else:
                    await self._start_again(self.doors[index])
            except EngineDead as dead:
                error = dead
            except Exception as fault:
                error = EngineDead(f"It cannot be started again: {fault}")
            else:
                return True
            life = self._num_restarts

    async def _start_again(self, door: AsyncClient) -> None:
        """Start the next core of a replica, with the weights of others, paused or asleep as they are."""
        others = self._doors_up()[:1]
        for other in others:
            door.follow(other)
        await door.start()
        for other in others:
            while door.standing != other.standing:  # they were told something meanwhile
                await door.stand(other.standing.copy())

    async def _restart_all(self, life: int, error: EngineDead) -> None:
        """Start all replicas again, as none can compute without the others; once for all of one life."""
        async with self._restarting:
            if self._num_restarts > life:
                return
            self._num_restarts += 1
            await asyncio.gather(*(door.give_up(error) for door in self.doors))
            starts = await asyncio.gather(*(door.start() for door in self.doors), return_exceptions=True)
        for fault in starts:
            if isinstance(fault, BaseException):
                raise fault


def _of_replica(config: EngineConfig, index: int) -> EngineConfig:
    parallel = replace(config.parallel, data_parallel_rank=config.parallel.first_replica + index)
    return replace(config, parallel=parallel.on_device(index * parallel.world_size))


def _merge(results: list[Any]) -> Any:
    """Return one result of all: lists one after the other, numbers added up, truth if all say so."""
    first = results[0]
    if isinstance(first, bool):
        return all(results)
    if isinstance(first, int):
        return sum(results)
    if isinstance(first, list):
        return [entry for result in results for entry in result]
    return first


def make_client(config: EngineConfig, restarts: bool, num_fronts: int) -> Door | BalancedDoor:
    """Return the door to a core that is to be started, or to all replicas. Raises ConfigError."""

    def make(config: EngineConfig) -> AsyncClient:
        return AsyncClient(config, RestartPolicy() if restarts else None, num_fronts)

    if config.parallel.num_replicas == 1 and not config.parallel.enable_elastic_ep:
        return make(config)
    if num_fronts > 1:
        raise ConfigError(
            f"api_server_count={num_fronts} with data_parallel_size={config.parallel.data_parallel_size}: "
            "one API process balances between the replicas; leave api_server_count out."
        )
    return BalancedDoor(config, make)
