"""The bookkeeping of beam search against a plain reference that sees the whole vocabulary."""

import math

import numpy as np
import pytest

from octavo.base.errors import RequestError
from octavo.frontend.beam_search.params import BeamSearchParams, check_beam_search
from octavo.frontend.beam_search.rules import BeamRules, BeamSearch
from octavo.messages.request import TokenLogprobs
from octavo.messages.sampling import SamplingParams

VOCAB = 24
NEVER = -1e9


def make_model(seed, peakedness=2.0):
    """Logprobs of the next token as a pure function of the output so far."""

    def model(output):
        logits = np.random.default_rng([seed, *output]).normal(size=VOCAB) * peakedness
        return logits - np.log(np.exp(logits).sum())

    return model


def search(model, rules):
    beams = BeamSearch(rules)
    num_scored = 0
    while not beams.is_done:
        scores = {}
        for hypothesis in beams.running:
            logprobs = model(hypothesis.token_ids())
            best = np.argsort(-logprobs, kind="stable")[: rules.num_candidates].tolist()
            ids = [best[0], *best]
            scores[hypothesis] = TokenLogprobs(ids, logprobs[ids].tolist(), [1, *range(1, len(best) + 1)])
        num_scored += len(scores)
        beams.advance(scores)
    return [(score, h.token_ids(), h.cum_logprob) for score, h in beams.best(rules.width)], num_scored


def reference(model, rules):
    """Matrices of fixed size, one row per beam; the whole vocabulary; nothing is cut off."""
    size = rules.width // rules.num_groups
    keep = max(2, 1 + len(rules.end_ids)) * size
    groups = [
        {"rows": [[]] * size, "scores": np.array([0.0] + [NEVER] * (size - 1)), "finished": [], "done": False}
        for _ in range(rules.num_groups)
    ]
    for length in range(1, rules.max_tokens + 1):
        chosen = np.zeros(VOCAB)
        for group in groups:
            if group["done"]:
                continue
            table = np.stack([model(row) for row in group["rows"]]) - rules.diversity_penalty * chosen
            flat = (table + group["scores"][:, None]).ravel()
            order = np.argsort(-flat, kind="stable")[:keep]
            candidates = [(flat[i], group["rows"][i // VOCAB] + [int(i % VOCAB)]) for i in order]
            ends = [row[-1] in rules.end_ids or length == rules.max_tokens for _, row in candidates]
            new = [
                (score / length**rules.length_penalty, row)
                for rank, (score, row) in enumerate(candidates)
                if ends[rank] and rank < size
            ]
            group["finished"] = sorted(group["finished"] + new, key=lambda pair: -pair[0])[:size]
            for _, row in [c for c in candidates if c[1][-1] not in rules.end_ids][:size]:
                chosen[row[-1]] += 1
            going = [c for c, end in zip(candidates, ends, strict=True) if not end][:size]
            if not going:
                group["done"] = True
                continue
            group["rows"], group["scores"] = [row for _, row in going], np.array([s for s, _ in going])
            if len(group["finished"]) == size:
                horizon = length
                if rules.early_stopping == "never" and rules.length_penalty > 0:
                    horizon = rules.max_tokens
                hopeless = going[0][0] / horizon**rules.length_penalty <= group["finished"][-1][0]
                group["done"] = rules.early_stopping is True or hopeless
    pooled = sorted((pair for group in groups for pair in group["finished"]), key=lambda pair: -pair[0])
    return pooled[: rules.width]


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -1.0])
@pytest.mark.parametrize(
    ("width", "num_groups", "diversity_penalty"),
    [(1, 1, 0.0), (2, 1, 0.0), (5, 1, 0.0), (4, 2, 0.5), (6, 3, 5.0), (4, 4, 1.0)],
)
def test_it_equals_the_reference(width, num_groups, diversity_penalty, length_penalty, early_stopping):
    for seed in range(12):
        rules = BeamRules(
            width=width,
            max_tokens=1 + seed,
            end_ids=frozenset([(), (3,), (3, 11, 7)][seed % 3]),
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            num_groups=num_groups,
            diversity_penalty=diversity_penalty,
        )
        model = make_model(seed, peakedness=1.0 + seed % 2)
        found, _ = search(model, rules)
        wanted = reference(model, rules)
        assert [tokens for _, tokens, _ in found] == [tokens for _, tokens in wanted]
        assert [score for score, _, _ in found] == pytest.approx([score for score, _ in wanted])
        for _, tokens, cum_logprob in found:
            own = sum(model(tokens[:i])[token] for i, token in enumerate(tokens))
            assert cum_logprob == pytest.approx(own), "penalties are no part of a sequence's probability"


def test_every_group_finds_another_token():
    """Each group's favourites are those that the earlier groups have taken."""
    rules = BeamRules(width=4, max_tokens=1, end_ids=frozenset(), num_groups=4, diversity_penalty=1e6)
    assert rules.num_candidates == 2 + 3
    found, _ = search(make_model(0), rules)
    assert len({tokens[0] for _, tokens, _ in found}) == 4


def test_the_first_generation_is_scored_once():
    rules = BeamRules(width=4, max_tokens=3, end_ids=frozenset(), num_groups=2, diversity_penalty=1.0)
    assert search(make_model(0), rules)[1] == 1 + 4 + 4


def test_enough_run_on_when_everything_wants_to_end():
    """Each beam's favourites are the end tokens; a full set of beams must still go on behind them."""
    end_ids = frozenset({0, 1})

    def model(output):
        logits = np.arange(VOCAB, 0, -1.0)
        return logits - np.log(np.exp(logits).sum())

    rules = BeamRules(width=3, max_tokens=4, end_ids=end_ids, early_stopping="never", length_penalty=4.0)
    beams = BeamSearch(rules)
    for _ in range(3):
        scores = {}
        for hypothesis in beams.running:
            logprobs = model(hypothesis.token_ids())[: rules.num_candidates].tolist()
            ids = list(range(rules.num_candidates))
            scores[hypothesis] = TokenLogprobs([0, *ids], [logprobs[0], *logprobs], [1, *ids])
        beams.advance(scores)
        assert len(beams.running) == 3
        assert not end_ids & {hypothesis.token_id for hypothesis in beams.running}


def test_a_broken_off_search_shows_what_it_has():
    beams = BeamSearch(BeamRules(width=2, max_tokens=9, end_ids=frozenset({5})))
    assert [h.token_ids() for _, h in beams.best(2)] == [[]]
    ids = [7, 7, 5, 1, 2]
    logprobs = [-0.5, -0.5, -1.0, -2.0, -3.0]
    beams.advance(dict.fromkeys(beams.running, TokenLogprobs(ids, logprobs, [1, 1, 2, 3, 4])))
    assert [(h.token_ids(), score) for score, h in beams.best(3)] == [([5], -1.0), ([7], -0.5), ([1], -2.0)]


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 10**6}, "beam_width"),
        ({"beam_width": 2.0}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"beam_width": 65}, "beam_width"),
        ({"temperature": 0.7}, "temperature"),
        ({"length_penalty": math.nan}, "length_penalty"),
        ({"length_penalty": 1e9}, "length_penalty"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"early_stopping": None}, "early_stopping"),
        ({"num_beam_groups": 3, "diversity_penalty": 1.0}, "num_beam_groups"),
        ({"num_beam_groups": 2}, "diversity_penalty"),
        ({"diversity_penalty": 1.0}, "diversity_penalty"),
        ({"diversity_penalty": -1.0, "num_beam_groups": 2}, "diversity_penalty"),
        ({"diversity_penalty": "much", "num_beam_groups": 2}, "diversity_penalty"),
    ],
)
def test_wrong_parameters_are_refused(options, parameter):
    with pytest.raises(RequestError) as refused:
        BeamSearchParams(**({"beam_width": 4, "max_tokens": 8} | options))
    assert refused.value.parameter == parameter


