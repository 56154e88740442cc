"""`Servers`: those behind a router: who is ready, what is open at each, who gets the next request."""

import asyncio
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b

import aiohttp

from octavo.base.log import get_logger
from octavo.config.router import RouterConfig
from octavo.frontend.client.placement import Placement
from octavo.serving.router.prompts import Prompt

logger = get_logger(__name__)


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
        self._placement.remember(prompt.beginnings, number)
        self.all[number].num_open += 1
        self._placement.loads[number].waiting_tokens += prompt.num_tokens
        return Visit(number, prompt.num_tokens)

    def run(self, visit: "Visit") -> None:
        """The answer to a request begins."""
        if not visit.has_begun:
            visit.has_begun = True
            self._placement.loads[visit.number].waiting_tokens -= visit.num_tokens
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
            await asyncio.gather(*(self._look(server, session) for server in self.all))
            await asyncio.sleep(self._config.health_interval)

    async def _look(self, server: Server, session: aiohttp.ClientSession) -> None:
        status = 0
        timeout = aiohttp.ClientTimeout(self._config.connect_timeout)
        with suppress(aiohttp.ClientError, TimeoutError, OSError):
            for path in ("/ready", "/health"):  # other engines have the second only
                async with session.get(server.url + path, timeout=timeout) as answer:
                    status = answer.status
                if status != 404:
                    break
        if server.is_ready != (status == 200):
            logger.info("%s is %s.", server.url, "ready" if status == 200 else "not ready")
        server.is_ready = status == 200


@dataclass(slots=True)
class Visit:
    """A request at a server. num_tokens: of its prompt"""

    number: int
    num_tokens: int
    has_begun: bool = False


def _weight(url: str, session: str) -> bytes:
    """Rendezvous hashing: of a server that is gone, only its own sessions move."""
    return blake2b(f"{url}\0{session}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
