"""`Preparation`: the few threads that read prompts (templates, tokenizing), off the event loop and bounded.

Used by the asynchronous engine. A job that takes too long costs its own request an error; its thread is lost
until the job ends. When all are busy for long, requests are refused: never is there one thread more.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from octavo.base.errors import Overloaded, RequestError

T = TypeVar("T")
MAX_PREPARE_S = 30.0
"""From the arrival of a job to its result."""
_NUM_THREADS = 4


class Preparation:
    """Runs jobs in order of arrival."""

    def __init__(self, max_s: float = MAX_PREPARE_S, num_threads: int = _NUM_THREADS) -> None:
        self._max_s = max_s
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="prepare")

    async def run(self, job: Callable[[], T]) -> T:
        """The job's result. Raises RequestError if it takes too long, Overloaded if it could not begin."""
        running = self._pool.submit(job)
        try:
            async with asyncio.timeout(self._max_s):
                return await asyncio.wrap_future(running)
        except TimeoutError:
            if not running.cancel():
                text = f"Reading the prompt took more than {self._max_s:g} s: shorten it."
                raise RequestError(text, "prompt") from None
        raise Overloaded(f"Other prompts have kept this one waiting for {self._max_s:g} s; try again later.")
