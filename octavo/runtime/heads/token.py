"""`TokenHead` chooses the next token of each request: logits, then the sampler."""

from typing import NamedTuple

from torch import Tensor

from octavo.messages.step import NewRequest, SchedulerOutput, TokenMasks
from octavo.runtime.heads.head import Head
from octavo.runtime.models.interface import Model
from octavo.runtime.sampling.masks import RowMasks
from octavo.runtime.sampling.output import SamplerOutput
from octavo.runtime.sampling.sampler import Kind, Sampler
from octavo.runtime.sampling.verify import sample_in_order
from octavo.runtime.transfer import Array
from octavo.runtime.worker.pending import PendingStep
from octavo.runtime.worker.prepare import Work
from octavo.runtime.worker.request_state import RequestState


class _Unsampled(NamedTuple):
    """Waits for its tokens to be chosen. rows, ends: [S] of the requests that sample; logits: theirs"""

    pending: PendingStep
    rows: Array
    ends: Array
    logits: Tensor


class TokenHead(Head):
    """Appends what it chooses to the state."""

    def __init__(self, sampler: Sampler, state: RequestState) -> None:
        super().__init__()
        self.sampler, self._state = sampler, state
        self._unsampled: _Unsampled | None = None

    def read(self, request: NewRequest) -> None:
        """See StepPart: what a request wants, the sampler remembers."""

    def add(self, row: int, request: NewRequest) -> None:
        self.sampler.add(row, request)

    def remove(self, row: int) -> None:
        self.sampler.remove(row)

    def kind(self, step: SchedulerOutput, rows: Array) -> Kind | None:
        is_masked = step.masks_follow or step.token_masks is not None
        return None if is_masked else self.sampler.plain_kind(rows)

    def finish(
        self,
        step: SchedulerOutput,
        kind: Kind | None,
        work: Work,
        hidden: Tensor,
        model: Model,
        pending: PendingStep,
    ) -> None:
        """See Head; a step whose masks follow is computed up to the logits."""
        rows, ends = work.rows[work.samples], work.ends[work.samples]
        if kind is Kind.GREEDY and (found := model.greedy(hidden)):
            self._send(pending, rows, ends, SamplerOutput(*found))
            return
        self._unsampled = _Unsampled(pending, rows, ends, model.logits(hidden))
        if not step.masks_follow:
            self.sample(step.token_masks)

    @property
    def awaits_masks(self) -> bool:
        return self._unsampled is not None

    def sample(self, masks: TokenMasks | None) -> None:
        """See Head: choose the tokens, and send them to the host."""
        assert self._unsampled is not None, "there is no step to sample"
        (pending, rows, ends, logits), self._unsampled = self._unsampled, None
        positions = ends - self._state.num_prompt_tokens[rows]
        found = RowMasks.read(masks, pending.samples)
        samples = sample_in_order(self.sampler, logits, rows, positions, found, pending.expected())
        self._send(pending, rows, ends, samples)

    def _send(self, pending: PendingStep, rows: Array, ends: Array, samples: SamplerOutput) -> None:
        self._state.append(rows, ends, samples.token_ids)
        pending.pending = samples.send()
