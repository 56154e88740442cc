"""`Drafting`: which tokens to guess for the requests of a step, and how many are worth it.

Asked by the scheduler before it plans a step, and told what came of it. A draft costs a row of the step; it
brings a token with some chance. So many are taken as bring the most tokens a second, by what steps of that
size have taken and by how often such guesses were right; none, if that is not clearly more than without.
Tokens a second are those of a request in the geometric mean: what one gains, many others should not pay for.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from octavo.base.lru import LRU
from octavo.config.speculative import Speculation
from octavo.engine.scheduler.plan import StepPlan
from octavo.engine.scheduler.request import Request
from octavo.engine.speculation.corpus import MOST_TOKENS, Corpus
from octavo.engine.speculation.guess import Chances, Guess
from octavo.engine.speculation.step_costs import StepCosts
from octavo.engine.speculation.token_run import Array
from octavo.messages.request import SchedulerStats
from octavo.messages.step import ModelRunnerOutput

LEAST_GAIN = 1.03
_ASSUMED = 0.7
"""Chance of a token that somebody else expects, given those before it, before anything was seen."""
_MOST_KEPT = 512
"""Tokens of ended requests that are taken as examples between two steps, so that none is late for them."""
_MANY, _PATIENCE, _REST = 8, 8, 4
"""Where so many run and so often in a row no guess was worth it, one step in so many looks for some."""
_LONG, _LONG_REST = 64, 16
"""The same where it was not for long."""
_MOST_TENANTS = 64
"""Whose outputs are kept, however few they are."""


class Ahead(Protocol):
    """What is expected to follow."""

    def ahead(self, count: int) -> list[int]:
        """Return up to `count` tokens."""


class Known(NamedTuple):
    """Tokens that somebody else expects."""

    token_ids: list[int]

    def ahead(self, count: int) -> list[int]:
        """Return the first tokens."""
        return self.token_ids[:count]


class Behind(NamedTuple):
    """What is expected behind the tokens that steps in flight bring, if these come as expected."""

    guess: Ahead
    num_pending: int

    def ahead(self, count: int) -> list[int]:
        """Return up to `count` tokens."""
        return self.guess.ahead(self.num_pending + count)[self.num_pending :]


class Candidate(NamedTuple):
    """A request whose next tokens may be guessed, with the chances that 1, 2, … of them come."""

    request: Request
    guess: Ahead
    chances: Array

    @property
    def worth(self) -> Array:
        """Return what each of them adds to the logarithm of the request's pace."""
        worth: Array = np.log1p(self.chances.cumsum())
        worth[1:] -= worth[:-1].copy()
        return worth


