"""`RequestMatcher`: one request's way through its grammar, a stretch of reasoning before it included.

Made by `matchers`; the scheduler feeds it each token. What the library cannot do ends its own request.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Self

from octavo.base.errors import RequestError
from octavo.base.log import get_logger
from octavo.engine.structured.interface import Backend, Matcher
from octavo.engine.structured.reasoning import Prelude

_log = get_logger(__name__)
FAILURE = "The grammar failed; the engine's log says why."


@dataclass(slots=True, eq=False)
class RequestMatcher:
    """A matcher, and what its request asks for besides."""

    compiled: Matcher
    backend: Backend[Any]
    hidden_ids: Sequence[int] = field(default=())
    """Ends of text that this request ignores."""
    end_ids: Sequence[int] = field(default=())
    """All ends of text."""
    prelude: Prelude | None = None
    """None as soon as the grammar holds."""
    slow_s: float = 0.0
    """What its masks took that took long."""
    failure: str = ""
    """Why nobody can say what may come next."""
    answer: bool | Exception | None = None
    """To the next `feed`, where its token was fed together with those of others."""

    def copy(self) -> Self:
        """Return another at the same place."""
        return replace(self, compiled=self.compiled.copy(), prelude=deepcopy(self.prelude))

    def follow(self, token_ids: Sequence[int]) -> "list[RequestMatcher]":
        """Return matchers behind 1, 2, … of these tokens, up to one that may not come or that ends it."""
        reached: list[RequestMatcher] = []
        for token_id in token_ids:
            ahead = (reached[-1] if reached else self).copy()
            try:
                if ahead.feed(token_id):
                    break
            except RequestError:
                break
            reached.append(ahead)
        return reached

    def forced(self) -> list[int]:
        """Return tokens that are expected because nothing else may come."""
        return [] if self.prelude or self.failure else self.backend.forced(self.compiled)

    @property
    def is_fed_alone(self) -> bool:
        """Return True if its next token is not to be fed together with those of others."""
        return self.prelude is not None or bool(self.failure)

    def feed(self, token_id: int) -> bool:
        """Take the request's next token; return True if nothing may follow it. Raises RequestError."""
        if (prelude := self.prelude) is not None:
            is_before = prelude.take(token_id)
            self.prelude = None if prelude.is_over else prelude
            if is_before:
                return False
        if self.failure:
            raise RequestError(self.failure, "structured_outputs")
        answer, self.answer = self.answer, None
        try:
            if isinstance(answer, Exception):
                raise answer
            return self.compiled.advance(token_id) if answer is None else answer
        except RequestError:
            raise
        except Exception as error:  # of the library: it must not reach the loop
            _log.exception("A grammar failed on its way.")
            raise RequestError(FAILURE, "structured_outputs") from error
