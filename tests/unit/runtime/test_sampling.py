"""The sampler: processors against plain formulas, logprobs, slots that change hands, rows that fail alone."""

import random

import numpy as np
import pytest
import torch

from octavo.messages.sampling import SamplingParams
from octavo.runtime.kernels.choice import TORCH_SAMPLING
from octavo.runtime.sampling.logprobs import score_tokens
from octavo.runtime.sampling.processors import Processor
from octavo.runtime.sampling.sampler import PROCESSORS, Sampler
from tests.sampling_reference import Case, distribution, processed, softmax

VOCAB = 61
CPU = torch.device("cpu")

FEATURES = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"frequency_penalty": 0.4},
    {"frequency_penalty": -0.6},
    {"presence_penalty": 1.5},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": -0.2},
    {"logit_bias": {3: 4.0, 9: -100, 11: 0.5}},
    {"allowed_token_ids": [2, 3, 4, 5, 60]},
    {"forbidden_token_ids": [1, 2, 3, 60]},
    {"min_tokens": 4},
    {"bad_words_token_ids": [[7], [5, 6], [4, 4, 4], [8, 6], [9, 5, 6]]},
    {
        "allowed_token_ids": list(range(2, 30)),
        "forbidden_token_ids": [4],
        "bad_words_token_ids": [[5, 6], [6, 6]],
        "min_tokens": 3,
        "logit_bias": {5: 3.0, 6: 3.0, 50: 9.0},
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
    },
]
SHAPES = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.4, "top_k": 9},
    {"temperature": 0.7, "top_p": 0.8, "min_p": 0.02},
]


def logits_of(name: int, position: int, vocab_size: int = VOCAB) -> torch.Tensor:
    """What a model would say at a position: a function of the request and the position alone."""
    generator = torch.Generator().manual_seed(1000 * name + position)
    logits = torch.randn(vocab_size, generator=generator) * 3
    logits[[0, 4, 5, 6]] += 3  # so that end of text and the bad words come up
    return logits


def step(sampler: Sampler, logits: list[torch.Tensor], slots: list[int], positions: list[int]):
    return sampler.sample(torch.stack(logits), slots, positions).to_host()


def alone(name: int, case: Case, num_tokens: int, vocab_size: int = VOCAB) -> list[tuple]:
    """What a request gets from a sampler of its own: (token, logprobs) per position."""
    sampler = Sampler(vocab_size, 1, CPU, TORCH_SAMPLING)
    sampler.add(0, case.message())
    results = []
    for position in range(num_tokens):
        host = step(sampler, [logits_of(name, position, vocab_size)], [0], [position])
        results.append((host.token_ids[0], host.logprobs.get(0)))
    return results


