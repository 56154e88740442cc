"""`BatchRunner`: works off the open batches of the store, line by line, through the engine that serves HTTP.

One per server, run by the process that owns the engine. Batches take turns on half of the engine's seats, so
that requests over HTTP always find one. What it was killed in the middle of it goes on with: every finished
line is in the store.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from octavo.base.errors import EngineDead
from octavo.base.log import get_logger
from octavo.config.server import ServerConfig
from octavo.serving.caller import Caller
from octavo.serving.engines import Engines
from octavo.serving.errors import HTTPError
from octavo.serving.openai import batch_record
from octavo.serving.openai.batch_lines import BatchLine, LineFault, answer_line, read_line, unanswered
from octavo.serving.openai.batch_record import Batch, BatchError, End
from octavo.serving.store.database import Store

logger = get_logger(__name__)
T = TypeVar("T")
_MAX_ERRORS = 100
_RETRY_S = 10.0
_POLL_S = 1.0
"""Between looks at what other API processes have put into the store."""


@dataclass(slots=True)
class _Job:
    """A batch that is worked on."""

    tenant: str
    batch: Batch
    asked_to_end: asyncio.Event = field(default_factory=asyncio.Event)
    errors: list[BatchError] = field(default_factory=list)


class BatchRunner:
    """Nothing happens before `run`."""

    def __init__(self, engines: Engines, config: ServerConfig, store: Store) -> None:
        self._engines = engines
        self._config = config
        self._store = store
        self._seats = asyncio.Semaphore(max(1, engines.num_seats // 2))
        self._jobs: dict[str, _Job] = {}
        self._news = asyncio.Event()

    def notice(self) -> None:
        """A batch has come, or is to end."""
        self._news.set()

    async def run(self) -> None:
        """Task: until it is cancelled; what is open then is left for the next server."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._news.clear()
                for tenant, batch in await self._open_batches():
                    if batch.id not in self._jobs:
                        self._jobs[batch.id] = _Job(tenant, batch)
                        group.create_task(self._work(self._jobs[batch.id]))
                    if batch.status == "cancelling":
                        self._jobs[batch.id].asked_to_end.set()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S if self._config.api_server_count > 1 else None):
                        await self._news.wait()

    async def _open_batches(self) -> list[tuple[str, Batch]]:
        """None while the store cannot be read: then the next look is soon."""
        try:
            return await self._store.run(batch_record.open_batches)
        except Exception:
            logger.exception("The store cannot be read.")
            asyncio.get_running_loop().call_later(_RETRY_S, self.notice)
            return []

    async def _work(self, job: _Job) -> None:
        """Task: one batch, from wherever it stands to its end."""
        try:
            status = await self._outcome(job)
            if status == "expired":
                await self._expire(job)
            await self._run(batch_record.end, job, status=status, errors=job.errors)
        except EngineDead:
            logger.warning("Batch %s waits for the next engine.", job.batch.id)
        except Exception:
            logger.exception("Batch %s cannot go on.", job.batch.id)
        finally:
            del self._jobs[job.batch.id]

    async def _outcome(self, job: _Job) -> End:
        """Do what there is to do, unless it is to end before."""
        work = asyncio.create_task(self._answer_all(job))
        asked = asyncio.create_task(job.asked_to_end.wait())
        try:
            left_s = job.batch.expires_at - time.time()
            await asyncio.wait((work, asked), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return "cancelled"
            return await work if work.done() else "expired"
        except HTTPError as error:
            job.errors = [BatchError(error.kind, str(error))]
            return "failed"
        finally:
            for task in (work, asked):
                task.cancel()
            await asyncio.gather(work, asked, return_exceptions=True)

    async def _answer_all(self, job: _Job) -> End:
        total = await self._validate(job)
        if job.errors:
            return "failed"
        job.batch = await self._run(batch_record.begin, job, total=total)
        try:
            async with asyncio.TaskGroup() as group:
                async for number, line in self._todo(job):
                    await self._seats.acquire()
                    task = group.create_task(self._answer(job, number, line))
                    task.add_done_callback(lambda _: self._seats.release())
        except ExceptionGroup as faults:
            raise faults.exceptions[0] from None
        return "completed"

    async def _answer(self, job: _Job, number: int, line: BatchLine) -> None:
        name, salt = f"{job.batch.id}-{number}", self._salt(job.tenant)
        caller = Caller(self._engines, self._config, name, job.tenant, salt, {}, in_bulk=True)
        result = await answer_line(caller, line)
        await self._run(batch_record.add_result, job, number=number, result=result)

    async def _validate(self, job: _Job) -> int:
        """The number of its requests; what is wrong with lines is noted."""
        names: set[str] = set()
        async for number, content in self._lines(job):
            try:
                line = read_line(content, job.batch.endpoint)
                if line.custom_id in names:
                    raise LineFault("duplicate_custom_id", "Another line has this custom_id.", "custom_id")
                names.add(line.custom_id)
            except LineFault as fault:
                job.errors.append(BatchError(fault.code, str(fault), number + 1, fault.parameter))
                if len(job.errors) == _MAX_ERRORS:
                    break
        if not names and not job.errors:
            job.errors.append(BatchError("empty_file", "The file holds no request."))
        return len(names)

    async def _todo(self, job: _Job) -> AsyncIterator[tuple[int, BatchLine]]:
        done = await self._store.run(partial(batch_record.done_lines, batch=job.batch))
        async for number, content in self._lines(job):
            if number not in done:
                yield number, read_line(content)

    async def _lines(self, job: _Job) -> AsyncIterator[tuple[int, bytes]]:
        async for lines in self._store.windows(job.batch.input_file_id):
            for number, content in lines:
                if content.strip():
                    yield number, content

    async def _expire(self, job: _Job) -> None:
        job.batch = await self._run(batch_record.find, job)
        async for number, line in self._todo(job):
            result = unanswered(line, "batch_expired", "This request was not answered within 24 hours.")
            await self._run(batch_record.add_result, job, number=number, result=result)

    def _salt(self, tenant: str) -> str:
        """What the key of the tenant would have brought."""
        keys = self._config.api_key
        return next((key.cache_salt for key in keys if key.tenant == tenant), tenant) if len(keys) > 1 else ""

    async def _run(self, change: Callable[..., T], job: _Job, **values: Any) -> T:
        return await self._store.run(partial(change, tenant=job.tenant, batch_id=job.batch.id, **values))
