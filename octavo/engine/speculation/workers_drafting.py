"""`WorkersDrafting`: drafts that the workers guess, by a model of their own.

They come with the result of a step and are verified in the next. Where steps are planned ahead they stay with
the workers, and the next step names them by UNTOLD; but a grammar has to see them. How many to ask for is
decided before, by how often tokens at each place of a draft were right, and by what guessing and verifying
have taken; none, if that is not clearly more than without. Then one request is asked from time to time, to
notice a change.
"""

from collections.abc import Sequence

import numpy as np

from octavo.config.speculative import Speculation
from octavo.engine.scheduler.plan import StepPlan
from octavo.engine.scheduler.request import Request
from octavo.engine.speculation.drafting import LEAST_GAIN, Candidate, Drafting, is_usual
from octavo.engine.speculation.step_costs import StepCosts
from octavo.messages.step import UNTOLD, ModelRunnerOutput

_TRIAL = 3
"""Tokens that are asked for to learn."""
_PATIENCE = 60
"""Times as long as a trial took, there is none."""


class WorkersDrafting(Drafting):
    """Knows what the workers guessed, and how many tokens they are asked for."""

    def __init__(self, wanted: Speculation, max_num_rows: int, *, runs_ahead: bool = False) -> None:
        super().__init__(wanted, max_num_rows, runs_ahead=runs_ahead)
        self._pass_costs = StepCosts()
        self._patience_s = 0.0

    def counts_behind(self, plan: StepPlan) -> list[int]:
        asking = [
            place
            for place, request in enumerate(plan.requests)
            if request.max_drafts != 0 and request.num_computed >= len(request.token_ids)
        ]
        count = self._best_count(len(asking)) if asking else 0
        if asking and not count and self._patience_s <= 0:
            asking, count = asking[-1:], min(_TRIAL, self._wanted.most_of(len(asking)))
        counts = [0] * len(plan.requests)
        for place in asking if count else ():
            request = plan.requests[place]
            most = count if request.max_drafts is None else min(count, request.max_drafts)
            counts[place] = max(0, min(most, self._room_behind(request)))
        for request, number in zip(plan.requests, counts, strict=True):
            request.num_asked = number
            if number and request.matcher is not None:
                plan.tells_drafts = True
        return counts if count else []

    def propose(self, running: Sequence[Request]) -> dict[Request, list[int]]:
        """See Drafting; what was asked for and not told is verified without another look at what it costs."""
        if not self._runs_ahead:
            return super().propose(running)
        found = super().propose([request for request in running if request.matcher is not None])
        self._num_running = len(running)
        for request in running:
            if request.matcher is None and request.num_asked and request.is_decoding:
                num_pending = request.num_pending + request.num_unsure
                count = min(request.num_asked, self._most(request, num_pending=num_pending))
                found[request] = [UNTOLD] * max(0, count)
        return found

    def awaits_results(self, running: Sequence[Request]) -> bool:
        """See Drafting; guessing begins when tokens are chosen, so that no masks may follow a step."""
        return any(request.num_in_flight and request.matcher is not None for request in running)

    def _room_behind(self, request: Request) -> int:
        """Return how many tokens may be guessed behind a step, however many drafts come true until then."""
        if not self._runs_ahead:
            return request.max_total_tokens - len(request.token_ids) - 2
        assert request.table is not None
        num_computed = request.num_computed + request.num_unsure
        num_places = request.table.capacity - (self._wanted.num_ahead - self._wanted.most)
        return min(request.max_total_tokens - 2, num_places) - num_computed

    def learn(self, plan: StepPlan, result: ModelRunnerOutput, took_s: float) -> None:
        """See Drafting; keep what the workers guessed."""
        super().learn(plan, result, took_s)
        for place, drafts in plan.drafts.items():
            num_right = len(result.sampled_token_ids[place]) - 1
            for number in range(min(num_right + 1, len(drafts)) if drafts[0] == UNTOLD else 0):
                self._known_chances.note(number, hit=number < num_right)
        self._patience_s -= took_s
        if (most := max(plan.num_drafts, default=0)) and result.draft_s:
            if sum(plan.num_scheduled) == len(plan.requests):
                self._pass_costs.note(sum(count > 0 for count in plan.num_drafts), result.draft_s / most)
            self._patience_s = _PATIENCE * result.draft_s
        for place, token_ids in result.drafts.items():
            request = plan.requests[place]
            request.proposal = token_ids if request.matcher is not None or not self._runs_ahead else None

    def _candidate(self, request: Request, num_pending: int = 0) -> Candidate | None:
        return self._propose_known(request, request.proposal or [])

    def _best_count(self, num_rows: int) -> int:
        """Return how many tokens of each of `num_rows` requests bring the most tokens a second."""
        most = min(self._wanted.most_of(num_rows), self._max_num_rows // num_rows - 1)
        if not self._wanted.adapts:
            return max(0, most)
        if most <= 0 or (costs := self._costs.of(num_rows, num_rows * most)) is None:
            return 0
        if (pass_s := self._pass_costs.near(num_rows)) is None:
            return min(most, _TRIAL)
        counts = np.arange(most + 1)
        brought = np.concatenate(([1.0], 1 + self._known_chances.ahead(0, most, 1.0).cumsum()))
        rates = brought / (costs[num_rows * counts] + counts * pass_s)
        rates[1:] *= is_usual(num_rows * (1 + counts[1:]))
        best = int(rates.argmax())
        return best if rates[best] > LEAST_GAIN * rates[0] else 0
