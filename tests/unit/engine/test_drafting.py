"""What is guessed, how sure that is, and how many guesses pay."""

import gc
from collections import deque

import numpy as np
import pytest

from octavo.base.errors import ConfigError, Unsupported
from octavo.config.scheduling import SchedulerConfig
from octavo.config.speculative import Speculation, method_of, names_class, speculation, with_short
from octavo.engine.scheduler.request import Request
from octavo.engine.speculation.corpus import MOST_TOKENS, Corpus
from octavo.engine.speculation.drafting import Candidate, Drafting, Known
from octavo.engine.speculation.guess import Chances, Guess
from octavo.engine.speculation.step_costs import StepCosts
from octavo.engine.speculation.token_run import TokenRun
from tests.fakes import fake_request


def naive(tokens, end, least, most):
    """(place, length) of the latest of the longest matches, found by comparing at every place."""
    best = None
    for place in range(1, len(tokens)):
        length = 0
        while length < min(most, len(end), place) and tokens[place - length - 1] == end[-length - 1]:
            length += 1
        if length >= least and (best is None or length >= best[1]):
            best = (place, length)
    return best


def test_the_latest_of_the_longest_matches_is_found():
    noise = np.random.default_rng(0)
    for _ in range(300):
        tokens = noise.integers(0, 3, noise.integers(1, 30)).tolist()
        run, most, least = TokenRun(tokens), int(noise.integers(1, 7)), int(noise.integers(1, 4))
        found = run.find(least, most)
        assert (found and (found.place, found.length)) == naive(tokens, tokens[-most:], least, most)


def test_a_text_that_repeats_itself_goes_on():
    guess = Guess([1, 2, 3, 1, 2, 3, 1])
    guess.match = guess.own.find(1, 8)
    assert guess.ahead(7) == [2, 3, 1, 2, 3, 1, 2]
    guess.observe([2, 3], Chances())
    assert guess.match.length == 6 and guess.ahead(2) == [1, 2]
    guess.observe([9], Chances())
    assert guess.match is None and guess.ahead(3) == []


def test_earlier_outputs_are_found_until_they_are_displaced():
    corpus = Corpus(most_outputs=4)
    corpus.add([1, 2, 3, 4])
    corpus.add([7, 1, 2, 5])
    match = corpus.find([7, 1, 2])
    assert (match.length, match.run[match.place]) == (3, 5)
    match = corpus.find([9, 1, 2])
    assert (match.length, match.run[match.place]) == (2, 5), "the latest"
    assert corpus.find([3, 4]) is None, "nothing followed"
    assert corpus.find([4]) is None and corpus.find([4, 7]) is None, "two outputs"
    for _ in range(4):
        corpus.add([8, 8, 8])
    assert corpus.find([1, 2]) is None


def ended(tenant, output):
    """A request of a tenant with this output."""
    request = Request.create(fake_request("r", [1], tenant=tenant), 0, 1 << 20, 16)
    request.token_ids += output
    return request


def take(drafting, *requests):
    """Take the outputs of these requests as examples, whole; how many steps that takes."""
    for request in requests:
        drafting._keep(request)
    return sum(1 for _ in iter(lambda: drafting._ended and drafting._take_examples(), deque()))


def test_outputs_of_all_tenants_are_bounded_together():
    drafting = Drafting(speculation({"method": "suffix"}), 8)
    noise = np.random.default_rng(0)
    tenants = [f"tenant{index}" for index in range(30)]
    for tenant in tenants:
        take(drafting, ended(tenant, noise.integers(0, 50_000, 30_000).tolist()))
    kept = {tenant: drafting._corpora.get((tenant, "")) for tenant in tenants}
    assert MOST_TOKENS - 32_000 < sum(corpus.num_tokens for corpus in kept.values() if corpus) <= MOST_TOKENS
    assert kept[tenants[-1]] and not kept[tenants[0]], "who has not ended a request for longest goes first"
    for _ in range(20):
        take(drafting, ended("greedy", noise.integers(0, 50_000, 30_000).tolist()))
    assert drafting._corpora.get(("greedy", "")).num_tokens <= MOST_TOKENS // 2 + 2 * 30_001
    assert any(drafting._corpora.get((tenant, "")) for tenant in tenants), "one leaves room for others"
    for index in range(100):
        take(drafting, ended(f"small{index}", [1, 2, 3]))
    assert len(drafting._corpora) <= 64


