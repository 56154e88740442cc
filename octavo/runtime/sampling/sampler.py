"""`Sampler`: logits in, one token per row out, with everything a request asked for.

Called by the model runner: `add` and `remove` when a request takes or leaves a slot, `sample` once per step.
The order is vLLM's: raw logprobs, allowed and forbidden tokens, bad words, min_tokens, logit_bias, penalties,
then the likeliest token, or temperature, min_p, top_k, top_p and a draw. `sample` never waits for an
accelerator: the runner may prepare the next step before the host knows a token.

State belongs to a slot, is written when a request enters and then only by its own tokens. So a row's result
depends on its logits, its request and the output position, and on nothing else in the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch

from octavo.messages.request import TokenLogprobs
from octavo.messages.sampling import SamplingParams
from octavo.messages.step import NewRequest
from octavo.runtime.sampling.draw import (
    Choice,
    Limits,
    choose_likeliest,
    draw,
    draw_truncated,
    truncate,
)
from octavo.runtime.sampling.logprobs import Scores, score
from octavo.runtime.sampling.noise import uniform
from octavo.runtime.sampling.penalties import Penalties
from octavo.runtime.sampling.processors import (
    AllowedTokens,
    BadWords,
    ForbiddenTokens,
    LogitBias,
    MinTokens,
    ProcessorFactory,
)
from octavo.runtime.sampling.slots import Array, Batch, to_device

PROCESSORS: tuple[ProcessorFactory, ...] = (
    AllowedTokens,
    ForbiddenTokens,
    BadWords,
    MinTokens,
    LogitBias,
    Penalties,
)
_NO_LOGPROBS = -2
_NOT_A_NUMBER = "numerics: the model's logits for this request are not finite numbers."
_ALL_MASKED = "No token may be chosen: the request's constraints together forbid the whole vocabulary."


class _Kind(IntEnum):
    """How a slot's tokens are chosen."""

    LIKELIEST = 0
    TRUNCATED = 1
    WHOLE = 2


