"""`WorkersDrafting`: drafts that the workers guess, by a model of their own.

They come with the result of a step and are verified in the next. How many to ask for is decided before, by
how often tokens at each place of a draft were right, and by what guessing and verifying have taken; none, if
that is not clearly more than without. Then one request is asked from time to time, to notice a change.
"""

from typing import NamedTuple

import numpy as np

from octavo.config.speculative import Speculation
from octavo.engine.scheduler.plan import StepPlan
from octavo.engine.scheduler.request import Request
from octavo.engine.speculation.drafting import LEAST_GAIN, Candidate, Drafting, is_usual
from octavo.engine.speculation.guess import Chances
from octavo.engine.speculation.step_costs import StepCosts
from octavo.messages.step import ModelRunnerOutput

_ASSUMED = 0.7
"""Chance of a token, given those before it in the draft, before anything was seen."""
_TRIAL = 3
"""Tokens that are asked for to learn."""
_PATIENCE = 60
"""Times as long as a trial took, there is none."""


class _Proposal(NamedTuple):
    token_ids: list[int]

    def ahead(self, count: int) -> list[int]:
        """Return the first tokens."""
        return self.token_ids[:count]


class WorkersDrafting(Drafting):
    """Knows what the workers guessed, and how many tokens they are asked for."""

    def __init__(self, wanted: Speculation, max_num_rows: int) -> None:
        super().__init__(wanted, max_num_rows)
        self._pass_costs = StepCosts()
        self._patience_s = 0.0

    @staticmethod
    def _first_chances() -> Chances:
        return Chances(_ASSUMED)

    def counts_behind(self, plan: StepPlan) -> list[int]:
        """See Drafting."""
        asking = [
            place
            for place, request in enumerate(plan.requests)
            if request.max_drafts != 0 and request.num_computed >= len(request.token_ids)
        ]
        count = self._best_count(len(asking)) if asking else 0
        if asking and not count and self._patience_s <= 0:
            asking, count = asking[-1:], min(_TRIAL, self._wanted.most)
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
        for place, request in enumerate(plan.requests):
            if token_ids := result.sampled_token_ids[place]:
                self._compare(request, token_ids)
                request.proposal = result.drafts.get(place)

    def _compare(self, request: Request, token_ids: list[int]) -> None:
        """Learn from the tokens that came which places of the draft were right, computed or not."""
        for place, (guess, token_id) in enumerate(zip(request.proposal or (), token_ids, strict=False)):
            self._chances.note(place, hit=guess == token_id)
            if guess != token_id:
                break

    def _candidate(self, request: Request) -> Candidate | None:
        most = request.max_total_tokens - len(request.token_ids) - 1
        proposal = (request.proposal or [])[: max(0, most)]
        if not proposal:
            return None
        return Candidate(request, _Proposal(proposal), self._chances.ahead(0, len(proposal), 1.0))

    def _best_count(self, num_rows: int) -> int:
        """Return how many tokens of each of `num_rows` requests bring the most tokens a second."""
        most = min(self._wanted.most, self._max_num_rows // num_rows - 1)
        if most <= 0 or (costs := self._costs.of(num_rows, num_rows * most)) is None:
            return 0
        if (pass_s := self._pass_costs.near(num_rows)) is None:
            return min(most, _TRIAL)
        counts = np.arange(most + 1)
        brought = np.concatenate(([1.0], 1 + self._chances.ahead(0, most, 1.0).cumsum()))
        rates = brought / (costs[num_rows * counts] + counts * pass_s)
        rates[1:] *= is_usual(num_rows * (1 + counts[1:]))
        best = int(rates.argmax())
        return best if rates[best] > LEAST_GAIN * rates[0] else 0
