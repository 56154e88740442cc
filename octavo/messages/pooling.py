"""`PoolingParams`: what a user asks of a request to a pooling model; `Pooled`: what that brings.

Names follow vLLM's class. What depends on the model (its task, its dimensions) is checked by the front.
"""

from typing import Literal, get_args

import msgspec

from octavo.base.errors import RequestError, wrong
from octavo.messages import sampling_values as read

PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]
TASKS: tuple[PoolingTask, ...] = get_args(PoolingTask)
_REMOVED = {
    "score": "The task 'score' was removed; use 'classify' instead.",
    "encode": "The task 'encode' was removed; use 'token_embed' or 'token_classify' instead.",
}

LATE_MODES = ("cache_query", "score_doc")


class LateInteractionParams(msgspec.Struct, omit_defaults=True, array_like=True):
    """A query whose vectors are kept, or a document that is scored against them, by MaxSim.

    query_key: the query's name; query_uses: how many documents there will be, None = 1
    Raises RequestError for a wrong value.
    """

    mode: str
    query_key: str
    query_uses: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in LATE_MODES:
            raise wrong("mode", f"must be one of {', '.join(LATE_MODES)}, got {self.mode!r}")
        if not isinstance(self.query_key, str) or not self.query_key:
            raise wrong("query_key", f"must be a string that is not empty, got {self.query_key!r}")
        if self.query_uses is not None:
            read.integer(self.query_uses, "query_uses", 1, "at least 1")


class PoolingParams(msgspec.Struct, omit_defaults=True, tag="pool"):
    """How the vectors of one request are made of hidden states. Raises RequestError for a wrong value."""

    use_activation: bool | None = None
    """Whether vectors are normalised, scores become probabilities; None = as the model was trained."""
    dimensions: int | None = None
    """Keep so many components of an embedding; it is normalised after that."""
    step_tag_id: int | None = None
    """With token_classify: results of the positions that have this token only (process reward models)."""
    task: PoolingTask | None = None
    """None = the method's, or the model's own."""
    skip_reading_prefix_cache: bool | None = None
    late_interaction_params: LateInteractionParams | None = None
    """With token_embed: the result is a document's score, or 0 of a query, which is kept."""

    def __post_init__(self) -> None:
        if self.task in _REMOVED:
            raise RequestError(_REMOVED[self.task], "task")
        if not isinstance(self.late_interaction_params, LateInteractionParams | None):
            raise wrong("late_interaction_params", "must be LateInteractionParams or None")
        if self.task is not None and self.task not in TASKS:
            raise wrong("task", f"must be one of {', '.join(TASKS)}, got {self.task!r}")
        for name, least in (("dimensions", 1), ("step_tag_id", 0)):
            if getattr(self, name) is not None:
                read.integer(getattr(self, name), name, least, f"at least {least}")
        for name in ("use_activation", "skip_reading_prefix_cache"):
            if getattr(self, name) not in (None, True, False):
                raise wrong(name, f"must be True, False or None, got {getattr(self, name)!r}")

    @property
    def is_per_token(self) -> bool:
        """Whether each token has a result, not the whole prompt one."""
        return self.task in ("token_embed", "token_classify")

    def clone(self) -> "PoolingParams":
        """Return a copy."""
        return msgspec.structs.replace(self)


class Pooled(msgspec.Struct, array_like=True, gc=False):
    """A vector, one per token, or one for each of some texts.

    data: float32, row by row; shape: [size], [tokens, size], [texts, size]
    """

    data: bytes
    shape: list[int]
    errors: dict[int, str] = {}
    """Of texts that have none, by their place, where numbers stand that mean nothing."""

    def __add__(self, later: "Pooled") -> "Pooled":
        """Return the results of these texts and of the next ones."""
        count, *shape = self.shape
        errors = self.errors | {count + place: error for place, error in later.errors.items()}
        return Pooled(self.data + later.data, [count + later.shape[0], *shape], errors)

    def of_text(self, place: int) -> "Pooled | None":
        """Return the result of one text; None if there is an error."""
        if place in self.errors:
            return None
        size = len(self.data) // self.shape[0]
        return Pooled(self.data[place * size : (place + 1) * size], self.shape[1:])