@dataclass(slots=True)
class HostSamples:
    """A step's result as lists, one entry per row.

    logprobs: None where not asked for; errors: a text for the client, None where all is well
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    errors: list[str | None]


@dataclass(slots=True)
class SamplerOutput:
    """A step's result on the device.

    token_ids: [rows] int64; 0 for a failed row
    peaks:     [rows] float32, each row's largest logit after the processors; not finite = the row has failed
    scores:    pairs of rows (on the host) and their scores
    """

    token_ids: torch.Tensor
    peaks: torch.Tensor
    scores: list[tuple[Array, Scores]]

    def to_host(self) -> HostSamples:
        """Lists of everything; waits for the device."""
        errors = [_error(peak) for peak in self.peaks.tolist()]
        logprobs: list[TokenLogprobs | None] = [None] * len(errors)
        for rows, scores in self.scores:
            for row, entry in zip(rows.tolist(), scores.to_host(), strict=True):
                logprobs[row] = None if errors[row] else entry
        return HostSamples(self.token_ids.tolist(), logprobs, errors)


class Sampler:
    """Chooses tokens for the requests that hold slots."""

    def __init__(
        self,
        vocab_size: int,
        max_num_slots: int,
        device: torch.device,
        logprobs_mode: str = "raw_logprobs",
        processors: Sequence[ProcessorFactory] = PROCESSORS,
    ) -> None:
        self.vocab_size = vocab_size
        self._device = torch.device(device)
        self._processed_logprobs = logprobs_mode.startswith("processed")
        self._normalise = logprobs_mode.endswith("logprobs")
        self._processors = [make(vocab_size, max_num_slots, self._device) for make in processors]
        self._is_active = np.zeros((len(self._processors), max_num_slots), dtype=bool)
        self._kinds = np.zeros(max_num_slots, dtype=np.int64)
        self._num_logprobs = np.full(max_num_slots, _NO_LOGPROBS)
        self._limits = torch.ones(max_num_slots, len(Limits._fields), dtype=torch.float64, device=device)
        # Pieces that stay in a CPU's caches are twice as fast; elsewhere only memory bounds them.
        self._rows_at_once = max(1, (2**20 if self._device.type == "cpu" else 2**26) // vocab_size)
        self._seeds = torch.zeros(max_num_slots, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def add(self, slot: int, request: NewRequest) -> None:
        """Give `slot` to `request`; nothing of a former owner stays. Its outputs so far count as chosen."""
        self.remove(slot)
        params = request.sampling
        self._kinds[slot] = _kind(params)
        self._num_logprobs[slot] = _NO_LOGPROBS if params.logprobs is None else params.logprobs
        temperature = 1.0 if params.greedy else params.temperature
        limits = [temperature, params.top_k, params.top_p, params.min_p]
        self._limits[slot] = torch.tensor(limits, dtype=torch.float64)
        self._seeds[slot] = request.seed
        for index, processor in enumerate(self._processors):
            if processor.is_active(params):
                processor.add(slot, request)
                self._is_active[index, slot] = True

    @torch.inference_mode()
    def remove(self, slot: int) -> None:
        """The request of `slot` has left; a free slot may be removed again."""
        for index, processor in enumerate(self._processors):
            if self._is_active[index, slot]:
                processor.remove(slot)
                self._is_active[index, slot] = False

    @torch.inference_mode()
    def sample(
        self, logits: torch.Tensor, slots: Array | Sequence[int], output_positions: Array | Sequence[int]
    ) -> SamplerOutput:
        """Choose the next token of each row, and remember it where penalties or bad words need it.

        logits:           [rows, vocab_size]; float32 logits are overwritten
        slots:            [rows] on the host: whose row it is; distinct, any subset in any order
        output_positions: [rows] on the host: how many output tokens the request has before this one
        """
        logits = logits.float().contiguous()
        assert logits.shape == (len(slots), self.vocab_size), (logits.shape, len(slots), self.vocab_size)
        batch = Batch(np.arange(len(slots)), np.array(slots, np.int64), np.array(output_positions, np.int64))
        scored = batch.where(self._num_logprobs[batch.slots] != _NO_LOGPROBS)
        shown = self._copy(logits, scored)
        self._process(logits, batch)
        if self._processed_logprobs:
            shown = self._distribution(logits, scored)
        token_ids, peaks = self._choose(logits, batch)
        token_ids = torch.where(peaks.isfinite(), token_ids, 0)
        self._observe(batch, token_ids)
        return SamplerOutput(token_ids, peaks, self._score(shown, scored, token_ids))

    def _process(self, logits: torch.Tensor, batch: Batch) -> None:
        for processor, is_active in zip(self._processors, self._is_active[:, batch.slots], strict=True):
            if is_active.any():
                processor.apply(logits, batch.where(is_active))

    def _observe(self, batch: Batch, token_ids: torch.Tensor) -> None:
        for processor, is_active in zip(self._processors, self._is_active[:, batch.slots], strict=True):
            if is_active.any():
                part = batch.where(is_active)
                processor.observe(part, token_ids[to_device(part.rows, self._device)])

    def _choose(self, logits: torch.Tensor, batch: Batch) -> Choice:
        kinds = self._kinds[batch.slots]
        if (kinds == _Kind.LIKELIEST).all():
            return choose_likeliest(logits)
        slots = to_device(batch.slots, self._device)
        noise = uniform(self._seeds[slots], to_device(batch.positions, self._device))
        limits = Limits(*self._limits[slots, :, None].unbind(dim=1))
        token_ids = torch.empty(len(batch), dtype=torch.int64, device=self._device)
        peaks = torch.empty(len(batch), device=self._device)
        for kind in np.unique(kinds).tolist():
            of_kind = to_device(np.flatnonzero(kinds == kind), self._device)
            for rows in torch.split(of_kind, self._rows_at_once):
                part = logits if len(rows) == len(batch) else logits[rows]
                token_ids[rows], peaks[rows] = _choose(_Kind(kind), part, limits.at(rows), noise[rows])
        return Choice(token_ids, peaks)

    def _copy(self, logits: torch.Tensor, scored: Batch) -> torch.Tensor:
        return logits[to_device(scored.rows, self._device)]

    def _distribution(self, logits: torch.Tensor, scored: Batch) -> torch.Tensor:
        """The logits that the scored rows are drawn from: [len(scored), vocab_size]."""
        slots = to_device(scored.slots, self._device)
        limits = Limits(*self._limits[slots, :, None].unbind(dim=1))
        shown = self._copy(logits, scored)
        truncated = np.flatnonzero(self._kinds[scored.slots] == _Kind.TRUNCATED)
        if truncated.size:
            rows = to_device(truncated, self._device)
            shown[rows] = truncate(shown[rows], limits.at(rows))
        return shown.div_(limits.temperature.float())

    def _score(
        self, shown: torch.Tensor, scored: Batch, token_ids: torch.Tensor
    ) -> list[tuple[Array, Scores]]:
        scores = []
        numbers = self._num_logprobs[scored.slots]
        for number in np.unique(numbers).tolist():
            of_number = np.flatnonzero(numbers == number)
            for first in range(0, len(of_number), self._rows_at_once):
                places = of_number[first : first + self._rows_at_once]
                rows = scored.rows[places]
                chosen = token_ids[to_device(rows, self._device)]
                part = shown[to_device(places, self._device)]
                scores.append((rows, score(part, chosen, number, self._normalise)))
        return scores


def _kind(params: SamplingParams) -> _Kind:
    if params.greedy:
        return _Kind.LIKELIEST
    return _Kind.TRUNCATED if params.top_k > 0 or params.top_p < 1 or params.min_p > 0 else _Kind.WHOLE


def _choose(kind: _Kind, logits: torch.Tensor, limits: Limits, noise: torch.Tensor) -> Choice:
    if kind == _Kind.LIKELIEST:
        return choose_likeliest(logits)
    if kind == _Kind.TRUNCATED:
        return draw_truncated(logits, limits, noise)
    return draw(logits, limits.temperature, noise)


def _error(peak: float) -> str | None:
    if np.isfinite(peak):
        return None
    return _ALL_MASKED if peak == -np.inf else _NOT_A_NUMBER
