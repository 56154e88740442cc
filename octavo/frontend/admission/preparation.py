"""`Preparation`: the few threads that read prompts (templates, tokenizing), off the event loop and bounded.

Used by the asynchronous engine. A job that takes too long costs its own request an error; its thread is lost
until the job ends. When all are busy for long, requests are refused: never is there one thread more.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from octavo.base.errors import Overloaded, RequestError
from octavo.base.pages import return_freed_blocks
from octavo.frontend.requests.input_processor import InputProcessor
from octavo.frontend.requests.options import RequestOptions
from octavo.frontend.requests.prepared import PreparedRequest
from octavo.frontend.requests.prompts import PromptType
from octavo.messages.pooling import PoolingParams
from octavo.messages.sampling import SamplingParams

T = TypeVar("T")
MAX_PREPARE_S = 30.0
"""From the arrival of a job to its result."""
_NUM_THREADS = 4
_NUM_MEDIA_THREADS = 8
"""That fetch images and wait for the processes that decode them."""
_KEPT_S = 0.5
"""How long what media have left is there for others."""
Unprepared = tuple[PromptType, SamplingParams | PoolingParams | None, RequestOptions, str | None]
"""Prompt, parameters, options and the client's id."""


class Preparation:
    """Runs jobs in order of arrival."""

    def __init__(self, max_s: float = MAX_PREPARE_S, num_threads: int = _NUM_THREADS) -> None:
        self._max_s = max_s
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="prepare")
        self._media_pool = ThreadPoolExecutor(_NUM_MEDIA_THREADS, thread_name_prefix="media")
        self._freeing: asyncio.TimerHandle | None = None

    async def prepare(self, processor: InputProcessor, *request: *Unprepared) -> PreparedRequest:
        """A checked request, its images read on threads of their own. Raises what `run` and `process` do."""
        prompt, params, options, request_id = request
        if processor.media.is_in(prompt):
            prompt = await self.run_media(partial(processor.media.read, prompt, options))
        return await self.run(partial(processor.process, prompt, params, options, request_id=request_id))

    async def run(self, job: Callable[[], T]) -> T:
        """The job's result. Raises RequestError if it takes too long, Overloaded if it could not begin."""
        return await self._wait(self._pool.submit(job))

    async def run_media(self, job: Callable[[], T]) -> T:
        """The same on the threads that fetch and prepare media."""
        try:
            return await self._wait(self._media_pool.submit(job))
        finally:
            loop = asyncio.get_running_loop()
            if self._freeing is None or self._freeing.when() <= loop.time():
                self._freeing = loop.call_later(_KEPT_S, self._media_pool.submit, return_freed_blocks)

    async def _wait(self, running: Future[T]) -> T:
        try:
            async with asyncio.timeout(self._max_s):
                return await asyncio.wrap_future(running)
        except TimeoutError:
            if not running.cancel():
                text = f"Reading the prompt took more than {self._max_s:g} s: shorten it."
                raise RequestError(text, "prompt") from None
        raise Overloaded(f"Other prompts have kept this one waiting for {self._max_s:g} s; try again later.")
