"""`TokenHead` chooses the next token of each request: logits, then the sampler."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from octavo.messages.step import UNTOLD, NewRequest, SchedulerOutput, TokenMasks
from octavo.runtime.heads.head import Computed, Head
from octavo.runtime.kernels.sampling import Choice, Draws, Limits
from octavo.runtime.models.interface import Model
from octavo.runtime.sampling.output import HostCopies, SamplerOutput
from octavo.runtime.sampling.sampler import Kind, Masked, Sampler
from octavo.runtime.sampling.verify import sample_in_order
from octavo.runtime.transfer import Array, send, to_device
from octavo.runtime.worker.pending import PendingStep
from octavo.runtime.worker.replayer import Unmasked
from octavo.runtime.worker.request_state import RequestState


class TokenHead(Head):
    """Appends what it chooses to the state."""

    def __init__(self, sampler: Sampler, state: RequestState) -> None:
        super().__init__()
        self.sampler, self._state = sampler, state
        self._unsampled: Callable[[TokenMasks | None], None] | None = None
        """Chooses the tokens of a step that waits for masks."""

    def read(self, request: NewRequest) -> None:
        """See StepPart: what a request wants, the sampler remembers."""

    def add(self, row: int, request: NewRequest) -> None:
        self.sampler.add(row, request)

    def remove(self, row: int) -> None:
        self.sampler.remove(row)

    def kind(self, step: SchedulerOutput, rows: Array) -> Kind | Masked | None:
        kind = self.sampler.plain_kind(rows)
        if step.drafts and self.sampler.rejection and kind is not Kind.GREEDY:
            return None
        if kind is None or not (step.masks_follow or step.token_masks is not None):
            return kind
        return None if step.drafts else Masked(kind)

    def finish(self, step: SchedulerOutput, computed: Computed, pending: PendingStep) -> None:
        """See Head; a step whose masks follow is computed up to the logits."""
        kind, work, hidden, model = computed
        rows, ends = work.rows[work.samples], work.ends[work.samples]
        if any(UNTOLD in drafts for drafts in step.drafts.values()):
            places = self._state.places(rows, ends - 1)
            ids = self._state.token_ids.view(-1)
            pending.given = HostCopies([ids[to_device(places, ids.device)]])
        if isinstance(hidden, Unmasked):
            self._unsampled = partial(self._replay, pending, hidden)
        elif isinstance(hidden, Choice):
            self._send(pending, rows, ends, SamplerOutput(*hidden))
            return
        elif found := choose_early(kind, model, hidden, partial(self._draws, rows, ends)):
            self._send(pending, rows, ends, SamplerOutput(*found))
            return
        else:
            self._unsampled = partial(self._sample, pending, rows, ends, model.logits(hidden))
        if not step.masks_follow:
            self.sample(step.token_masks)

    def _draws(self, rows: Array, ends: Array, kind: Kind) -> tuple[Draws, Limits | None]:
        positions = ends - self._state.num_prompt_tokens[rows]
        found, at = send([rows, positions], self._state.token_ids.device)
        return self.sampler.draws(found, at, kind)

    @property
    def awaits_masks(self) -> bool:
        return self._unsampled is not None

    def sample(self, masks: TokenMasks | None) -> None:
        """See Head: choose the tokens, and send them to the host."""
        assert self._unsampled is not None, "there is no step to sample"
        choose, self._unsampled = self._unsampled, None
        choose(masks)

    def _replay(self, pending: PendingStep, step: Unmasked, masks: TokenMasks | None) -> None:
        pending.pending = step.choose(self.sampler.masks.read(masks, pending.samples))

    def _sample(
        self, pending: PendingStep, rows: Array, ends: Array, logits: Tensor, masks: TokenMasks | None
    ) -> None:
        positions = ends - self._state.num_prompt_tokens[rows]
        found = self.sampler.masks.read(masks, pending.samples)
        samples = sample_in_order(self.sampler, logits, rows, positions, found, pending.expected())
        self._send(pending, rows, ends, samples)

    def _send(self, pending: PendingStep, rows: Array, ends: Array, samples: SamplerOutput) -> None:
        self._state.append(rows, ends, samples.token_ids)
        pending.pending = samples.send()


def choose_early(
    kind: Kind | Masked | None,
    model: Model,
    hidden: Tensor,
    find: Callable[[Kind], tuple[Draws, Limits | None]],
) -> Choice | None:
    """Choose without the logits of all tokens on any rank, where the kind and the model allow it.

    find: as in Model.draw, for a kind
    """
    if kind is Kind.GREEDY:
        found = model.greedy(hidden)
        return Choice(*found) if found else None
    if not isinstance(kind, Kind):
        return None
    return model.draw(hidden, partial(find, kind), is_cut=kind is Kind.TRUNCATED)
