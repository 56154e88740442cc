"""`Sampler`: logits in, one token per row out, with everything a request asked for.

Called by the model runner: `add` and `remove` when a request takes or leaves a row, `sample` once per step.
The order is vLLM's: raw logprobs, the step's masks, allowed and forbidden tokens, bad words, min_tokens,
logit_bias, users' own processors, penalties, thinking budgets, then the greedy token, or temperature,
min_p, top_k, top_p and a draw. It waits for no accelerator (but for a request's own functions): the runner
may prepare the next step before the host knows a token.

State belongs to a row, is written when a request enters and then only by its own tokens. So a row's result
depends on its logits, its request and the output position, and on nothing else in the batch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch

from octavo.base import faults
from octavo.base.log import get_logger
from octavo.messages.sampling import MAX_LOGPROB_TOKEN_IDS, SamplingParams
from octavo.messages.step import NewRequest, num_kept_masks
from octavo.runtime.kernels.choice import truncate
from octavo.runtime.kernels.sampling import Choice, Draws, Limits, SamplingKernels, Scored, Scores
from octavo.runtime.sampling.masks import MaskTable, RowMasks
from octavo.runtime.sampling.output import SamplerOutput
from octavo.runtime.sampling.penalties import Penalties
from octavo.runtime.sampling.processors import (
    AllowedTokens,
    BadWords,
    ForbiddenTokens,
    KernelProcessor,
    LogitBias,
    MinTokens,
    Processor,
    ProcessorFactory,
    RowsFailed,
)
from octavo.runtime.sampling.rejection import Rejection
from octavo.runtime.sampling.request_functions import RequestFunctions
from octavo.runtime.sampling.rows import Batch, RowNumbers
from octavo.runtime.sampling.thinking import ThinkingBudget
from octavo.runtime.sampling.transcripts import Transcripts
from octavo.runtime.transfer import Array, send, to_device

_log = get_logger(__name__)

PROCESSORS: tuple[ProcessorFactory, ...] = (
    AllowedTokens,
    ForbiddenTokens,
    BadWords,
    MinTokens,
    LogitBias,
    RequestFunctions,
    Penalties,
    ThinkingBudget,
    Transcripts,
)
_NO_LOGPROBS = -2


class Kind(IntEnum):
    """How a row's tokens are chosen; what serves one kind serves those before it."""

    GREEDY = 0
    WHOLE = 1
    TRUNCATED = 2


@dataclass(frozen=True, slots=True)
class Masked:
    """Tokens are chosen by a kind, once masks have come."""

    kind: Kind


_KINDS = tuple(Kind)
_NOT_PLAIN = len(_KINDS)


