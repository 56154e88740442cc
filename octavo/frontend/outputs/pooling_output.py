"""What pooling models bring, as users see it. Public; names follow vLLM's.

Data are NumPy arrays of float32, read-only.
"""

from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import numpy as np

from octavo.base.errors import OctavoError, RequestError
from octavo.frontend.outputs.request_output import RequestOutput

Array = np.ndarray
T = TypeVar("T")


@dataclass(slots=True)
class PoolingOutput:
    """Any result. data: [size], or [tokens, size]"""

    data: Array

    @classmethod
    def of(cls, data: Array) -> Self:
        """Return the output that has these data."""
        return cls(data)


@dataclass(slots=True)
class EmbeddingOutput:
    """A text as a vector."""

    embedding: list[float]

    @classmethod
    def of(cls, data: Array) -> Self:
        """Return the output that has these data."""
        return cls(_vector(data, "embedding").tolist())

    @property
    def hidden_size(self) -> int:
        """Return the number of components."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """A text's probability, or score, of each label."""

    probs: list[float]

    @classmethod
    def of(cls, data: Array) -> Self:
        """Return the output that has these data."""
        return cls(_vector(data, "list of scores").tolist())

    @property
    def num_classes(self) -> int:
        """Return the number of labels."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts fit."""

    score: float

    @classmethod
    def of(cls, data: Array) -> Self:
        """Return the output that has these data."""
        if data.size != 1:
            raise RequestError("Scoring API is only enabled for num_labels == 1.", "model")
        return cls(float(data.reshape(-1)[0]))


@dataclass(slots=True)
class PoolingRequestOutput(Generic[T]):
    """One prompt and its result."""

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0

    @classmethod
    def of(cls, output: RequestOutput, kind: Any) -> Self:
        """Return an engine's output in the kind asked for. Raises OctavoError if it failed."""
        return cls(
            output.request_id,
            kind.of(data_of(output)),
            output.prompt_token_ids or [],
            output.finished,
            output.num_cached_tokens or 0,
        )


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """A prompt and its vector."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """A prompt and the scores of its labels."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """A pair of texts and its score."""


def data_of(output: RequestOutput) -> Array:
    """Return the result as an array. Raises OctavoError if there is none."""
    pooled = output.pooled
    if pooled is None:
        completion = output.outputs[0]
        raise OctavoError(
            completion.error or f"The request ended without a result: {completion.finish_reason}."
        )
    return np.frombuffer(pooled.data, np.float32).reshape(pooled.shape)


def _vector(data: Array, what: str) -> Array:
    if data.ndim != 1:
        raise RequestError(f"Expected a 1-D {what}; this result has {data.ndim} axes: use encode().", "task")
    return data
