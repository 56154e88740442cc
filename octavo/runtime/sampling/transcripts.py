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


class _Lists(NamedTuple):
    """Tokens never chosen; not chosen as the first. [n] int64"""

    always: Tensor
    first: Tensor


class Transcripts(Processor):
    """Keeps of each row whether its last two tokens are times, and the latest time."""

    def __init__(self, vocab_size: int, num_rows: int, device: torch.device) -> None:
        super().__init__(vocab_size, num_rows, device)
        self._rules: dict[int, TranscriptRules] = {}
        self._lists: dict[TranscriptRules, _Lists] = {}
        self._last = torch.full((num_rows,), -1, device=device)
        self._before = torch.full((num_rows,), vocab_size, device=device)
        self._latest = torch.full((num_rows,), -1, device=device)

    def is_active(self, params: SamplingParams) -> bool:
        return params.transcript_rules is not None

    def add(self, row: int, request: NewRequest) -> None:
        rules = request.sampling.transcript_rules
        assert rules is not None
        self._rules[row] = rules
        if rules not in self._lists:
            self._lists[rules] = _Lists(*map(self._kept, (rules.suppressed, rules.suppressed_first)))
        chosen = request.token_ids[request.num_prompt_tokens :]
        times = [token for token in chosen if token >= rules.first_timestamp >= 0]
        self._last[row] = chosen[-1] if chosen else -1
        self._before[row] = chosen[-2] if len(chosen) > 1 else self.vocab_size
        self._latest[row] = times[-1] if times else -1

    def remove(self, row: int) -> None:
        self._rules.pop(row, None)

    def apply(self, logits: Tensor, batch: Batch) -> None:
        for rules, part in self._by_rules(batch):
            lists, start = self._lists[rules], rules.first_timestamp
            at = to_device(part.logit_rows, self.device)
            logits[at[:, None], lists.always] = NEVER
            if (begin := part.where(part.positions == 0)).logit_rows.size:
                logits[to_device(begin.logit_rows, self.device)[:, None], lists.first] = NEVER
            if start < 0:
                continue
            if not rules.has_times:
                logits[at, start - 1 :] = NEVER
                continue
            logits[at, start - 1] = NEVER  # it would say that there are no times
            rows = to_device(part.rows, self.device)
            if len(part) == len(logits):
                self._forbid(logits, rules, rows)
            else:
                scores = logits[at]
                self._forbid(scores, rules, rows)
                logits[at] = scores

    def observe(self, batch: Batch, token_ids: Tensor) -> None:
        rows = to_device(batch.rows, self.device)
        first = [self._rules[row].first_timestamp for row in batch.rows.tolist()]
        starts = to_device(np.array([x if x >= 0 else self.vocab_size for x in first]), self.device)
        last = self._last[rows]
        self._before[rows] = torch.where(last < 0, self.vocab_size, last)
        self._last[rows] = token_ids
        self._latest[rows] = torch.where(token_ids >= starts, token_ids, self._latest[rows])

    def _forbid(self, scores: Tensor, rules: TranscriptRules, rows: Tensor) -> None:
        """Apply the rules of times to scores [rows, vocab_size], in place."""
        start = rules.first_timestamp
        text, times = scores[:, :start], scores[:, start:]
        last, before, latest = (x[rows, None] for x in (self._last, self._before, self._latest))
        was_time, is_after, is_first = last >= start, before >= start, last < 0
        opens = was_time & ~is_after
        least = torch.where(latest < 0, 0, torch.where(opens, latest, latest + 1) - start)
        offsets = torch.arange(times.shape[1], device=self.device)
        forbidden = (was_time & is_after) | (offsets < least)
        if rules.max_initial is not None:
            forbidden |= is_first & (offsets > rules.max_initial)
        times.masked_fill_(forbidden, NEVER)
        text[:, : rules.end_id].masked_fill_(opens, NEVER)
        text.masked_fill_(is_first, NEVER)
        is_likely = times.logsumexp(-1, keepdim=True) > text.amax(-1, keepdim=True)
        text.masked_fill_(is_likely, NEVER)

    def _by_rules(self, batch: Batch) -> list[tuple[TranscriptRules, Batch]]:
        """Split the rows by their rules, which mostly are the same."""
        rules = [self._rules[row] for row in batch.rows.tolist()]
        return [(one, batch.where(np.array([r == one for r in rules]))) for one in dict.fromkeys(rules)]

    def _kept(self, ids: tuple[int, ...]) -> Tensor:
        return to_device(np.array([i for i in ids if 0 <= i < self.vocab_size], np.int64), self.device)