class Sampler:
    """Chooses tokens for the requests that hold rows."""

    def __init__(
        self,
        vocab_size: int,
        max_num_rows: int,
        device: torch.device,
        kernels: SamplingKernels,
        logprobs_mode: str = "raw_logprobs",
        processors: Sequence[ProcessorFactory] = PROCESSORS,
    ) -> None:
        self._kernels = kernels
        self.vocab_size = vocab_size
        self._device = torch.device(device)
        self._processed_logprobs = logprobs_mode.startswith("processed")
        self._normalise = logprobs_mode.endswith("logprobs")
        self._processors = [make(vocab_size, max_num_rows, self._device) for make in processors]
        for processor in self._processors:
            if isinstance(processor, KernelProcessor):
                processor.kernels = kernels
        self._looks_back = [processor.looks_back for processor in self._processors]
        self._is_active = np.zeros((len(self._processors), max_num_rows), dtype=bool)
        self._kinds = np.zeros(max_num_rows, dtype=np.int64)
        self._num_logprobs = np.full(max_num_rows, _NO_LOGPROBS)
        self._has_listed = np.zeros(max_num_rows, dtype=bool)
        self._plain_kinds = np.full(max_num_rows, _NOT_PLAIN)
        self._listed_ids = torch.zeros(max_num_rows, MAX_LOGPROB_TOKEN_IDS, dtype=torch.int64, device=device)
        self._faults: dict[int, str] = {}
        self.masks = MaskTable(vocab_size, num_kept_masks(max_num_rows), self._device)
        self.rejection: Rejection | None = None
        """Keeps drafts; None: those that are what is drawn."""
        # One row more than requests have: for the rows that pad a recorded step.
        self._limits = RowNumbers(
            max_num_rows + 1, 1 + len(Limits._fields), kernels.limits_dtype, self._device
        )
        self._seeds = RowNumbers(max_num_rows + 1, 1, np.int64, self._device)
        # Pieces that stay in a CPU's caches are twice as fast; elsewhere only memory bounds them.
        self._rows_at_once = max(1, (2**20 if self._device.type == "cpu" else 2**26) // vocab_size)

    @torch.inference_mode()
    def add(self, row: int, request: NewRequest) -> None:
        """Give `row` to `request`; nothing of a former owner stays. Its outputs so far count as chosen."""
        self.remove(row)
        params = request.sampling
        self._kinds[row] = _kind(params)
        self._num_logprobs[row] = _NO_LOGPROBS if params.logprobs is None else params.logprobs
        self._has_listed[row] = params.logprob_token_ids is not None
        if (ids := params.logprob_token_ids) is not None:
            self._listed_ids[row, : len(ids)] = to_device(np.array(ids, np.int64), self._device)
        given = 0.0 if params.greedy else params.temperature
        self._limits.put(row, given, given or 1.0, params.top_k, params.top_p, params.min_p)
        self._seeds.put(row, request.spec.seed)
        for index, processor in enumerate(self._processors):
            with self._blaming(processor, [row]):
                if processor.is_active(params):
                    faults.hit("worker.sample")
                    processor.add(row, request)
                    self._is_active[index, row] = True
        is_plain = params.logprobs is None and not self._is_active[:, row].any()
        self._plain_kinds[row] = self._kinds[row] if is_plain else _NOT_PLAIN

    @torch.inference_mode()
    def remove(self, row: int) -> None:
        """Forget the request of `row`, which has left; a free row may be removed again."""
        for index, processor in enumerate(self._processors):
            if self._is_active[index, row]:
                self._is_active[index, row] = False
                with self._blaming(processor, [row]):
                    processor.remove(row)
        self._faults.pop(row, None)

    @torch.inference_mode()
    def sample(
        self,
        logits: torch.Tensor,
        rows: Array | Sequence[int],
        output_positions: Array | Sequence[int],
        masks: RowMasks | None = None,
        drafts: Array | None = None,
    ) -> SamplerOutput:
        """Choose the next token of each row, and remember it where penalties or bad words need it.

        logits:           [rows, vocab_size]; float32 logits are overwritten
        rows:             [rows] on the host: the request's row in the batch; any subset in any order, and
                          distinct if some of them `looks_back`
        output_positions: [rows] on the host: how many output tokens the request has before this one
        masks:            of rows that may not choose every token
        drafts:           [rows] on the host: the tokens that were guessed, -1 = none
        """
        assert logits.shape == (len(rows), self.vocab_size), (logits.shape, len(rows), self.vocab_size)
        batch = Batch(np.arange(len(rows)), np.array(rows, np.int64), np.array(output_positions, np.int64))
        if masks is None and self.plain_kind(batch.rows) is not None:
            return SamplerOutput(*self._choose(logits, batch, drafts))
        raw, logits = logits, self._kernels.widen(logits)
        scored = batch.where(self._num_logprobs[batch.rows] != _NO_LOGPROBS)
        shown, places = raw, scored.logit_rows
        if raw is logits:  # and will be changed
            shown, places = self._copy(logits, scored), np.arange(len(scored))
        if masks is not None:
            masks.apply(logits, self._kernels.forbid)
        self._for_each(batch, lambda processor, part: processor.apply(logits, part))
        if self._processed_logprobs:
            shown, places = self._distribution(logits, scored), np.arange(len(scored))
        output = SamplerOutput(*self._choose(logits, batch, drafts))
        chosen = output.token_ids if self.rejection is None else output.token_ids.clamp(min=0)
        self._for_each(batch, lambda processor, part: self._tell(processor, part, chosen))
        output.scores = self._score(shown, places, scored, chosen)
        if self._faults:
            held = enumerate(batch.rows.tolist())
            output.faults = {place: self._faults[row] for place, row in held if row in self._faults}
        return output

    def plain_kind(self, rows: Array) -> Kind | None:
        """Return the kind by which `choose` serves all of these rows.

        None where not the logits alone decide, or more than tokens is asked for.
        """
        most = max(self._plain_kinds[rows].tolist())
        return None if most == _NOT_PLAIN or any(row in rows for row in self._faults) else _KINDS[most]

    def looks_back(self, rows: Array) -> bool:
        """Return True if what is chosen for some of these rows depends on what was chosen before."""
        return bool(self._is_active[self._looks_back][:, rows].any())

    def kind_of(self, rows: Array) -> Kind:
        """Return the kind by which `choose` draws for all of these rows, whatever else they ask for."""
        return _KINDS[int(self._kinds[rows].max())]

    def refresh(self) -> None:
        """Bring what was added to the device, for `choose` to read."""
        self._limits.on_device()
        self._seeds.on_device()

    def choose(
        self, logits: torch.Tensor, rows: torch.Tensor, output_positions: torch.Tensor, kind: Kind
    ) -> Choice:
        """Sample for plain rows, from what is on the device alone: the same launches for any of a kind.

        logits: [n, vocab_size]; rows, output_positions: [n] int64 on the device
        returns ids of which those of rows that fail may be none at all
        """
        if kind is Kind.GREEDY:
            return self._kernels.choose(logits)
        return self._kernels.choose(logits, *self.draws(rows, output_positions, kind))

    def draws(
        self, rows: torch.Tensor, output_positions: torch.Tensor, kind: Kind
    ) -> tuple[Draws, Limits | None]:
        """Return how `choose` draws for rows of a kind that is not greedy."""
        tables = self._seeds.on_device(), self._limits.on_device()
        noise, temperature, *limits = self._kernels.row_limits(rows, output_positions, *tables)
        return Draws(temperature, noise), Limits(*limits) if kind is Kind.TRUNCATED else None

    def _for_each(self, batch: Batch, call: Callable[[Processor, Batch], None]) -> None:
        """Call with every processor that is active for some rows, and these rows."""
        for processor, is_active in zip(self._processors, self._is_active[:, batch.rows], strict=True):
            if is_active.any():
                part = batch.where(is_active)
                with self._blaming(processor, part.rows.tolist()):
                    call(processor, part)

    def _tell(self, processor: Processor, part: Batch, chosen: torch.Tensor) -> None:
        if type(processor).observe is not Processor.observe:
            is_whole = len(part) == len(chosen)
            processor.observe(part, chosen if is_whole else self._copy(chosen, part))

    @contextmanager
    def _blaming(self, processor: Processor, rows: list[int]) -> Iterator[None]:
        """Let what `processor` raises inside end the requests of these rows, not the engine."""
        try:
            yield
        except RowsFailed as failed:
            self._faults |= failed.texts
        except Exception as error:
            _log.exception("%s failed.", type(processor).__name__)
            text = f"The logits processor {type(processor).__name__} failed: {type(error).__name__}: {error}"
            self._faults |= dict.fromkeys(rows, text)

    def probabilities(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """See rejection.Source."""
        return self._distribution(self._kernels.widen(logits), batch).softmax(dim=1)

    def noise(self, rows: Array, positions: Array) -> torch.Tensor:
        """See rejection.Source."""
        tables = self._seeds.on_device(), self._limits.on_device()
        found, at = send([rows, positions], self._device)
        return self._kernels.row_limits(found, at, *tables)[0]

    def draw(self, logits: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """See rejection.Source."""
        return self._kernels.choose(logits, Draws(torch.ones_like(noise), noise)).token_ids

    def _choose(self, logits: torch.Tensor, batch: Batch, drafts: Array | None) -> Choice:
        kind, drawn, wanted = self.kind_of(batch.rows), batch, None
        if drafts is not None and self.rejection is not None:
            drawn = self.rejection.find(batch, np.where(self._kinds[batch.rows], drafts, -1))
            wanted = self.probabilities(logits, drawn) if len(drawn) else None
        rows, positions = send([batch.rows, batch.positions], self._device)
        choice = self.choose(logits, rows, positions, kind)
        choice.token_ids.clamp_(
            0, self.vocab_size - 1
        )  # NaN may lead to any id, which the next step looks up
        if wanted is not None and drafts is not None and self.rejection is not None:
            kept = self.rejection.decide(self, wanted, drawn, drafts[drawn.logit_rows])
            choice.token_ids[to_device(drawn.logit_rows, self._device)] = kept
        return choice

    def _copy(self, values: torch.Tensor, batch: Batch) -> torch.Tensor:
        return values[to_device(batch.logit_rows, self._device)]

    def _distribution(self, logits: torch.Tensor, scored: Batch) -> torch.Tensor:
        """Return the logits that the scored rows are drawn from: [len(scored), vocab_size]."""
        rows = to_device(scored.rows, self._device)
        limits = Limits(*self._limits.on_device()[rows, 1:, None].unbind(dim=1))
        shown = self._copy(logits, scored)
        truncated = np.flatnonzero(self._kinds[scored.rows] == Kind.TRUNCATED)
        if truncated.size:
            cut = to_device(truncated, self._device)
            shown[cut] = truncate(shown[cut], limits.at(cut))
        return shown.div_(limits.temperature.float())

    def _score(
        self, shown: torch.Tensor, places: Array, scored: Batch, token_ids: torch.Tensor
    ) -> list[tuple[Array, Scores]]:
        """Score what was chosen. shown: [m, vocab_size]; places: [n], the scored rows in it"""
        scores = []
        kinds = np.stack([self._num_logprobs[scored.rows], self._has_listed[scored.rows]], axis=1)
        for number, has_listed in np.unique(kinds, axis=0).tolist():
            of_kind = np.flatnonzero((kinds == (number, has_listed)).all(axis=1))
            for first in range(0, len(of_kind), self._rows_at_once):
                part = of_kind[first : first + self._rows_at_once]
                logit_rows = scored.logit_rows[part]
                at, chosen, rows = send([places[part], logit_rows, scored.rows[part]], self._device)
                listed = self._listed_ids[rows, :number] if has_listed else None
                wanted = Scored(at, token_ids[chosen], number, self._normalise, listed)
                scores.append((logit_rows, self._kernels.score(shown, wanted)))
        return scores


def with_users(processors: Sequence[ProcessorFactory]) -> tuple[ProcessorFactory, ...]:
    """Return all of ours, and before the penalties the users' own."""
    place = PROCESSORS.index(Penalties)
    return (*PROCESSORS[:place], *processors, *PROCESSORS[place:])


def _kind(params: SamplingParams) -> Kind:
    if params.greedy:
        return Kind.GREEDY
    return Kind.TRUNCATED if params.top_k > 0 or params.top_p < 1 or params.min_p > 0 else Kind.WHOLE
