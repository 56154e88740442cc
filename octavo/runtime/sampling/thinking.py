"""`ThinkingBudget`: after `thinking_token_budget` tokens of reasoning its end is forced; the answer follows.

The last of the sampler's processors: nothing stands above it. Where a request is follows from its tokens
alone: whether the last tag was the one that opens, and how many output tokens came since. So it does not
matter how often it is preempted, or with whom it runs.
"""

import numpy as np
import torch

from octavo.messages.sampling import MAX_TAG_TOKENS, SamplingParams
from octavo.messages.step import NewRequest
from octavo.runtime.sampling.processors import Processor
from octavo.runtime.sampling.rows import Batch
from octavo.runtime.transfer import Array, to_device

_FORCED = 1e9
"""A logit beside which all others are nothing, and finite."""
_ANY, _NONE, _NEVER = -1, -2, -3
"""In the place of token ids: matches all; stands before the output; matches none."""


class ThinkingBudget(Processor):
    """What is left of the budgets."""

    def __init__(self, vocab_size: int, num_rows: int, device: torch.device) -> None:
        super().__init__(vocab_size, num_rows, device)
        self._budgets = np.zeros(num_rows, dtype=np.int64)
        self._tags = torch.zeros(2, num_rows, MAX_TAG_TOKENS, dtype=torch.int64, device=device)
        """Opening and closing, at the end of their rows; before them what matches every token."""
        self._recent = torch.zeros(num_rows, MAX_TAG_TOKENS, dtype=torch.int64, device=device)
        """The last output tokens."""
        self._starts = torch.zeros(num_rows, dtype=torch.int64, device=device)
        """Column at which the closing tag begins."""
        self._left = torch.zeros(num_rows, dtype=torch.int64, device=device)
        """Of the budget; below 0 while the tag is being forced."""
        self._is_open = torch.zeros(num_rows, dtype=torch.bool, device=device)

    def is_active(self, params: SamplingParams) -> bool:
        return params.thinking_token_budget is not None

    def add(self, row: int, request: NewRequest) -> None:
        budget, tags = request.sampling.thinking_token_budget, request.sampling.thinking_tag_ids
        assert budget is not None
        assert tags is not None, "the front fills them in"
        prompt = np.array(request.prompt_ids, dtype=np.int64)
        outputs = np.array(request.token_ids[request.num_prompt_tokens :], dtype=np.int64)
        is_open = not tags[0] or _num_inside(prompt, tags, is_open=False) >= 0
        spent = _num_inside(outputs, tags, is_open=is_open)
        self._budgets[row] = budget
        self._is_open[row] = spent >= 0
        self._left[row] = budget - max(spent, 0)
        self._starts[row] = MAX_TAG_TOKENS - len(tags[1])
        # A missing tag is one that never comes: its last token is none.
        ends = [_at_end(np.array(tag or [_NEVER], dtype=np.int64), _ANY) for tag in tags]
        self._tags[:, row] = to_device(np.stack(ends), self.device)
        self._recent[row] = to_device(_at_end(outputs[-MAX_TAG_TOKENS:], _NONE), self.device)

    def remove(self, row: int) -> None:
        """Keep all of it: the next owner overwrites it."""

    def apply(self, logits: torch.Tensor, batch: Batch) -> None:
        """Force the next token of the closing tag, where a budget is spent and the tag not yet complete."""
        late = batch.where(batch.positions >= self._budgets[batch.rows])
        if not len(late):
            return
        logit_rows, rows = to_device(late.logit_rows, self.device), to_device(late.rows, self.device)
        left = self._left[rows]
        columns = (self._starts[rows] - left).clamp(0, MAX_TAG_TOKENS - 1)
        ids = self._tags[1, rows, columns].clamp(min=0)
        is_forced = self._is_open[rows] & (left <= 0)
        logits[logit_rows, ids] = torch.where(is_forced, _FORCED, logits[logit_rows, ids])

    def observe(self, batch: Batch, token_ids: torch.Tensor) -> None:
        rows = to_device(batch.rows, self.device)
        recent = torch.cat([self._recent[rows, 1:], token_ids[:, None]], dim=1)
        tags = self._tags[:, rows]
        is_opening, is_closing = ((tags == recent) | (tags == _ANY)).all(dim=2)
        was_open = self._is_open[rows]
        budgets = to_device(self._budgets[batch.rows], self.device)
        self._recent[rows] = recent
        self._left[rows] = torch.where(was_open, self._left[rows] - 1, budgets)
        self._is_open[rows] = torch.where(was_open, ~is_closing, is_opening)


def _num_inside(ids: Array, tags: list[list[int]], *, is_open: bool) -> int:
    """Return how many tokens at the end of `ids` stand after an opening tag that none closes; -1 = none.

    is_open: such a tag came before
    """
    opening, closing = (_ends(ids, tag) for tag in tags)
    last_closing = int(closing[-1]) if closing.size else -1
    if is_open and last_closing < 0:
        return len(ids)
    begins = opening[opening > last_closing]
    return len(ids) - 1 - int(begins[0]) if begins.size else -1


def _ends(ids: Array, tag: list[int]) -> Array:
    """Return the places of `ids` at which `tag` ends, ascending."""
    if not 0 < len(tag) <= len(ids):
        return np.empty(0, dtype=np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(tag))
    return np.flatnonzero((windows == tag).all(axis=1)) + len(tag) - 1


def _at_end(ids: Array, filler: int) -> Array:
    """Return a row of MAX_TAG_TOKENS that ends with `ids`."""
    return np.pad(ids, (MAX_TAG_TOKENS - len(ids), 0), constant_values=filler)
