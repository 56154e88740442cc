"""`Quarantine`: refuses requests that were under way twice when the engine died, at the same place.

Asked by the link to the core. Nothing is remembered of requests until a core dies; then of each that was open
what it asked, as a digest, and how far it had come. A request that kills the engine does so at the same place
of its output each time, and never ends well; whoever asks the same and gets an answer clears it. One that is
there by chance seldom stands at the same place twice, and is let in again after a while. So a client that
repeats such a request cannot end the server, which gives up at the fifth death in a minute.
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
AT_FAULT = "The engine died of this request, again and again at the same place of its output."
NEAR = 2
"""Tokens between places that count as the same: steps in flight are not told of."""


class Quarantine:
    """What the last deaths have in common."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._suspects: dict[bytes, tuple[int, float]] = {}
        """Of late deaths: how far each had come, and when that was."""
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

    @property
    def has_suspects(self) -> bool:
        """Return True if `clear` may have something to do."""
        return bool(self._suspects)

    def clear(self, requests: Iterable[EngineRequest]) -> None:
        """Suspect nobody who asks the same as these, which ended well."""
        for request in requests:
            self._suspects.pop(_digest(request), None)

    def note_death(
        self, requests: Iterable[tuple[EngineRequest, int]], *, convicts: bool = True
    ) -> list[EngineRequest]:
        """Enter the requests that were open, and how many tokens of each had come.

        Return those that stood there at an earlier death, too. convicts: whether they are kept out
        """
        now, repeaters = self._clock(), []
        self._suspects = {d: known for d, known in self._suspects.items() if known[1] > now - KEPT_OUT_S}
        for request, num_tokens in requests:
            digest = _digest(request)
            known = self._suspects.get(digest)
            if known is not None and known[1] < now and abs(known[0] - num_tokens) <= NEAR:
                repeaters.append(request)
            self._suspects[digest] = num_tokens, now
        if convicts:
            for request in repeaters:
                self.keep_out(request)
        return repeaters

    def keep_out(self, request: EngineRequest) -> None:
        """Refuse what asks the same as this request, for a while."""
        self._until_s[_digest(request)] = self._clock() + KEPT_OUT_S
        logger.error("A request that was under way at several deaths of the engine is kept out.")


def _digest(request: EngineRequest) -> bytes:
    """Equal for requests that ask the same, whoever and whenever."""
    asked = (
        request.prompt_token_ids,
        request.spec.task,
        request.spec.cache_identity(),
        request.spec.cache_change(),
    )
    return sha256(msgspec.msgpack.encode(asked)).digest()
