"""Thinking budgets in the sampler: against a plain reading of the tokens; batched, preempted, above all."""

import random

import pytest
import torch

from octavo.messages.sampling import SamplingParams
from octavo.runtime.kernels.choice import TORCH_SAMPLING
from octavo.runtime.sampling.sampler import Sampler
from tests.sampling_reference import Case

VOCAB = 6
CPU = torch.device("cpu")
TAGS = [
    [[1], [2]],
    [[1, 2], [3, 4]],
    [[1], [3, 3, 4]],
    [[], [2, 4]],
    [[1, 1, 2], [1, 2, 1]],
]


def ends_with(ids, tag):
    return bool(tag) and ids[-len(tag) :] == tag


def forced(case):
    """The token that must come next; None where the model is free."""
    opening, closing = case.params.thinking_tag_ids
    is_open, inside = not opening, 0
    if opening:
        for end in range(len(case.prompt) + 1):
            is_open = (is_open or ends_with(case.prompt[:end], opening)) and not ends_with(
                case.prompt[:end], closing
            )
    for end in range(1, len(case.outputs) + 1):
        inside += 1
        if is_open:
            is_open = not ends_with(case.outputs[:end], closing)
        elif ends_with(case.outputs[:end], opening):
            is_open, inside = True, 0
    late = inside - case.params.thinking_token_budget
    return closing[late] if is_open and late >= 0 else None


def params(tags, budget, **options):
    made = SamplingParams(thinking_token_budget=budget, **options)
    made.thinking_tag_ids = tags
    return made


def logits_of(case, position):
    generator = torch.Generator().manual_seed(1000 * case.seed + position)
    return torch.randn(VOCAB, generator=generator) * 2


def run(cases, num_tokens, *, is_preempted=False):
    """All of them together, some at each step; the tokens that a budget forced are the oracle's."""
    chooser = random.Random(5)
    sampler = Sampler(VOCAB, len(cases) + 2, CPU, TORCH_SAMPLING)
    slots = list(range(2, len(cases) + 2))
    for slot, case in zip(slots, cases, strict=True):
        sampler.add(slot, case.message())
    num_forced = 0
    while rows := [i for i, case in enumerate(cases) if len(case.outputs) < num_tokens]:
        rows = [i for i in rows if chooser.random() < 0.7] or rows
        chooser.shuffle(rows)
        if is_preempted:
            for i in chooser.sample(rows, len(rows) // 2):
                sampler.remove(slots[i])
                sampler.add(slots[i], cases[i].message())
        positions = [len(cases[i].outputs) for i in rows]
        logits = torch.stack([logits_of(cases[i], at) for i, at in zip(rows, positions, strict=True)])
        tokens = sampler.sample(logits, [slots[i] for i in rows], positions).to_host().token_ids
        for i, token in zip(rows, tokens, strict=True):
            must = forced(cases[i])
            assert must in (None, token), (cases[i], token)
            num_forced += must is not None
            cases[i].outputs.append(token)
    return num_forced


def cases(tags):
    chooser = random.Random(3)
    return [
        Case(
            params(tags, budget, temperature=temperature),
            prompt=[chooser.randrange(VOCAB) for _ in range(chooser.randint(1, 12))],
            seed=10 * budget + repetition,
        )
        for budget in (0, 1, 2, 5)
        for repetition, temperature in enumerate((1.0, 0.0, 1.0, 1.5))
    ]


@pytest.mark.parametrize("tags", TAGS, ids=str)
def test_the_end_is_forced_when_the_budget_is_spent_and_never_else(tags):
    together = cases(tags)
    assert run(together, 40) > 0
    for case, alone in zip(together, cases(tags), strict=True):
        run([alone], 40)
        assert case.outputs == alone.outputs
    assert run(cases([[VOCAB], [2]]), 40) == 0  # a tag that never comes


@pytest.mark.parametrize("tags", TAGS, ids=str)
def test_a_preemption_changes_nothing(tags):
    undisturbed, disturbed = cases(tags), cases(tags)
    run(undisturbed, 40)
    run(disturbed, 40, is_preempted=True)
    assert undisturbed == disturbed


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [([5, 1], True), ([1, 5, 5], True), ([1, 5, 2], False), ([1, 2, 1], True), ([5], False)],
)
def test_the_prompt_may_end_inside(prompt, is_open):
    case = Case(params([[1], [2]], 2, temperature=0.0), prompt=prompt)
    sampler = Sampler(VOCAB, 1, CPU, TORCH_SAMPLING)
    sampler.add(0, case.message())
    wanted = torch.tensor([[0.0, 0, 0, 0, 0, 9]])
    tokens = [sampler.sample(wanted.clone(), [0], [at]).to_host().token_ids[0] for at in range(4)]
    assert tokens == ([5, 5, 2, 5] if is_open else [5, 5, 5, 5])


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": [5]},
        {"forbidden_token_ids": [2]},
        {"bad_words_token_ids": [[2]]},
        {"logit_bias": {2: -100}},
        {"min_tokens": 8},
        {"top_k": 1, "temperature": 0.7},
        {"min_p": 1.0, "temperature": 2.0},
        {"top_p": 0.01, "temperature": 1.0},
        {"presence_penalty": 2.0, "repetition_penalty": 1.9},
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_nothing_stands_above_it(options, mode):
    case = Case(
        params([[], [2]], 1, **({"temperature": 0.0, "logprobs": 1} | options)), stop_ids=[2], prompt=[2, 5]
    )
    sampler = Sampler(VOCAB, 1, CPU, TORCH_SAMPLING, mode)
    sampler.add(0, case.message())
    wanted = torch.tensor([[0.0, 0, -3, 0, 0, 9]])
    hosts = [sampler.sample(wanted.clone(), [0], [at]).to_host() for at in range(2)]
    assert [host.token_ids[0] for host in hosts] == [5, 2]
    shown = hosts[1].logprobs[0]
    assert shown.token_ids[0] == 2
    assert shown.logprobs[0] == pytest.approx(0 if mode == "processed_logprobs" else -12, abs=0.01)
