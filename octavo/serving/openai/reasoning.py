"""`ReasoningCount`: how many tokens of an answer are reasoning, its marks included, for `usage`.

Used by `Turn`. Tokens count to the text that they complete: exactly in a stream of single tokens, and up to a
token where one output brings the end of the reasoning and what follows it.
"""

from collections.abc import Iterable, Sequence

from octavo.frontend.outputs.request_output import CompletionOutput
from octavo.frontend.parsers.events import Event, Reasoning
from octavo.frontend.text.tokenizer import Tokenizer


class ReasoningCount:
    """For all choices of one request."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._num_unread: dict[int, int] = {}
        """Tokens by choice, of which no event has told yet."""

    def count(self, number: int, completion: CompletionOutput, events: Sequence[Event]) -> int:
        """Tokens of reasoning that a new output of choice `number` brings, read as `events`."""
        num_new = len(completion.token_ids)
        num_unread = self._num_unread.get(number, 0)
        self._num_unread[number] = 0 if events else num_unread + num_new
        thoughts = [event.text for event in events if isinstance(event, Reasoning)]
        if not thoughts:
            return 0
        if isinstance(events[-1], Reasoning):
            return num_unread + num_new
        return num_unread + self._num_through(completion, thoughts)

    def _num_through(self, completion: CompletionOutput, thoughts: Iterable[str]) -> int:
        """Tokens up to the end of the last thought."""
        end = 0
        for thought in thoughts:
            if (start := completion.text.find(thought, end)) >= 0:
                end = start + len(thought)
        num_bytes, num_tokens = len(completion.text[:end].encode(errors="replace")), 0
        for token_id in completion.token_ids:
            if num_bytes <= 0:
                break
            num_bytes -= self._num_bytes(token_id, completion.text)
            num_tokens += 1
        return num_tokens

    def _num_bytes(self, token_id: int, text: str) -> int:
        """Of a token in the text, where special ones may not be shown."""
        if self._tokenizer is None:
            return 1
        if token_id in self._tokenizer.special_ids and self._tokenizer.token_text(token_id) not in text:
            return 0
        return len(self._tokenizer.token_bytes(token_id))
