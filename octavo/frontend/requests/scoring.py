"""How well texts fit each other: pairs for cross-encoders, and what the vectors of two texts say.

Used by `LLM` and by the server. Texts of errors are vLLM's.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from octavo.base.errors import RequestError, wrong
from octavo.config.engine import EngineConfig
from octavo.config.pair_templates import PAIR_TEMPLATES
from octavo.frontend.requests.prompts import PromptType, TextPrompt
from octavo.messages.pooling import PoolingParams


def pair_up(first: Any, second: Any) -> list[tuple[str, str]]:
    """Return pairs of texts: 1:1, 1:N or N:N. Raises RequestError."""
    one, other = _texts(first, "data_1"), _texts(second, "data_2")
    if not one:
        raise RequestError("At least one text element must be given", "data_1")
    if not other:
        raise RequestError("At least one text_pair element must be given", "data_2")
    if len(one) > 1 and len(one) != len(other):
        raise RequestError("Input lengths must be either 1:1, 1:N or N:N", "data_1")
    return list(zip(one * len(other) if len(one) == 1 else one, other, strict=True))


def _texts(given: Any, name: str) -> list[str]:
    listed = [given] if isinstance(given, str) else given
    if not isinstance(listed, Sequence) or not all(isinstance(text, str) for text in listed):
        raise wrong(name, "must be a text or a list of texts")
    return list(listed)


class Scoring:
    """One way to score pairs: the model's task says which."""

    def __init__(
        self,
        config: EngineConfig,
        pairs: list[tuple[str, str]],
        use_activation: bool | None = None,
        instruction: str | None = None,
    ) -> None:
        """instruction: what the model is asked, if it is one that reads such

        Raises RequestError if the model cannot score.
        """
        pooling = config.pooling
        if pooling is None or pooling.tasks[0] == "token_classify":
            raise RequestError("This model does not support the Scoring API.", "model")
        self._pairs, self._is_cross = pairs, not pooling.is_embedder
        if self._is_cross and pooling.num_labels != 1:
            raise RequestError("Scoring API is only enabled for num_labels == 1.", "model")
        self._pooling, self._instruction = pooling, instruction
        self._template = PAIR_TEMPLATES.get(pooling.pair_template)
        if instruction is not None and self._template is None:
            raise RequestError("This model reads no instruction.", "instruction")
        self.params = PoolingParams(task=pooling.tasks[0], use_activation=use_activation)
        if not self._is_cross:
            self.params.use_activation = not pooling.sparse
        sides = [(text, side) for pair in pairs for side, text in zip(self._names(), pair, strict=True)]
        self._places = {text: i for i, text in enumerate(dict.fromkeys(sides))}

    def _names(self) -> tuple[str, str]:
        """Return the names of the prompts that stand before the texts of a pair, for late interaction."""
        is_late = self._pooling.tasks[0] == "token_embed"
        return ("query", "document") if is_late else ("", "")

    @property
    def prompts(self) -> list[PromptType]:
        """Return what the model is to read: pairs, or every text once."""
        if self._template is not None:
            around, fill = (self._template.before, self._template.after), self._template.fill
            return [
                TextPrompt(prompt=fill(first, second, self._instruction), around=around)
                for first, second in self._pairs
            ]
        if self._is_cross:
            return [TextPrompt(prompt=first, pair=second) for first, second in self._pairs]
        told = self._pooling.prompts
        return [
            TextPrompt(prompt=text, instruction=told[side]) if told.get(side) else text
            for text, side in self._places
        ]

    def outputs_of(self, index: int) -> list[int]:
        """Return which prompts' results the score of pair `index` is made of."""
        if self._is_cross:
            return [index]
        return [
            self._places[text, side] for side, text in zip(self._names(), self._pairs[index], strict=True)
        ]

    def score(self, index: int, data: Sequence[np.ndarray], ids: Sequence[Sequence[int]]) -> float:
        """Return the score of pair `index`. data, ids: the results and the tokens of all prompts"""
        places = self.outputs_of(index)
        vectors = [data[place] for place in places]
        if self._is_cross:
            return float(vectors[0].reshape(-1)[0])
        first, second = vectors
        if first.ndim == 1:
            return float(first @ second)
        if self._pooling.skipped_tokens:
            second = second[~np.isin(ids[places[1]], self._pooling.skipped_tokens)]
        return float((first @ second.T).max(axis=1, initial=-np.inf).sum())  # late interaction: MaxSim
