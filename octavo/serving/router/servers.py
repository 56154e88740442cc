"""`Servers`: those behind a router: who is ready, what is open at each, who gets the next request."""

import asyncio
import re
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b

import aiohttp

from octavo.base.log import get_logger
from octavo.config.router import RouterConfig
from octavo.frontend.client.placement import Load, Placement
from octavo.serving.router.prompts import Prompt

logger = get_logger(__name__)
_CACHE_INFO = "vllm:cache_config_info{"
"""A metric of vLLM's and octavo's servers, a line per engine."""
_LABEL = re.compile(r'(num_gpu_blocks|block_size)="(\d+)"')


@dataclass(slots=True)
class Server:
    """One server. num_answers: by status"""

    url: str
    is_ready: bool = False
    is_draining: bool = False
    num_open: int = 0
    num_retried: int = 0
    num_answers: Counter[int] = field(default_factory=Counter)


class Servers:
    """All servers of one router, used from one event loop."""

    def __init__(self, urls: list[str], config: RouterConfig) -> None:
        self.all = [Server(url) for url in urls]
        self._config = config
        self._placement = Placement(len(urls))
        self._turn = 0

    def choose(self, prompt: Prompt, barred: Collection[int]) -> int | None:
        """Return the server for a request; None if there is none. barred: those that were tried already"""
        usable = [n for n, server in enumerate(self.all) if self.takes(n) and n not in barred]
        if not usable:
            return None
        match self._config.policy:
            case "round_robin":
                self._turn += 1
                return min(usable, key=lambda n: (n - self._turn) % len(self.all))
            case "session" if prompt.session:
                return max(usable, key=lambda n: _weight(self.all[n].url, prompt.session))
        beginnings = prompt.beginnings if self._config.policy == "prefix" else ()
        shut = {n for n in range(len(self.all)) if n not in usable}
        return self._placement.choose(prompt.num_tokens, beginnings, shut)

    def takes(self, number: int) -> bool:
        """Return True if a server may get requests."""
        return self.all[number].is_ready and not self.all[number].is_draining

    def begin(self, number: int, prompt: Prompt) -> "Visit":
        """Count a request at a server; `run` and `end` follow."""
        self.all[number].num_open += 1
        num_waiting = self._placement.remember(prompt.num_tokens, prompt.beginnings, number)
        self._placement.loads[number].waiting_tokens += num_waiting
        return Visit(number, num_waiting)

    def run(self, visit: "Visit") -> None:
        """The answer to a request begins."""
        if not visit.has_begun:
            visit.has_begun = True
            self._placement.loads[visit.number].waiting_tokens -= visit.num_waiting
            self._placement.loads[visit.number].num_running += 1

    def end(self, visit: "Visit") -> None:
        """A request has ended."""
        self.run(visit)
        self._placement.loads[visit.number].num_running -= 1
        self.all[visit.number].num_open -= 1

    def note_failure(self, number: int, error: Exception) -> None:
        """A server did not answer: it gets nothing until it is ready again."""
        server = self.all[number]
        if server.is_ready:
            logger.warning("%s does not answer: %s", server.url, error or type(error).__name__)
        server.is_ready = False

    async def watch(self, session: aiohttp.ClientSession) -> None:
        """Task: look again and again who is ready."""
        while True:
            await asyncio.gather(*(self._look(number, session) for number in range(len(self.all))))
            await asyncio.sleep(self._config.health_interval)

    async def _look(self, number: int, session: aiohttp.ClientSession) -> None:
        server, status = self.all[number], 0
        timeout = aiohttp.ClientTimeout(self._config.connect_timeout)
        with suppress(aiohttp.ClientError, TimeoutError, OSError):
            for path in ("/ready", "/health"):  # other engines have the second only
                async with session.get(server.url + path, timeout=timeout) as answer:
                    status = answer.status
                if status != 404:
                    break
            if status == 200 and not server.is_ready and self._config.policy == "prefix":
                async with session.get(server.url + "/metrics", timeout=timeout) as answer:
                    self._note_cache(number, await answer.text())
        if server.is_ready != (status == 200):
            logger.info("%s is %s.", server.url, "ready" if status == 200 else "not ready")
        server.is_ready = status == 200

    def _note_cache(self, number: int, metrics: str) -> None:
        """A server is there, maybe a new one: learn how many tokens its caches hold, if it says so."""
        found = [dict(_LABEL.findall(line)) for line in metrics.splitlines() if line.startswith(_CACHE_INFO)]
        sizes = (int(cache.get("num_gpu_blocks", 0)) * int(cache.get("block_size", 0)) for cache in found)
        self._placement.loads[number].cache_tokens = sum(sizes) or Load().cache_tokens
        self._placement.forget_beginnings(number)


@dataclass(slots=True)
class Visit:
    """A request at a server. num_waiting: what it counts until it runs"""

    number: int
    num_waiting: int
    has_begun: bool = False


def _weight(url: str, session: str) -> bytes:
    """Rendezvous hashing: of a server that is gone, only its own sessions move."""
    return blake2b(f"{url}\0{session}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
