"""Heads of a pipeline's stages. Sampled tokens go from the last stage to the first on the devices.

So the next step of a request is given out while its last one is still in some stage, without a round trip
through the engine. Both sides send and take tokens once per step that samples, in the order of steps.
"""

from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from octavo.messages.step import NewRequest, SchedulerOutput, TokenMasks
from octavo.runtime.distributed.group import Group
from octavo.runtime.heads.head import Computed, Head
from octavo.runtime.heads.token import TokenHead
from octavo.runtime.sampling.sampler import Sampler
from octavo.runtime.transfer import Array, to_device
from octavo.runtime.worker.pending import PendingStep
from octavo.runtime.worker.prepare import Work
from octavo.runtime.worker.request_state import RequestState


class StageHead(Head):
    """Ends nothing, in stages before the last; the first appends the tokens of the last to its state."""

    def __init__(self, state: RequestState, tokens: Group) -> None:
        super().__init__()
        self._state, self._tokens = state, tokens
        self._under_way: deque[tuple[Callable[[], None], Array, Array, Tensor]] = deque()
        """Of steps whose tokens were not taken: a function that waits, rows, their ends, ids."""
        self._num_taken = 0
        self._due = np.zeros(len(state.num_tokens), np.int64)
        """By row: how many steps' tokens must be taken before its last one is there."""

    def read(self, request: NewRequest) -> None:
        """See StepPart: nothing is wanted here."""

    def remove(self, row: int) -> None:
        self._take_tokens(int(self._due[row]))

    def settle(self, step: SchedulerOutput, rows: Array) -> SchedulerOutput:
        """See StepPart; drafts that the step puts behind these tokens may stand where wrong ones would."""
        self._take_tokens(int(self._due[rows].max(initial=0)))
        return step

    def finish(self, step: SchedulerOutput, computed: Computed, pending: PendingStep) -> None:
        """See Head: count the tokens that the last stage will sample."""
        work = computed.work
        rows, ends = work.rows[work.samples], work.ends[work.samples]
        self._state.num_tokens[rows] = ends + 1
        if self._tokens.is_first:
            ids = torch.empty(len(rows), dtype=torch.int64, device=self._state.token_ids.device)
            wait = self._tokens.start_receiving(ids, self._tokens.size - 1)
            self._under_way.append((wait, rows, ends, ids))
            self._due[rows] = self._num_taken + len(self._under_way)

    def sample(self, masks: TokenMasks | None) -> None:
        """Leave it to the last stage."""

    def _take_tokens(self, until: int) -> None:
        """Append the tokens of the first `until` steps; the device waits for them."""
        while self._num_taken < until:
            wait, rows, ends, ids = self._under_way.popleft()
            wait()
            self._state.append(rows, ends, ids)
            self._num_taken += 1


class LastHead(TokenHead):
    """Sends what it has chosen to the first stage."""

    def __init__(self, sampler: Sampler, state: RequestState, tokens: Group) -> None:
        super().__init__(sampler, state)
        self._tokens = tokens
        self._unsent: Work | None = None

    def follow(self, step: SchedulerOutput, work: Work, hidden: Tensor | None, outcome: PendingStep) -> None:
        self._unsent = work if work.samples.size else None
        if not self.awaits_masks:
            self._send_back()

    def sample(self, masks: TokenMasks | None) -> None:
        super().sample(masks)
        self._send_back()

    def _send_back(self) -> None:
        work, self._unsent = self._unsent, None
        if work is not None:
            places = self._state.places(work.rows[work.samples], work.ends[work.samples])
            kept = self._state.token_ids.view(-1)
            self._tokens.send(kept[to_device(places, kept.device)], rank=0)
