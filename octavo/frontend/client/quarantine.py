"""`Quarantine`: refuses requests that were under way twice when the engine died, at the same place.

Asked by the link to the core. Nothing is remembered of requests until a core dies; then of each that was open
what it asked, as a digest, and how far it had come. A request that kills the engine does so at the same place
of its output each time; one that is there by chance seldom stands at the same place twice, unless both times
it waited, and is let in again after a while. So a client that repeats such a request cannot end the server,
which gives up at the fifth death in a minute.
"""

import time
from collections.abc import Callable, Iterable
from hashlib import sha256

import msgspec

from octavo.base.errors import RequestError
from octavo.base.log import get_logger
from octavo.messages.request import EngineRequest

logger = get_logger(__name__)
KEPT_OUT_S = 600.0
_NEAR = 2
"""Tokens between places that count as the same: steps in flight are not told of."""


class Quarantine:
    """What the last deaths have in common."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._suspects: dict[bytes, int] = {}
        """Of the death before: how far each had come."""
        self._until_s: dict[bytes, float] = {}

    def check(self, requests: Iterable[EngineRequest]) -> None:
        """Raise RequestError for a request that is kept out."""
        if not self._until_s:
            return
        now = self._clock()
        self._until_s = {digest: until_s for digest, until_s in self._until_s.items() if until_s > now}
        for request in requests:
            until_s = self._until_s.get(_digest(request))
            if until_s is not None:
                raise RequestError(
                    "This request was under way twice when the engine died, at the same place of its output: "
                    f"it is refused for {until_s - now:.0f} s more. The server's log says why the engine "
                    "died; please report it with the request."
                )

    def note_death(self, requests: Iterable[tuple[EngineRequest, int]]) -> None:
        """Enter the requests that were open, and how many tokens of each had come."""
        suspects = {_digest(request): num_tokens for request, num_tokens in requests}
        for digest, num_tokens in suspects.items():
            if abs(self._suspects.get(digest, -_NEAR - 1) - num_tokens) <= _NEAR:
                self._until_s[digest] = self._clock() + KEPT_OUT_S
                logger.error("A request that was under way at two deaths of the engine is kept out.")
        self._suspects |= suspects


def _digest(request: EngineRequest) -> bytes:
    """Equal for requests that ask the same, whoever and whenever."""
    asked = request.prompt_token_ids, request.spec.sampling, request.spec.cache_identity()
    return sha256(msgspec.msgpack.encode(asked)).digest()
