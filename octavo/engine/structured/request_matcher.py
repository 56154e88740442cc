"""`RequestMatcher`: one request's way through its grammar, a stretch of reasoning before it included.

Made by `matchers`; the scheduler feeds it each token. What the library cannot do ends its own request.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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

    def feed(self, token_id: int) -> bool:
        """Take the request's next token; return True if nothing may follow it. Raises RequestError."""
        if (prelude := self.prelude) is not None:
            is_before = prelude.take(token_id)
            self.prelude = None if prelude.is_over else prelude
            if is_before:
                return False
        if self.failure:
            raise RequestError(self.failure, "structured_outputs")
        try:
            return self.compiled.advance(token_id)
        except RequestError:
            raise
        except Exception as error:  # of the library: it must not reach the loop
            _log.exception("A grammar failed on its way.")
            raise RequestError(FAILURE, "structured_outputs") from error
