"""`BeamSearch`: which continuations of a prompt live on. Bookkeeping only: no engine, no text, no torch.

Driven by `BeamSearchRequest`, one generation after the other: all running hypotheses are scored by the model,
`advance` chooses among their continuations. The choices are those of Hugging Face's beam search (transformers
5, `GenerationMixin._beam_search` with do_sample=False), per group of beams:

- A candidate is a hypothesis and a next token; its score is the sum of the logprobs. Of all candidates the
  best `size` that do not end run on.
- A candidate ends with an end token, or with the last token allowed. Of the best `size` candidates (whether
  they end or not) those that end are finished. The `size` best finished ones are kept, by score / length **
  length_penalty, where length counts the output tokens, the end token included.
- A group is done when no hypothesis runs any more, or when it has `size` finished ones and either
  early_stopping is True, or its best running score cannot beat the worst of them: divided by the present
  length, or by the longest with early_stopping="never" and a positive length penalty.

Diverse beam search (Vijayakumar et al. 2016, arXiv 1610.02424; Hamming diversity as Hugging Face had it): the
beams are split into groups, which take turns in each generation. From the score of a candidate is subtracted
diversity_penalty times the number of beams of the earlier groups that took the same token in this generation,
and stays subtracted. A group that is done takes no token. In the end the groups are ranked together.

How many logprobs per hypothesis suffice (`num_candidates`). A group looks at its best K = (1 + max(1, number
of end tokens)) * size candidates: at most `size` end with each end token, so `size` are left to run on.
Without penalties, the best K have rank ≤ K at their own hypothesis. With penalties on a set S of tokens, at
most one for each beam of the other groups: let t be among the best K after subtraction. A token that the
model ranks before t is either in S (at most |S| are), or it is not reduced, so it is before t after
subtraction too (at most K - 1 are). So t has rank ≤ K + |S|.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from operator import itemgetter
from typing import Literal, NamedTuple

from octavo.messages.request import TokenLogprobs

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class BeamRules:
    """What one search is to do."""

    width: int
    max_tokens: int
    end_ids: frozenset[int]
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    num_groups: int = 1
    """Divides the width."""
    diversity_penalty: float = 0.0
    num_shown: int = 0
    """Most likely tokens of each position that are kept to be shown."""

    @property
    def group_size(self) -> int:
        """Beams of one group."""
        return self.width // self.num_groups

    @property
    def num_kept(self) -> int:
        """Candidates of a group that are looked at in one generation."""
        return (1 + max(1, len(self.end_ids))) * self.group_size

    @property
    def num_candidates(self) -> int:
        """Logprobs that are needed of each running hypothesis."""
        return self.num_kept + self.width - self.group_size

    def rank(self, score: float, num_tokens: int) -> float:
        """The score by which finished hypotheses of different lengths are compared."""
        return score / math.pow(num_tokens, self.length_penalty)


@dataclass(slots=True, eq=False)
class Hypothesis:
    """An output so far: one token more than its parent's."""

    parent: "Hypothesis | None" = None
    token_id: int = -1
    num_tokens: int = 0
    score: float = 0.0
    """Sum of the logprobs, less the penalties of diversity."""
    cum_logprob: float = 0.0
    scores: TokenLogprobs | None = None
    """Of its last token, then of the most likely ones in its place."""

    def path(self) -> list["Hypothesis"]:
        """From the first token's hypothesis to this one."""
        steps: list[Hypothesis] = []
        step = self
        while step.parent is not None:
            steps.append(step)
            step = step.parent
        return steps[::-1]

    def token_ids(self) -> list[int]:
        """The output."""
        return [step.token_id for step in self.path()]


class Ranked(NamedTuple):
    """A hypothesis and the score it competes with."""

    score: float
    hypothesis: Hypothesis