@pytest.mark.parametrize(
    "options",
    [
        {"stop": "x"},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"min_tokens": 2},
        {"logit_bias": {1: 1.0}},
        {"allowed_token_ids": [1]},
        {"forbidden_token_ids": [1]},
        {"bad_words": ["x"]},
        {"prompt_logprobs": 1},
    ],
)
def test_what_cannot_be_combined_is_refused(options):
    params = SamplingParams(use_beam_search=True, best_of=4, n=2, temperature=0, **options)
    with pytest.raises(RequestError, match="cannot be used with beam search") as refused:
        check_beam_search(params)
    assert refused.value.parameter == next(iter(options))


def test_what_has_no_effect_is_refused():
    for options in ({"length_penalty": 2.0}, {"early_stopping": True}, {"num_beam_groups": 2}):
        with pytest.raises(RequestError, match="not effective"):
            check_beam_search(SamplingParams(**options))
    with pytest.raises(RequestError, match="temperature must be 0 when using beam search"):
        check_beam_search(SamplingParams(use_beam_search=True, best_of=4))


def test_the_widest_search_is_bounded_and_keeps_only_what_it_shows():
    with pytest.raises(RequestError, match="at most 64 beams"):
        check_beam_search(SamplingParams(n=1000, use_beam_search=True, temperature=0.0))
    rules = BeamRules(width=64, max_tokens=9, end_ids=frozenset([0]), num_shown=2)
    beams, logprobs = BeamSearch(rules), [-0.01 * i for i in range(rules.num_candidates + 1)]
    ids = list(range(1, len(logprobs) + 1))
    for _ in range(4):
        beams.advance(dict.fromkeys(beams.running, TokenLogprobs(ids, logprobs, ids)))
    assert {len(h.scores.token_ids) for leaf in beams.running for h in leaf.path()} == {3}
