"""`Partner`: who answers `chat` and `complete`; a model loaded here (`local`) or a server (`remote`)."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

Message = dict[str, str]


class Piece(NamedTuple):
    """What is new of an answer's text, and how many tokens the answer has by now."""

    text: str
    num_tokens: int


class Partner(Protocol):
    """Answers one question at a time; closing the iterator before its end stops the answer.

    Raises OctavoError for a question without an answer, at any piece.
    """

    def chat(self, messages: list[Message]) -> Iterator[Piece]:
        """The next message of a conversation."""

    def complete(self, prompt: str) -> Iterator[Piece]:
        """What follows a text."""