class BeamSearch:
    """One prompt's search: `advance` until `is_done`, then take the `best`."""

    def __init__(self, rules: BeamRules) -> None:
        root = Hypothesis()
        self._groups = [_Group(rules, root) for _ in range(rules.num_groups)]
        self._penalty = rules.diversity_penalty

    @property
    def is_done(self) -> bool:
        """True when nothing runs any more."""
        return all(group.is_done for group in self._groups)

    @property
    def running(self) -> list[Hypothesis]:
        """The hypotheses to be scored, each once: at first there is only the empty one."""
        return list(dict.fromkeys(h for group in self._groups if not group.is_done for h in group.running))

    def advance(self, scores: Mapping[Hypothesis, TokenLogprobs]) -> None:
        """Choose the next generation.

        scores: of every running hypothesis the (at least) `num_candidates` most likely next tokens, in order,
        after the entry of the token that the engine chose
        """
        taken: Counter[int] = Counter()
        for group in self._groups:
            if not group.is_done:
                penalties = {token_id: count * self._penalty for token_id, count in taken.items()}
                taken.update(group.advance(scores, penalties))

    def best(self, count: int) -> list[Ranked]:
        """The `count` best finished hypotheses; of a search that was broken off also running ones, behind."""
        finished = [ranked for group in self._groups for ranked in group.finished]
        running = [ranked for group in self._groups if not group.is_done for ranked in group.ranked_running()]
        return [*sorted(finished, key=_score, reverse=True), *sorted(running, key=_score, reverse=True)][
            :count
        ]


class _Group:
    """Beams that compete with one another."""

    def __init__(self, rules: BeamRules, root: Hypothesis) -> None:
        self._rules = rules
        self.running = [root]
        self.finished: list[Ranked] = []
        self.is_done = False

    def advance(
        self, scores: Mapping[Hypothesis, TokenLogprobs], penalties: Mapping[int, float]
    ) -> list[int]:
        """One token more; the tokens that beams took.

        penalties: subtracted from the logprobs of these tokens
        """
        rules, size = self._rules, self._rules.group_size
        best = self._best_candidates(scores, penalties)
        is_last = best[0].num_tokens == rules.max_tokens
        going = [h for h in best if h.token_id not in rules.end_ids][:size]
        ended = [h for h in best[:size] if is_last or h.token_id in rules.end_ids]
        ranked = [Ranked(rules.rank(h.score, h.num_tokens), h) for h in ended]
        self.finished = sorted(self.finished + ranked, key=_score, reverse=True)[:size]
        self.running = [] if is_last else going
        self.is_done = not self._can_improve()
        return [h.token_id for h in going]

    def ranked_running(self) -> list[Ranked]:
        """The running hypotheses as if they ended now."""
        return [Ranked(self._rules.rank(h.score, max(1, h.num_tokens)), h) for h in self.running]

    def _best_candidates(
        self, scores: Mapping[Hypothesis, TokenLogprobs], penalties: Mapping[int, float]
    ) -> list[Hypothesis]:
        rows = [_candidates(parent, scores[parent], penalties) for parent in self.running]
        best = islice(merge(*rows, key=_score, reverse=True), self._rules.num_kept)
        return [self._chosen(*candidate, scores[candidate[1]]) for candidate in best]

    def _chosen(self, score: float, parent: Hypothesis, place: int, entry: TokenLogprobs) -> Hypothesis:
        """The hypothesis of a candidate; of all the others only those to be shown are kept."""
        end = 1 + self._rules.num_shown
        shown = TokenLogprobs(
            [entry.token_ids[place], *entry.token_ids[1:end]],
            [entry.logprobs[place], *entry.logprobs[1:end]],
            [entry.ranks[place], *entry.ranks[1:end]],
        )
        cum_logprob = parent.cum_logprob + entry.logprobs[place]
        return Hypothesis(parent, entry.token_ids[place], parent.num_tokens + 1, score, cum_logprob, shown)

    def _can_improve(self) -> bool:
        """Whether a running hypothesis may still come to be among the finished ones to keep."""
        rules = self._rules
        if not self.running:
            return False
        if len(self.finished) < rules.group_size:
            return True
        if rules.early_stopping is True:
            return False
        hopeful = rules.early_stopping == "never" and rules.length_penalty > 0
        best = self.running[0]
        attainable = rules.rank(best.score, rules.max_tokens if hopeful else best.num_tokens)
        return attainable > self.finished[-1].score


def _candidates(
    parent: Hypothesis, entry: TokenLogprobs, penalties: Mapping[int, float]
) -> Iterable[tuple[float, Hypothesis, int]]:
    """Those of one hypothesis, the best first: scores, and places in the entry."""
    base, logprobs, ids = parent.score, entry.logprobs, entry.token_ids
    if not penalties:  # they are in order, and most of them are never looked at
        return ((base + logprobs[place], parent, place) for place in range(1, len(ids)))
    reduced = [
        (base + logprobs[place] - penalties.get(ids[place], 0.0), parent, place)
        for place in range(1, len(ids))
    ]
    return sorted(reduced, key=_score, reverse=True)


_score = itemgetter(0)