class Drafting:
    """The guesses of one engine, and what it learned from them."""

    def __init__(self, wanted: Speculation, max_num_rows: int, *, runs_ahead: bool = False) -> None:
        """max_num_rows: of one step; runs_ahead: the next is planned before drafts are known to be true"""
        self._wanted, self._max_num_rows, self._runs_ahead = wanted, max_num_rows, runs_ahead
        self._chances, self._costs = Chances(), StepCosts()
        self._known_chances = Chances(_ASSUMED)
        self._corpora: LRU[tuple[str, str], Corpus] = LRU(MOST_TOKENS)
        self._ended: deque[tuple[tuple[str, str], list[int], int]] = deque(maxlen=1024)
        """Tenants and examples that are still to be taken, from a place on; the oldest go first."""
        self._num_drafts = self._num_draft_tokens = self._num_running = self._num_vain = 0
        self._num_accepted: list[int] = []
        """By place in the draft, as far as any came true."""

    def counts_behind(self, plan: StepPlan) -> list[int]:
        """Return how many tokens the workers shall guess, by place in the plan; [] = none."""
        return []

    def propose(self, running: Sequence[Request]) -> dict[Request, list[int]]:
        """Return tokens that are worth computing behind the last one, for those requests that get some."""
        self._num_running, self._num_vain = len(running), self._num_vain + 1
        rest = _REST if self._num_vain < _LONG else _LONG_REST
        if len(running) >= _MANY and self._num_vain > _PATIENCE and self._num_vain % rest:
            return {}
        ready = [request for request in running if self._is_ready(request)]
        candidates = [found for request in ready if (found := self._candidate(request)) is not None]
        if self._runs_ahead:
            pending = [request for request in running if request.num_in_flight and request.matcher is None]
            candidates += self._candidates_behind(pending)
        if chosen := self._choose(candidates, len(running)):
            self._num_vain = 0
        return {each.request: each.guess.ahead(count) for each, count in chosen}

    def awaits_results(self, running: Sequence[Request]) -> bool:
        """Return True if the next step should be planned with the tokens of the steps in flight.

        Else those whose drafts are verified would miss it, or drafts that are worth computing. A grammar has
        to see the tokens; other requests do not wait, where steps are planned ahead.
        """
        pending = [each for each in running if each.num_in_flight]
        if self._runs_ahead:
            pending = [each for each in pending if each.matcher is not None]
        return any(request.num_unsure for request in pending) or bool(self.awaited(pending, len(running)))

    def awaited(self, pending: Iterable[Request], num_running: int) -> set[Request]:
        """Return those of which drafts are worth computing behind what their steps in flight bring."""
        self._num_running = num_running
        return {each.request for each, _ in self._choose(self._candidates_behind(pending), num_running)}

    def _candidates_behind(self, pending: Iterable[Request]) -> list[Candidate]:
        """Return what may follow the tokens of steps in flight, if these are what is expected."""
        candidates = []
        for request in pending:
            num_pending = request.num_pending + request.num_unsure
            if not (request.num_pending and request.is_decoding) or request.max_drafts == 0:
                continue
            if (found := self._candidate(request, num_pending)) is not None:
                guess, chances = Behind(found.guess, num_pending), found.chances[num_pending:]
                candidates.append(Candidate(request, guess, chances))
        return candidates

    def _choose(self, candidates: list[Candidate], num_rows: int) -> list[tuple[Candidate, int]]:
        """Return whose next tokens are computed ahead, and how many."""
        num_more = min(self._max_num_rows - num_rows, sum(len(each.chances) for each in candidates))
        if not self._wanted.adapts:
            most = max(0, self._max_num_rows - num_rows) // max(1, len(candidates))
            return [(each, min(most, len(each.chances))) for each in candidates if most and len(each.chances)]
        most_gain = 1 + sum(float(each.chances.sum()) for each in candidates) / max(1, num_rows)
        if num_more <= 0 or most_gain <= LEAST_GAIN:  # even if they cost nothing
            return []
        if (costs := self._costs.of(num_rows, num_more)) is None:
            return []
        worth = [each.worth for each in candidates]
        least = self._least_worth(worth, num_rows, costs)
        counts = (int(np.count_nonzero(each >= least)) for each in worth)
        return [(each, count) for each, count in zip(candidates, counts, strict=True) if count]

    def learn(self, plan: StepPlan, result: ModelRunnerOutput, took_s: float) -> None:
        """Take note of a step that was read: what it took, which drafts came true, who ended."""
        for place, drafts in plan.drafts.items():
            num_drafts = result.num_drafts[place] if result.num_drafts else len(drafts)
            self._num_drafts += num_drafts > 0
            self._num_draft_tokens += num_drafts
            num_accepted = len(result.sampled_token_ids[place]) - 1
            self._num_accepted += [0] * (num_accepted - len(self._num_accepted))
            for number in range(num_accepted):
                self._num_accepted[number] += 1
            plan.requests[place].drafts.note(num_drafts, num_accepted)  # its last output has these counts
        num_requests = len(plan.requests)
        if sum(plan.num_scheduled) == num_requests:
            num_rows = num_requests + sum(map(len, plan.drafts.values()))
            self._costs.note(num_rows, took_s - result.draft_s)
        for request, token_ids in zip(plan.requests, result.sampled_token_ids, strict=True):
            self._compare(request, token_ids)
            if request.is_finished:
                self._keep(request)
        self._take_examples()

    def count(self, stats: SchedulerStats) -> None:
        """Enter what was guessed since the start."""
        stats.num_drafts, stats.num_draft_tokens = self._num_drafts, self._num_draft_tokens
        stats.num_accepted_by_position = list(self._num_accepted)
        stats.num_accepted_tokens = sum(stats.num_accepted_by_position)

    def _compare(self, request: Request, token_ids: list[int]) -> None:
        """Learn which places of a proposal were right, computed or not."""
        if token_ids and request.proposal:
            for place, (guess, token_id) in enumerate(zip(request.proposal, token_ids, strict=False)):
                self._known_chances.note(place, hit=guess == token_id)
                if guess != token_id:
                    break
            request.proposal = None

    def _propose_known(self, request: Request, token_ids: list[int]) -> Candidate | None:
        request.proposal = token_ids[: max(0, self._most(request))]
        chances = self._known_chances.ahead(0, len(request.proposal), 1.0)
        return Candidate(request, Known(request.proposal), chances) if request.proposal else None

    def _keep(self, request: Request) -> None:
        """Take an ended request's output, and what of the prompt leads to it, as an example for others."""
        if self._wanted.most_cached and request.num_output_tokens > 1:
            first = max(0, request.num_prompt_tokens - self._wanted.most_match)
            self._ended.append((_tenant(request), request.token_ids[first:], 0))

    def _take_examples(self) -> None:
        """Take some of what has ended, in pieces that overlap, so that matches go on from one to the next."""
        room = _MOST_KEPT
        while self._ended and room > 0:
            key, token_ids, first = self._ended.popleft()
            corpus = self._corpora.get(key) or Corpus(self._wanted.most_cached)
            corpus.add(token_ids[first : first + room + self._wanted.most_match], is_new=not first)
            self._corpora.put(key, corpus, max(corpus.num_tokens, MOST_TOKENS // _MOST_TENANTS))
            if len(token_ids) > first + room + self._wanted.most_match:
                self._ended.appendleft((key, token_ids, first + room))
            room -= len(token_ids) - first

    def _is_ready(self, request: Request) -> bool:
        """Return True if all its tokens are known and only the last is not computed."""
        is_next = request.num_computed + 1 == len(request.token_ids) and not request.num_in_flight
        return is_next and request.max_drafts != 0 and request.is_decoding

    def _candidate(self, request: Request, num_pending: int = 0) -> Candidate | None:
        """Return what may follow; the first tokens of it are those that steps in flight bring."""
        if request.matcher is not None and (forced := request.matcher.forced()):
            return self._propose_known(request, forced)
        guess = request.guess
        if guess is None:
            guess = request.guess = Guess(request.token_ids)
        else:
            guess.observe(request.token_ids[len(guess.own) :], self._chances)
        if guess.match is None or guess.match.length < self._wanted.least_match:
            self._search(request, guess)
        most = self._most(request, guess, num_pending)
        if guess.match is None or most <= 0 or not (count := len(guess.ahead(most + num_pending))):
            return None
        chances = self._chances.ahead(guess.match.length, count, guess.factor)
        return Candidate(request, guess, chances[chances >= self._wanted.least_chance])

    def _most(self, request: Request, guess: Guess | None = None, num_pending: int = 0) -> int:
        num_left = request.max_total_tokens - len(request.token_ids) - num_pending - 1
        most = min(self._wanted.most_of(self._num_running), num_left)
        most = most if request.max_drafts is None else min(most, request.max_drafts)
        if self._wanted.most_factor and guess is not None and guess.match is not None:
            most = min(most, int(self._wanted.most_factor * guess.match.length))
        return most

    def _search(self, request: Request, guess: Guess) -> None:
        wanted = self._wanted
        if not wanted.most_match:
            return  # what is forced is all that is guessed
        corpus = self._corpora.get(_tenant(request)) if wanted.most_cached else None
        for found in (
            guess.own.find(wanted.least_match, wanted.most_match),
            None if corpus is None else corpus.find(guess.own.last(wanted.most_match)),
        ):
            if found is not None and (guess.match is None or found.length > guess.match.length):
                guess.match = found

    def _least_worth(self, worth: Sequence[Array], num_rows: int, costs: Array) -> float:
        """Return what drafts must be worth so that computing them brings most tokens per second."""
        most_first = -np.sort(-np.concatenate(worth))[: len(costs) - 1]
        rates = np.exp(np.concatenate(([0.0], most_first.cumsum())) / num_rows) / costs
        rates[1:] *= is_usual(num_rows + np.arange(1, len(rates)))
        best = int(rates.argmax())
        return float(most_first[best - 1]) if best and rates[best] > LEAST_GAIN * rates[0] else np.inf


def _tenant(request: Request) -> tuple[str, str]:
    """Return whose outputs it may see: a text must not be visible in another's timing."""
    return request.standing.tenant, request.sharing.cache_salt


def is_usual(sizes: Array) -> Array:
    """Return where sizes are 2^k or 3 * 2^k: of few sizes the costs are soon known, and few are recorded."""
    odd = sizes // (sizes & -sizes)
    usual: Array = (odd == 1) | (odd == 3)
    return usual