@pytest.mark.parametrize("is_bounded", [True, False])
def test_no_step_waits_for_long_outputs_to_be_kept(monkeypatch, is_bounded):
    """By what is done between two steps, not by a clock; the negative twin takes all at once."""
    if not is_bounded:
        monkeypatch.setattr("octavo.engine.speculation.drafting._MOST_KEPT", 1 << 30)
    drafting, taken, add = Drafting(speculation({"method": "suffix"}), 8), [], Corpus.add
    monkeypatch.setattr(
        Corpus, "add", lambda corpus, ids, **given: taken.append(len(ids)) or add(corpus, ids, **given)
    )
    noise = np.random.default_rng(0)
    outputs = [noise.integers(0, 50_000, count).tolist() for count in (90_000, 700, 5, 5, 3000)]
    for output in outputs:
        drafting._keep(ended("t", output))
    most = 0
    while drafting._ended:
        taken.clear()
        drafting._take_examples()
        most = max(most, sum(taken))
    assert (most <= 1024) == is_bounded
    corpus = drafting._corpora.get(("t", ""))
    for output in outputs:  # also over the ends of pieces: so many tokens go on
        for place in range(24, len(output), 499):
            match = corpus.find(output[place - 24 : place])
            assert match.length == 24 and match.run[match.place] == output[place]
    assert corpus._young.num_outputs == len(outputs)


def test_old_outputs_go_in_no_time():
    """Their index is a few arrays: there are no objects for each token, to be freed between two steps."""
    corpus, noise = Corpus(10_000), np.random.default_rng(0)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(50):
        corpus.add(noise.integers(0, 50_000, 1000).tolist())
    assert len(gc.get_objects()) - before < 50


def test_chances_are_learned_by_length_of_match():
    chances = Chances()
    for _ in range(400):
        chances.note(3, hit=False)
        chances.note(10, hit=True)
    assert chances.of_length[3] < 0.05 and chances.of_length[10] > 0.95
    ahead = chances.ahead(3, 3, 1.0)
    assert len(ahead) == 3 and (np.diff(ahead) <= 0).all() and ahead[0] < 0.05


def test_costs_of_sizes_between_and_beyond_those_seen():
    costs = StepCosts()
    assert costs.of(1, 4) is None
    costs.note(1, 9.0)  # the first of a size is not counted
    costs.note(1, 1.0)
    assert costs.of(1, 2).tolist() == [1.0, 1.25, 1.5]
    for _ in range(2):
        costs.note(5, 3.0)
    assert costs.of(1, 6).tolist() == [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]
    for _ in range(2):
        costs.note(3, 9.0)
    assert costs.of(1, 4).tolist() == [1.0, 2.0, 3.0, 3.0, 3.0], "more rows take no less"
    for _ in range(3000):
        costs.note(1, 1.0)
    assert costs.of(1, 4)[-1] == 2.0, "sizes that did not come for long are forgotten"


@pytest.mark.parametrize(
    ("chances", "costs", "taken"),
    [
        ([0.9, 0.8, 0.7], [1.0, 1.1, 1.2, 1.3], 3),
        ([0.9, 0.8, 0.1], [1.0, 1.1, 1.2, 1.6], 2),
        ([0.3, 0.1], [1.0, 1.4, 1.8], 0),
        ([0.5], [1.0, 1.48], 0),  # not clearly more
    ],
)
def test_as_many_are_taken_as_bring_most_tokens_a_second(chances, costs, taken):
    drafting = Drafting(speculation({"method": "ngram"}), 8)
    worth = Candidate(None, None, np.array(chances)).worth
    least = drafting._least_worth([worth], 1, np.array(costs))
    assert np.count_nonzero(worth >= least) == taken


