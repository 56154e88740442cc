"""Processors that forbid or favour tokens before one is chosen, in the sampler's order.

Called by the sampler. A processor is asked once per request whether it is active; it then sees only the rows
of such requests, and costs nothing in a step without them. It must not touch other rows, nor make the host
wait for the device.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch

from octavo.messages.sampling import SamplingParams
from octavo.messages.step import NewRequest
from octavo.runtime.kernels.choice import TORCH_SAMPLING
from octavo.runtime.kernels.sampling import Words
from octavo.runtime.sampling.rows import Batch, RowLists, TokenTable, in_vocabulary
from octavo.runtime.transfer import send, to_device

NEVER = float("-inf")


class RowsFailed(Exception):
    """Some requests of a batch cannot go on; all others were served."""

    def __init__(self, texts: dict[int, str]) -> None:
        super().__init__(texts)
        self.texts = texts
        """By row, for the client."""


class Processor(ABC):
    """One way to change logits; keeps what it needs of each active request by row.

    Public as `octavo.LogitsProcessor`: users derive their own. What a method raises ends the requests that it
    was called for, and no other.
    """

    looks_back: ClassVar[bool] = True
    """It may depend on tokens chosen before: what follows drafts is sampled one token after the other."""

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Raise ValueError for a request that it cannot serve. Called by the front, for users' processors."""

    def __init__(self, vocab_size: int, num_rows: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.num_rows = num_rows
        self.device = device

    @abstractmethod
    def is_active(self, params: SamplingParams) -> bool:
        """Return True if requests with these parameters need this processor."""

    @abstractmethod
    def add(self, row: int, request: NewRequest) -> None:
        """Prepare for a request that takes a free row, for the first time or after a preemption."""

    @abstractmethod
    def remove(self, row: int) -> None:
        """Forget that request: it leaves the row."""

    @abstractmethod
    def apply(self, logits: torch.Tensor, batch: Batch) -> None:
        """Change the batch's rows of `logits` ([rows, vocab_size] float32, contiguous) in place."""

    def observe(self, batch: Batch, token_ids: torch.Tensor) -> None:
        """Take note of the tokens that were chosen: [len(batch)] int64 on the device."""


ProcessorFactory = Callable[[int, int, torch.device], Processor]
"""(vocab_size, num_rows, device) → Processor: its class."""


class TokenList(Processor):
    """A processor that knows a list of token ids per request."""

    looks_back = False

    def __init__(self, vocab_size: int, num_rows: int, device: torch.device) -> None:
        super().__init__(vocab_size, num_rows, device)
        self.lists = RowLists(device)

    @abstractmethod
    def token_ids(self, request: NewRequest) -> list[int]:
        """Return the request's list."""

    def add(self, row: int, request: NewRequest) -> None:
        """Keep the ids that have a logit; the front has refused others where they are a mistake."""
        self.lists.put(row, in_vocabulary(self.token_ids(request), self.vocab_size))

    def remove(self, row: int) -> None:
        self.lists.remove(row)


class ForbiddenTokens(TokenList):
    """`forbidden_token_ids` are never chosen."""

    def is_active(self, params: SamplingParams) -> bool:
        return bool(params.forbidden_token_ids)

    def token_ids(self, request: NewRequest) -> list[int]:
        return request.sampling.forbidden_token_ids or []

    def apply(self, logits: torch.Tensor, batch: Batch) -> None:
        logit_rows, ids = self.lists.select(batch)
        logits[logit_rows, ids] = logits.new_full((), NEVER)


class KernelProcessor(Processor):
    """A processor that works by kernels."""

    kernels = TORCH_SAMPLING
    """May be replaced by faster ones."""


class AllowedTokens(KernelProcessor):
    """Only `allowed_token_ids` may be chosen."""

    def __init__(self, vocab_size: int, num_rows: int, device: torch.device) -> None:
        super().__init__(vocab_size, num_rows, device)
        self._words: torch.Tensor | None = None  # [num_rows, words] int32, once a request needs it

    def is_active(self, params: SamplingParams) -> bool:
        return params.allowed_token_ids is not None

    def add(self, row: int, request: NewRequest) -> None:
        is_allowed = np.zeros(-(-self.vocab_size // 32) * 32, bool)
        is_allowed[in_vocabulary(request.sampling.allowed_token_ids or [], self.vocab_size)] = True
        words = np.packbits(is_allowed, bitorder="little").view(np.int32)
        if self._words is None:
            self._words = torch.zeros(self.num_rows, len(words), dtype=torch.int32, device=self.device)
        self._words[row] = to_device(words, self.device)

    def remove(self, row: int) -> None:
        """Leave the row to the next request, which overwrites all of it."""

    def apply(self, logits: torch.Tensor, batch: Batch) -> None:
        assert self._words is not None
        rows, numbers = send([batch.logit_rows, batch.rows], self.device)
        self.kernels.forbid(logits, rows, numbers, self._words)


class BadWords(KernelProcessor):
    """The last token of a bad word is impossible where the output ends with the tokens before it."""

    def __init__(self, vocab_size: int, num_rows: int, device: torch.device) -> None:
        super().__init__(vocab_size, num_rows, device)
        self._words = RowLists(device)
        self._outputs = TokenTable(num_rows, device)

    def is_active(self, params: SamplingParams) -> bool:
        return bool(params.bad_words_token_ids)

    def add(self, row: int, request: NewRequest) -> None:
        outputs = np.array(request.token_ids[request.num_prompt_tokens :], dtype=np.int64)
        table_row = self._outputs.add(row, outputs)
        words = [word for word in request.sampling.bad_words_token_ids or () if word[-1] < self.vocab_size]
        width = max((len(word) for word in words), default=1) - 1
        reversed_prefixes = np.full((len(words), width), -1, dtype=np.int64)
        for prefix, word in zip(reversed_prefixes, words, strict=True):
            prefix[: len(word) - 1] = word[-2::-1]
        last = np.array([word[-1] for word in words], dtype=np.int64)
        rows, table_rows = np.full(len(words), row), np.full(len(words), table_row)
        self._words.put(row, last, reversed_prefixes, rows, table_rows)

    def remove(self, row: int) -> None:
        self._words.remove(row)
        self._outputs.remove(row)

    def apply(self, logits: torch.Tensor, batch: Batch) -> None:
        """Make the last tokens impossible of words that have begun."""
        lengths = to_device(self._outputs.lengths, self.device)
        self.kernels.ban(logits, Words(*self._words.select(batch)), self._outputs.ids, lengths)

    def observe(self, batch: Batch, token_ids: torch.Tensor) -> None:
        self._outputs.append(batch.rows, token_ids)


class MinTokens(TokenList):
    """No end of text and no stop token before `min_tokens` output tokens."""

    def __init__(self, vocab_size: int, num_rows: int, device: torch.device) -> None:
        super().__init__(vocab_size, num_rows, device)
        self._min_tokens = np.zeros(num_rows, dtype=np.int64)

    def is_active(self, params: SamplingParams) -> bool:
        return params.min_tokens > 0

    def token_ids(self, request: NewRequest) -> list[int]:
        return request.spec.stop_token_ids

    def add(self, row: int, request: NewRequest) -> None:
        super().add(row, request)
        self._min_tokens[row] = request.sampling.min_tokens

    def apply(self, logits: torch.Tensor, batch: Batch) -> None:
        early = batch.positions < self._min_tokens[batch.rows]
        if early.any():
            logit_rows, ids = self.lists.select(batch.where(early))
            logits[logit_rows, ids] = logits.new_full((), NEVER)


class LogitBias(Processor):
    """`logit_bias` is added."""

    looks_back = False

    def __init__(self, vocab_size: int, num_rows: int, device: torch.device) -> None:
        super().__init__(vocab_size, num_rows, device)
        self._biases = RowLists(device)

    def is_active(self, params: SamplingParams) -> bool:
        return bool(params.logit_bias)

    def add(self, row: int, request: NewRequest) -> None:
        bias = request.sampling.logit_bias or {}
        ids = in_vocabulary(list(bias), self.vocab_size)
        self._biases.put(row, ids, np.array([bias[i] for i in ids.tolist()], dtype=np.float32))

    def remove(self, row: int) -> None:
        self._biases.remove(row)

    def apply(self, logits: torch.Tensor, batch: Batch) -> None:
        """Add the biases; a token stands in one once, so nothing is added twice."""
        logit_rows, ids, biases = self._biases.select(batch)
        logits[logit_rows, ids] += biases
