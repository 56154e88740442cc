"""`Backend`: who answers `chat` and `complete`; `LocalModel`, loaded here, or a server (`remote`)."""

import itertools
from collections.abc import Generator
from typing import NamedTuple, Protocol

import octavo
from octavo.base.errors import ConfigError, RequestError

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


class LocalModel:
    """Asks an engine, one question at a time."""

    def __init__(self, llm: "octavo.LLM", params: "octavo.SamplingParams") -> None:
        """params: with cumulative outputs."""
        self._llm = llm
        self._params = params
        self._ids = itertools.count()

    def chat(self, messages: list[Message]) -> Answer:
        """The conversation goes through the model's chat template. Raises ConfigError without one."""
        if not self._llm.has_chat_template:
            raise ConfigError(
                "This model has no chat template: give one with --chat-template, or use `octavo complete`."
            )
        return self._answer(self._llm.render_chat(messages))

    def complete(self, prompt: str) -> Answer:
        """The text as it stands."""
        return self._answer(prompt)

    def _answer(self, prompt: "octavo.PromptType") -> Answer:
        engine, request_id = self._llm.llm_engine, str(next(self._ids))
        engine.add_request(request_id, prompt, self._params)
        shown = 0
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    [answer] = output.outputs
                    yield Piece(answer.text[shown:], len(answer.token_ids))
                    shown = len(answer.text)
                    if answer.error is not None:
                        raise RequestError(answer.error)
        except BaseException:  # an interrupt, or the reader has left
            engine.abort_request([request_id])
            raise