def test_many_do_not_pay_for_what_one_gains():
    """Of 16 requests drafts of one bring as many tokens as one of each of 8; only the latter are worth it."""
    drafting = Drafting(speculation({"method": "ngram"}), 64)
    costs = np.linspace(1.0, 1.2, 9)
    for chances, is_worth in (([[0.95**i for i in range(1, 9)]], False), ([[0.75]] * 8, True)):
        worth = [Candidate(None, None, np.array(each)).worth for each in chances]
        assert (drafting._least_worth(worth, 16, costs) < np.inf) == is_worth


@pytest.mark.parametrize(("num_running", "num_looked"), [(7, 200), (8, 30)])
def test_where_many_gain_nothing_guesses_are_sought_now_and_then(monkeypatch, num_running, num_looked):
    drafting, looked = Drafting(speculation({"method": "ngram"}), 64), []
    monkeypatch.setattr(Drafting, "_is_ready", lambda drafting, request: looked.append(request))
    for _ in range(200):
        assert drafting.propose(range(num_running)) == {}
    assert len(looked) == num_looked * num_running
    monkeypatch.setattr(Drafting, "_choose", lambda *args: [(Candidate("request", Known([5, 6]), None), 1)])
    assert [drafting.propose(range(8)) for _ in range(8)][-1] == {"request": [5]}
    looked.clear()
    drafting.propose(range(8))
    assert looked, "one that gained something is looked at in each step again"


NGRAM = {"method": "ngram"}
SYNTHETIC = NGRAM | {"rejection_sample_method": "synthetic"}
NO_MODEL = "provided but without speculative model"


@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        ({"method": "dspark"}, Unsupported, "speculative method: 'dspark'. Use ngram"),
        ({"method": "eagle3"}, ConfigError, NO_MODEL),
        ({"method": "magic"}, Unsupported, "Unsupported speculative method: 'magic'"),
        ({"method": "draft_model"}, ConfigError, NO_MODEL),
        ({"num_speculative_tokens": 3}, ConfigError, NO_MODEL),
        ({"prompt_lookup_max": 3}, ConfigError, NO_MODEL),
        ({"method": "ngram", "model": "x"}, ConfigError, "'ngram' takes no model"),
        ({"model": 3}, ConfigError, "model must be a text"),
        ({"model": "x", "num_speculative_tokens": -1}, ConfigError, r"greater than zero \(-1\)"),
        ({"model": "x", "parallel_drafting": True}, Unsupported, "parallel_drafting=True is not supported"),
        ({"method": "custom_class"}, ConfigError, NO_MODEL),
        (NGRAM | {"draft_sample_method": "beam"}, Unsupported, "'beam' is not supported. Use probabilistic"),
        (NGRAM | {"synthetic_acceptance_length": 3}, ConfigError, "and nothing else takes them"),
        (SYNTHETIC | {"synthetic_acceptance_length": 99}, ConfigError, "must be from 1 to 25, got 99"),
        (SYNTHETIC | {"synthetic_acceptance_rates": [0.2, 0.5]}, ConfigError, "none above the one before it"),
        (NGRAM | {"num_speculative_tokens_per_batch_size": [[2, 1, 3]]}, ConfigError, r"1 <= from <= to"),
        (NGRAM | {"num_speculative_tokens_per_batch_size": 3}, ConfigError, "got 3"),
        (NGRAM | {"num_speculative_tokens": 0}, ConfigError, r"tokens to be greater than zero \(0\)"),
        (NGRAM | {"num_speculative_tokens": 2.5}, ConfigError, "must be a whole number"),
        (NGRAM | {"num_speculative_tokens": 129}, ConfigError, "got 129"),
        (NGRAM | {"prompt_lookup_min": 5, "prompt_lookup_max": 2}, ConfigError, "be <= prompt_lookup_max=2"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 2}, ConfigError, "number from 0 to 1"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 0}, ConfigError, "number above 0"),
        (NGRAM | {"enforce_eager": True}, Unsupported, "computed as the model is, by its options"),
        (NGRAM | {"tensor_parallel_size": 2}, Unsupported, "pass 'draft_tensor_parallel_size' instead"),
        (SYNTHETIC, ConfigError, "needs either synthetic_acceptance_rates or"),
        (NGRAM | {"rejection_sample_method": "typical"}, Unsupported, "Use equality or standard or block or"),
        ({"tokens": 2}, ConfigError, "has no tokens. Known: method"),
    ],
)  # fmt: skip
def test_what_is_refused_says_why(config, error, says):
    with pytest.raises(error, match=says):
        speculation(config)