@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_processors_follow_the_formulas(features):
    """Twelve greedy steps: the processed logits are the oracle's, and the token is their maximum."""
    params = SamplingParams(temperature=0, logprobs=-1, **features)
    case = Case(params, prompt=[1, 2, 2, 9, 11], stop_ids=[0, 13])
    sampler = Sampler(VOCAB, 5, CPU, TORCH_SAMPLING, "processed_logits")
    sampler.add(3, case.message())
    for position in range(12):
        logits = logits_of(7, position)
        expected = processed(logits.numpy(), case)
        host = step(sampler, [logits], [3], [position])
        shown = dict(zip(host.logprobs[0].token_ids, host.logprobs[0].logprobs, strict=True))
        np.testing.assert_allclose([shown[token] for token in range(VOCAB)], expected, rtol=1e-6, atol=1e-6)
        assert host.token_ids == [int(np.argmax(expected))]
        case.outputs.append(host.token_ids[0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_processed_logprobs_are_the_distribution_drawn_from(shape):
    params = SamplingParams(logprobs=-1, repetition_penalty=1.2, logit_bias={5: 1.5}, **shape)
    sampler = Sampler(VOCAB, 1, CPU, TORCH_SAMPLING, "processed_logprobs")
    case = Case(params, prompt=[4, 5])
    sampler.add(0, case.message())
    host = step(sampler, [logits_of(1, 0)], [0], [0])
    shown = dict(zip(host.logprobs[0].token_ids, host.logprobs[0].logprobs, strict=True))
    x = processed(logits_of(1, 0).numpy(), case)
    expected = softmax(x) if params.greedy else distribution(x, params)
    np.testing.assert_allclose(np.exp([shown[token] for token in range(VOCAB)]), expected, atol=1e-6)


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits"])
def test_raw_logprobs(mode):
    """Taken before any processor: chosen token first, then the most likely with their ranks."""
    sampler = Sampler(VOCAB, 4, CPU, TORCH_SAMPLING, mode)
    for slot, number in enumerate([0, 3, None, -1]):
        params = SamplingParams(temperature=1.5, logprobs=number, logit_bias={8: 100.0})
        sampler.add(slot, Case(params, seed=slot).message())
    logits = [logits_of(slot, 0) for slot in range(4)]
    host = step(sampler, logits, [0, 1, 2, 3], [0] * 4)
    assert host.token_ids == [8] * 4
    assert 2 not in host.logprobs
    for row, size in ((0, 0), (1, 3), (3, VOCAB)):
        entry = host.logprobs[row]
        values = logits[row] if mode == "raw_logits" else torch.log_softmax(logits[row].double(), 0)
        order = torch.argsort(values, descending=True).tolist()
        assert entry.token_ids == [8, *order[:size]]
        assert entry.ranks == [1 + order.index(8), *range(1, size + 1)]
        np.testing.assert_allclose(entry.logprobs, values[entry.token_ids], rtol=1e-5, atol=1e-5)


def test_prompt_scores_leave_the_logits_alone():
    logits = torch.stack([logits_of(0, position) for position in range(5)])
    before = logits.clone()
    targets = torch.tensor([3, 1, 4, 1, 60])
    entries = score_tokens(logits, targets, 2, "raw_logprobs")
    assert torch.equal(logits, before)
    expected = torch.log_softmax(logits.double(), 1)
    for row, entry in enumerate(entries):
        best = expected[row].topk(2).indices.tolist()
        assert entry.token_ids == [targets[row].item(), *best]
        assert entry.ranks == [1 + int((expected[row] > expected[row, targets[row]]).sum()), 1, 2]
        np.testing.assert_allclose(entry.logprobs, expected[row, entry.token_ids], atol=1e-5)


def cases() -> list[Case]:
    """Every feature with every shape, some with logprobs."""
    mixed = []
    for number, (features, shape) in enumerate((f, s) for f in [{}, *FEATURES] for s in SHAPES):
        params = SamplingParams(logprobs=[None, 0, 2][number % 3], **features, **shape)
        mixed.append(Case(params, prompt=list(range(1, 2 + number % 20)), seed=number * 7919))
    return mixed


@pytest.fixture(scope="module")
def alone_results() -> list[list[tuple]]:
    return [alone(name, case, 9) for name, case in enumerate(cases())]


@pytest.mark.parametrize("seed", range(4))
def test_slots_change_hands(seed, alone_results):
    """Requests come, go, are preempted and resumed, in any subset and order: each gets what it gets alone."""
    rng = random.Random(seed)
    all_cases = cases()
    sampler = Sampler(VOCAB, 8, CPU, TORCH_SAMPLING)
    waiting = list(range(len(all_cases)))
    rng.shuffle(waiting)
    results: dict[int, list[tuple]] = {name: [] for name in waiting}
    running: dict[int, int] = {}  # request -> slot
    while waiting or running:
        free = [slot for slot in range(8) if slot not in running.values()]
        for slot in rng.sample(free, len(free)):
            if waiting:
                name = waiting.pop()
                sampler.add(slot, all_cases[name].message())
                running[name] = slot
        rows = rng.sample(sorted(running), rng.randint(1, len(running)))
        positions = [len(results[name]) for name in rows]
        logits = [logits_of(name, position) for name, position in zip(rows, positions, strict=True)]
        host = step(sampler, logits, [running[name] for name in rows], positions)
        for row, name in enumerate(rows):
            results[name].append((host.token_ids[row], host.logprobs.get(row)))
            all_cases[name].outputs.append(host.token_ids[row])
            if len(results[name]) == 9:
                sampler.remove(running.pop(name))
            elif rng.random() < 0.15:
                sampler.remove(running.pop(name))
                waiting.insert(rng.randrange(len(waiting) + 1), name)
    for name, case in enumerate(cases()):
        assert results[name] == alone_results[name], (name, case)


def test_a_slot_may_be_given_away_without_remove(alone_results):
    """`add` alone is enough to end the former owner."""
    sampler = Sampler(VOCAB, 1, CPU, TORCH_SAMPLING)
    for name, case in enumerate(cases()):
        sampler.add(0, case.message())
        got = []
        for position in range(3):
            host = step(sampler, [logits_of(name, position)], [0], [position])
            got.append((host.token_ids[0], host.logprobs.get(0)))
        assert got == alone_results[name][:3]


@pytest.mark.parametrize("vocab_size", [1000, 1009])
def test_a_row_is_bitwise_independent_of_the_others(vocab_size):
    """1 … 64 rows in one call, all shapes mixed: tokens and logprobs as one row at a time."""
    shapes = [*SHAPES, {"temperature": 1.0, "top_p": 0.98}, {"temperature": 0.9, "top_k": 300}]
    params = [SamplingParams(logprobs=5, presence_penalty=0.1, **shapes[i % len(shapes)]) for i in range(64)]
    sampler = Sampler(vocab_size, 64, CPU, TORCH_SAMPLING)
    logits = [logits_of(row, 0, vocab_size) * 0.4 for row in range(64)]

    def fresh(rows: list[int]):
        for row in rows:
            sampler.add(row, Case(params[row], seed=row).message())
        host = step(sampler, [logits[row] for row in rows], rows, [5] * len(rows))
        return [(token_id, host.logprobs[row]) for row, token_id in enumerate(host.token_ids)]

    single = [fresh([row])[0] for row in range(64)]
    for count in (2, 3, 5, 8, 13, 33, 64):
        rows = random.Random(count).sample(range(64), count)
        assert fresh(rows) == [single[row] for row in rows]


def test_greedy_takes_the_lowest_of_equal_ids():
    sampler = Sampler(VOCAB, 1, CPU, TORCH_SAMPLING)
    sampler.add(0, Case(SamplingParams(temperature=0)).message())
    logits = torch.zeros(VOCAB)
    logits[[9, 30, 60]] = 5.0
    assert step(sampler, [logits], [0], [0]).token_ids == [9]


@pytest.mark.parametrize("shape", [*SHAPES, {"temperature": 1.0, "top_p": 0.5}], ids=str)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_poisoned_row_fails_alone(shape, poison):
    vocab_size = 512
    sampler = Sampler(vocab_size, 3, CPU, TORCH_SAMPLING)
    case = Case(SamplingParams(logprobs=1, frequency_penalty=0.5, **shape), seed=5)
    for slot in range(3):
        sampler.add(slot, case.message())
    logits = [logits_of(slot, 0, vocab_size) for slot in range(3)]
    logits[1][77] = poison
    host = step(sampler, logits, [0, 1, 2], [0] * 3)
    assert host.errors.keys() == {1} and host.errors[1].startswith("numerics")
    assert 1 not in host.logprobs
    for row in (0, 2):
        assert (host.token_ids[row], host.logprobs.get(row)) == alone(row, case, 1, vocab_size)[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_constraints_that_leave_nothing_fail_alone(shape):
    sampler = Sampler(VOCAB, 2, CPU, TORCH_SAMPLING)
    sampler.add(0, Case(SamplingParams(allowed_token_ids=[5], forbidden_token_ids=[5], **shape)).message())
    sampler.add(1, Case(SamplingParams(allowed_token_ids=[5], **shape)).message())
    host = step(sampler, [logits_of(0, 0)] * 2, [0, 1], [0, 0])
    assert host.errors.keys() == {0} and host.errors[0].startswith("No token may be chosen")
    assert host.token_ids[1] == 5


def test_ids_without_a_logit_touch_no_neighbour():
    """A tokenizer may know more tokens than the model has logits."""
    wide = [VOCAB, VOCAB + 5, 10**6]
    params = SamplingParams(
        temperature=0,
        forbidden_token_ids=wide,
        bad_words_token_ids=[[w] for w in wide],
        logit_bias=dict.fromkeys(wide, -100.0),
        repetition_penalty=1.5,
        min_tokens=3,
    )
    sampler = Sampler(VOCAB, 2, CPU, TORCH_SAMPLING, "processed_logits")
    sampler.add(0, Case(params, prompt=wide, stop_ids=wide).message())
    neighbour = SamplingParams(temperature=0, logprobs=-1)
    sampler.add(1, Case(neighbour).message())
    host = step(sampler, [logits_of(0, 0), logits_of(1, 0)], [0, 1], [0, 0])
    assert host.token_ids[0] == int(logits_of(0, 0).argmax())
    shown = dict(zip(host.logprobs[1].token_ids, host.logprobs[1].logprobs, strict=True))
    assert [shown[token] for token in range(VOCAB)] == logits_of(1, 0).tolist()


def test_other_dtypes_are_read_only():
    sampler = Sampler(VOCAB, 1, CPU, TORCH_SAMPLING)
    sampler.add(0, Case(SamplingParams(logit_bias={1: 5.0})).message())
    logits = logits_of(0, 0).bfloat16()[None]
    before = logits.clone()
    sampler.sample(logits, [0], [0])
    assert torch.equal(logits, before)


def test_same_seed_and_position_give_the_same_noise_in_any_slot():
    sampler = Sampler(VOCAB, 6, CPU, TORCH_SAMPLING)
    for slot in range(6):
        sampler.add(slot, Case(SamplingParams(), seed=slot // 3).message())
    first = step(sampler, [torch.zeros(VOCAB)] * 6, [5, 4, 3, 2, 1, 0], [9] * 6).token_ids
    assert first[0] == first[1] == first[2] != first[3] == first[4] == first[5]


class OnlyEven(Processor):
    """A custom processor, as users write them."""

    def is_active(self, params):
        return bool(params.extra_args and params.extra_args.get("only_even"))

    def add(self, slot, request):
        pass

    def remove(self, slot):
        pass

    def apply(self, logits, batch):
        rows = torch.from_numpy(batch.rows)
        logits[rows[:, None], torch.arange(1, self.vocab_size, 2)] = -torch.inf


def test_a_custom_processor_sees_only_its_rows():
    sampler = Sampler(VOCAB, 2, CPU, TORCH_SAMPLING, processors=[*PROCESSORS, OnlyEven])
    sampler.add(0, Case(SamplingParams(temperature=0, extra_args={"only_even": True})).message())
    sampler.add(1, Case(SamplingParams(temperature=0)).message())
    logits = torch.arange(VOCAB).float() - VOCAB
    logits[-1] = -1000.0
    assert step(sampler, [logits, logits], [0, 1], [0, 0]).token_ids == [VOCAB - 3, VOCAB - 2]


def test_inactive_processors_are_never_called(monkeypatch):
    for processor in PROCESSORS:
        monkeypatch.setattr(processor, "apply", None)
        monkeypatch.setattr(processor, "observe", None)
    sampler = Sampler(VOCAB, 2, CPU, TORCH_SAMPLING)
    for slot in range(2):
        sampler.add(slot, Case(SamplingParams(temperature=slot)).message())
    assert len(step(sampler, [logits_of(0, 0)] * 2, [0, 1], [0, 0]).token_ids) == 2
