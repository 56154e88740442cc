"""`Backend`: who answers `chat` and `complete`; a model loaded here (`local`) or a server (`remote`)."""

from collections.abc import Generator
from typing import NamedTuple, Protocol

Message = dict[str, str]


class Piece(NamedTuple):
    """What is new of an answer's text, and how many tokens the answer has by now."""

    text: str
    num_tokens: int


Answer = Generator[Piece, None, None]
"""Closed before its end, it stops."""


class Backend(Protocol):
    """Answers one question at a time.

    Raises OctavoError for a question without an answer, at any piece.
    """

    def chat(self, messages: list[Message]) -> Answer:
        """The next message of a conversation."""

    def complete(self, prompt: str) -> Answer:
        """What follows a text."""
