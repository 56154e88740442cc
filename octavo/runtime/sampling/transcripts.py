"""`Transcripts` lets Whisper's times come in pairs and never go back (https://arxiv.org/abs/2212.04356)."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.messages.sampling import SamplingParams
from octavo.messages.speech import TranscriptRules
from octavo.messages.step import NewRequest
from octavo.runtime.sampling.processors import NEVER, Processor
from octavo.runtime.sampling.rows import Batch
from octavo.runtime.transfer import to_device


class _Masks(NamedTuple):
    """By token: never chosen; not chosen as the first. [vocab_size] bool"""

    always: Tensor
    first: Tensor


class Transcripts(Processor):
    """Keeps of each row whether its last two tokens are times, and the latest time."""

    def __init__(self, vocab_size: int, num_rows: int, device: torch.device) -> None:
        super().__init__(vocab_size, num_rows, device)
        self._rules: dict[int, TranscriptRules] = {}
        self._masks: dict[TranscriptRules, _Masks] = {}
        self._ids = torch.arange(vocab_size, device=device)
        self._last = torch.full((num_rows,), -1, device=device)
        self._before = torch.full((num_rows,), vocab_size, device=device)
        self._latest = torch.full((num_rows,), -1, device=device)

    def is_active(self, params: SamplingParams) -> bool:
        return params.transcript_rules is not None

    def add(self, row: int, request: NewRequest) -> None:
        rules = request.sampling.transcript_rules
        assert rules is not None
        self._rules[row] = rules
        if rules not in self._masks:
            self._masks[rules] = self._make_masks(rules)
        chosen = request.token_ids[request.num_prompt_tokens :]
        times = [token for token in chosen if token >= rules.first_timestamp >= 0]
        self._last[row] = chosen[-1] if chosen else -1
        self._before[row] = chosen[-2] if len(chosen) > 1 else self.vocab_size
        self._latest[row] = times[-1] if times else -1

    def remove(self, row: int) -> None:
        self._rules.pop(row, None)

    def apply(self, logits: Tensor, batch: Batch) -> None:
        for rules, part in self._by_rules(batch):
            masks = self._masks[rules]
            at = to_device(part.logit_rows, self.device)
            is_first = to_device(part.positions == 0, self.device)[:, None]
            scores = logits[at].masked_fill(masks.always | (masks.first & is_first), NEVER)
            if rules.has_times:
                scores = self._timed(scores, rules, to_device(part.rows, self.device))
            logits[at] = scores

    def observe(self, batch: Batch, token_ids: Tensor) -> None:
        rows = to_device(batch.rows, self.device)
        first = [self._rules[row].first_timestamp for row in batch.rows.tolist()]
        starts = to_device(np.array([x if x >= 0 else self.vocab_size for x in first]), self.device)
        last = self._last[rows]
        self._before[rows] = torch.where(last < 0, self.vocab_size, last)
        self._last[rows] = token_ids
        self._latest[rows] = torch.where(token_ids >= starts, token_ids, self._latest[rows])

    def _timed(self, scores: Tensor, rules: TranscriptRules, rows: Tensor) -> Tensor:
        """Apply the rules of times to scores [rows, vocab_size]."""
        start, ids = rules.first_timestamp, self._ids
        last, before = self._last[rows, None], self._before[rows, None]
        latest = self._latest[rows, None]
        is_time, was_time, is_after = ids >= start, last >= start, before >= start
        opens = was_time & ~is_after
        least = torch.where(latest < 0, start, torch.where(opens, latest, latest + 1))
        forbidden = (was_time & is_after & is_time) | (opens & (ids < rules.end_id))
        forbidden |= is_time & (ids < least)
        is_first = last < 0
        forbidden |= is_first & (ids < start)
        if rules.max_initial is not None:
            forbidden |= is_first & (ids > start + rules.max_initial)
        scores = scores.masked_fill(forbidden, NEVER)
        logprobs = scores.log_softmax(-1)
        is_likely = logprobs[:, start:].logsumexp(-1) > logprobs[:, :start].max(-1).values
        return scores.masked_fill(is_likely[:, None] & ~is_time, NEVER)

    def _by_rules(self, batch: Batch) -> list[tuple[TranscriptRules, Batch]]:
        """Split the rows by their rules, which mostly are the same."""
        rules = [self._rules[row] for row in batch.rows.tolist()]
        return [(one, batch.where(np.array([r == one for r in rules]))) for one in dict.fromkeys(rules)]

    def _make_masks(self, rules: TranscriptRules) -> _Masks:
        always, first = (torch.zeros(self.vocab_size, dtype=torch.bool, device=self.device) for _ in "ab")
        times = rules.first_timestamp if rules.first_timestamp > 0 else self.vocab_size + 1
        always[times - 1 : times if rules.has_times else None] = True  # and what says that there are none
        for mask, ids in ((always, rules.suppressed), (first, rules.suppressed_first)):
            kept = np.array([i for i in ids if 0 <= i < self.vocab_size], np.int64)
            mask[to_device(kept, self.device)] = True
        return _Masks(always, first)