def test_what_is_left_out_has_defaults():
    assert speculation({}) is None
    assert speculation({"method": "jump_ahead"}) == Speculation("jump_ahead", 24)
    assert speculation(NGRAM) == Speculation("ngram", 24, 3, 16)
    assert speculation(NGRAM | {"enforce_eager": False, "moe_backend": "auto"}) == speculation(NGRAM)
    assert speculation(
        SYNTHETIC | {"num_speculative_tokens": 3, "synthetic_acceptance_length": 2.5}
    ).rates == (1, 0.5, 0)
    assert speculation(NGRAM | {"prompt_lookup_max": 2})[2:4] == (2, 2)
    assert speculation({"method": "suffix", "suffix_decoding_max_cached_requests": 0}).most_cached == 0
    assert speculation({"method": "suffix", "suffix_decoding_min_token_prob": 0}).least_chance == 0


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"spec_method": "ngram", "spec_tokens": 0}, ConfigError, r"greater than zero \(0\)"),
        ({"spec_method": "ngram", "spec_tokens": 129}, ConfigError, "got 129"),
        ({"spec_tokens": 3}, ConfigError, NO_MODEL),
        (
            {"spec_method": "suffix", "speculative_config": NGRAM},
            ConfigError,
            r"--spec-method and --speculative-config\['method'\] are mutually exclusive",
        ),
    ],
)
def test_short_options_are_judged_alike(given, error, says):
    with pytest.raises(error, match=says):
        speculation(with_short(given.get("speculative_config", {}), SchedulerConfig(**given)))


def test_short_options_say_the_same():
    long = {"method": "suffix", "num-speculative-tokens": 3}
    short = SchedulerConfig(spec_method="suffix", spec_tokens=3)
    assert with_short({}, short) == with_short(long, SchedulerConfig())
    assert with_short({}, SchedulerConfig()) == {}


def test_a_table_says_how_many_by_requests():
    wanted = speculation(
        NGRAM | {"num_speculative_tokens_per_batch_size": [[1, 4, 5], [5, 16, 2], [17, 99, 0]]}
    )
    assert [wanted.most_of(count) for count in (1, 4, 5, 16, 17, 200)] == [5, 5, 2, 2, 0, 24]


@pytest.mark.parametrize(
    ("draft", "method"),
    [
        ({"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}, "eagle3"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "eagle3"),
        ({"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}, "dflash"),
        ({"model_type": "eagle"}, "eagle"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
        ({"model_type": "medusa"}, "medusa"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "draft_model"),
    ],
)
def test_a_config_tells_of_its_method(draft, method):
    assert method_of(draft) == method


def test_what_can_only_be_a_class_is_one():
    assert names_class("package.module.Class")
    assert not any(map(names_class, ("org/model.v1", "smollm2", "Llama-3.2-1B.Q4", "a.2b")))
