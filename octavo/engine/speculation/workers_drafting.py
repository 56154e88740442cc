"""`WorkersDrafting`: drafts that the workers guess, by a model of their own.

They come with the result of a step and are verified in the next. How many to ask for is decided before, by
how often tokens at each place of a draft were right, and by what guessing and verifying have taken; none, if
that is not clearly more than without. Then one request is asked from time to time, to notice a change.
"""

import numpy as np

from octavo.config.speculative import Speculation
from octavo.engine.scheduler.plan import StepPlan
from octavo.engine.scheduler.request import Request
from octavo.engine.speculation.drafting import LEAST_GAIN, Candidate, Drafting, is_usual
from octavo.engine.speculation.step_costs import StepCosts
from octavo.messages.step import ModelRunnerOutput

_TRIAL = 3
"""Tokens that are asked for to learn."""
_PATIENCE = 60
"""Times as long as a trial took, there is none."""


class WorkersDrafting(Drafting):
    """Knows what the workers guessed, and how many tokens they are asked for."""

    def __init__(self, wanted: Speculation, max_num_rows: int) -> None:
        super().__init__(wanted, max_num_rows)
        self._pass_costs = StepCosts()
        self._patience_s = 0.0

    def counts_behind(self, plan: StepPlan) -> list[int]:
        """See Drafting."""
        asking = [
            place
            for place, request in enumerate(plan.requests)
            if request.max_drafts != 0 and request.num_computed >= len(request.token_ids)
        ]
        count = self._best_count(len(asking)) if asking else 0
        if asking and not count and self._patience_s <= 0:
            asking, count = asking[-1:], min(_TRIAL, self._wanted.most_of(len(asking)))
        if not count:
            return []
        counts = [0] * len(plan.requests)
        for place in asking:
            request = plan.requests[place]
            most = count if request.max_drafts is None else min(count, request.max_drafts)
            counts[place] = max(0, min(most, request.max_total_tokens - len(request.token_ids) - 2))
        return counts

    def learn(self, plan: StepPlan, result: ModelRunnerOutput, took_s: float) -> None:
        """See Drafting; keep what the workers guessed."""
        super().learn(plan, result, took_s)
        self._patience_s -= took_s
        if (most := max(plan.num_drafts, default=0)) and result.drafts:
            if sum(plan.num_scheduled) == len(plan.requests):
                self._pass_costs.note(sum(count > 0 for count in plan.num_drafts), result.draft_s / most)
            self._patience_s = _PATIENCE * result.draft_s
        for place, token_ids in result.drafts.items():
            plan.requests[place].proposal = token_ids

    def _candidate(self, request: Request) -> Candidate | None:
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
