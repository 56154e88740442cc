"""`Prelude`: what an output may say before its grammar holds: a stretch of reasoning, if it begins with one.

Owned by a `RequestMatcher`, which forgets it as soon as the grammar holds. Idea: vLLM, whose grammars wait
for the end of reasoning; here an output that begins with something else is under its grammar at once.
"""

from collections import deque

from octavo.messages.structured import ReasoningMarks


class Prelude:
    """How far one output has come in it."""

    def __init__(self, marks: ReasoningMarks) -> None:
        self._opening = marks.opening_ids
        self._num_opened = 0
        """Tokens of the opening so far."""
        self._closing = deque(marks.closing_ids)
        self._recent: deque[int] = deque(maxlen=len(marks.closing_ids))
        self.is_over = False
        """The next token is the grammar's."""

    @property
    def may_be_skipped(self) -> bool:
        """Return True if the grammar's first token may come as well: nothing is open yet."""
        return bool(self._opening) and not self._num_opened

    @property
    def next_id(self) -> int | None:
        """Return the token of the opening that comes next; None: any but an end of text."""
        return self._opening[self._num_opened] if self._num_opened < len(self._opening) else None

    def take(self, token_id: int) -> bool:
        """Take the output's next token; return False if it is the grammar's."""
        if (expected := self.next_id) is None:
            self._recent.append(token_id)
            self.is_over = self._recent == self._closing
        elif token_id != expected:
            self.is_over = True
            return False
        else:
            self._num_opened += 1
        return True
