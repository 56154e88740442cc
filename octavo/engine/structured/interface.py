"""A grammar back end: one object per vocabulary that compiles grammars and says which tokens may come.

Implemented in a file beside this one, named in the registry of the package. Called by `matchers`
and by the checker. A back end knows nothing of requests, steps or processes. What it refuses, and what goes
beyond its limits of work and memory, is a RequestError: the same grammar must give the same verdict wherever
it is compiled.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Self, TypeVar

import numpy as np

from octavo.messages.structured import StructuredOutputsParams, Vocabulary


class Matcher(ABC):
    """How far one output has come in its grammar."""

    @abstractmethod
    def copy(self) -> Self:
        """Another at the same place; cheap."""

    @abstractmethod
    def advance(self, token_id: int) -> bool:
        """Take the next token; return True if nothing may follow. Raises RequestError for a wrong one."""

    @property
    def num_instances(self) -> int:
        """Return how many times its grammar is held in memory."""
        return 1


M = TypeVar("M", bound=Matcher)


class Backend(ABC, Generic[M]):
    """A compiler for one vocabulary."""

    @abstractmethod
    def __init__(self, vocabulary: Vocabulary) -> None:
        """May take a second for a large vocabulary."""

    @staticmethod
    @abstractmethod
    def translate(params: StructuredOutputsParams) -> str:
        """Return the constraint as a text that `compile` takes; for the checker: it may take any time."""

    @abstractmethod
    def compile(self, grammar: str) -> M:
        """Return a matcher at the beginning. Thread-safe."""

    @abstractmethod
    def masks(self, matchers: Sequence[M]) -> list[np.ndarray]:
        """Return the bits of the tokens that may come next: [words] int32, bit i of word w = token 32 w + i.

        They are not to be changed, and equal ones should be one object. That of a matcher that fails is
        arbitrary, and its next `advance` raises.
        """

    def advance(self, matchers: Sequence[M], token_ids: Sequence[int]) -> list[bool | Exception]:
        """Have each matcher take its next token; return what its `advance` would return, or raise."""
        answers: list[bool | Exception] = []
        for matcher, token_id in zip(matchers, token_ids, strict=True):
            try:
                answers.append(matcher.advance(token_id))
            except Exception as error:
                answers.append(error)
        return answers

    def forced(self, matcher: M) -> list[int]:
        """Return tokens that spell what must follow, as far as that is determined."""
        return []
