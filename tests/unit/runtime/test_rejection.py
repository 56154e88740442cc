"""Drafts that are kept by their chances leave tokens distributed as the model has them."""

import numpy as np
import pytest
import torch

from octavo.messages.request import RequestSpec
from octavo.messages.sampling import SamplingParams
from octavo.messages.step import NewRequest
from octavo.runtime.kernels.choice import TORCH_SAMPLING
from octavo.runtime.sampling.rejection import Rejection
from octavo.runtime.sampling.sampler import Kind, Sampler
from octavo.runtime.sampling.verify import sample_in_order

VOCAB, ROWS, MOST = 5, 2000, 2
BEGIN = VOCAB
"""Before the first token."""
ALL_ROWS = np.arange(ROWS)
BOUNDS = {24: 42.98, 8: 20.09}
"""Of chi-square by degrees of freedom, at p = 0.01."""


def table(seed):
    """Logits by the token before."""
    return 1.5 * torch.randn(VOCAB + 1, VOCAB, generator=torch.Generator().manual_seed(seed))


def make_sampler(how, **params):
    sampler = Sampler(VOCAB, ROWS, torch.device("cpu"), TORCH_SAMPLING)
    sampler.rejection = Rejection(in_blocks=how == "block") if how != "equality" else None
    task = SamplingParams(**{"temperature": 0.8} | params)
    for row in ALL_ROWS.tolist():
        sampler.add(row, NewRequest(str(row), [0], 1, RequestSpec(task=task, seed=row)))
    return sampler


def drafts_of(sampler, drafter, before, position):
    """Two drafts of each row, drawn as drafters do: [rows, 2]."""
    found = [before]
    if sampler.rejection is not None:
        sampler.rejection.begin()
    for place in range(MOST):
        logits, positions = drafter[found[-1]], np.full(ROWS, position + place)
        if sampler.rejection is not None:
            positions = sampler.rejection.keep(sampler, logits, ALL_ROWS, positions)
        rows = torch.from_numpy(ALL_ROWS)
        found.append(sampler.choose(logits, rows, torch.from_numpy(positions), Kind.TRUNCATED).token_ids)
    return torch.stack(found[1:], dim=1)


def step(sampler, model, drafter, before, position):
    """Return the tokens of each row behind `before`, [rows, 3]: drafts that are kept, one more, then -1."""
    drafts = drafts_of(sampler, drafter, before, position)
    logits = model[torch.cat([before[:, None], drafts], dim=1)].view(-1, VOCAB)
    expected = torch.cat([drafts, torch.full((ROWS, 1), -1)], dim=1)
    positions = position + np.tile(np.arange(MOST + 1), ROWS)
    rows = ALL_ROWS.repeat(MOST + 1)
    found = sample_in_order(sampler, logits, rows, positions, None, expected.view(-1).numpy())
    tokens = found.token_ids.view(ROWS, MOST + 1)
    is_behind = ((tokens == expected)[:, :-1].cumprod(dim=1) == 0) | (tokens[:, 1:] < 0)
    return torch.cat([tokens[:, :1], tokens[:, 1:].masked_fill(is_behind, -1)], dim=1)


def pairs(how, rounds=10, same=False, **params):
    """Return how often each pair of first tokens came, and how many drafts of a step were kept on average.

    Where only one token came, the next step brings the second.
    """
    model, drafter = table(0), table(0 if same else 1)
    sampler, counts, kept = make_sampler(how, **params), np.zeros((VOCAB, VOCAB)), 0
    for position in range(1, 100 * rounds, 100):
        tokens = step(sampler, model, drafter, torch.full((ROWS,), BEGIN), position)
        kept += int((tokens >= 0).sum()) - ROWS
        then = step(sampler, model, drafter, tokens[:, 0], position + 1)
        second = torch.where(tokens[:, 1] >= 0, tokens[:, 1], then[:, 0])
        np.add.at(counts, (tokens[:, 0].numpy(), second.numpy()), 1)
    return counts, kept / (ROWS * rounds)


def chi_square(counts, top_k=VOCAB):
    """Return it with its degrees of freedom, against what the model draws from."""
    logits = table(0)
    logits = logits.masked_fill(logits < logits.topk(top_k, dim=1).values[:, -1:], -torch.inf)
    odds = (logits / 0.8).double().softmax(dim=1)
    wanted = (odds[BEGIN, :, None] * odds[:BEGIN]).numpy() * counts.sum()
    is_possible = wanted > 0
    assert not counts[~is_possible].any()
    terms = (counts - wanted)[is_possible] ** 2 / wanted[is_possible]
    return float(terms.sum()), len(terms) - 1


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("how", "params"),
    [("standard", {}), ("block", {}), ("block", {"top_k": 3}), ("standard", {"presence_penalty": 1e-9})],
    ids=str,
)
def test_pairs_of_tokens_come_as_the_model_has_them(how, params):
    """Of 10^5 draws, with a drafter of quite another distribution. Penalties are verified place by place."""
    counts, _ = pairs(how, rounds=50, **params)
    found, freedom = chi_square(counts, params.get("top_k", VOCAB))
    assert counts.sum() == 100_000 and found < BOUNDS[freedom]


def keep_all(rejection, source, wanted, batch, drafts):
    return torch.from_numpy(drafts)


def draw_any(sampler, logits, noise):
    return (noise * VOCAB).long()


@pytest.mark.parametrize("how", ["standard", "block"])
@pytest.mark.parametrize(
    ("owner", "name", "function"), [(Rejection, "decide", keep_all), (Sampler, "draw", draw_any)]
)
def test_a_bias_is_noticed(monkeypatch, how, owner, name, function):
    monkeypatch.setattr(owner, name, function)
    found, freedom = chi_square(pairs(how)[0])
    assert found > 2 * BOUNDS[freedom]


def test_more_drafts_are_kept_than_by_equality():
    kept = {how: pairs(how)[1] for how in ("equality", "standard", "block")}
    odds = [(table(seed) / 0.8).softmax(dim=1) for seed in (0, 1)]
    overlap = float(torch.minimum(*odds)[BEGIN].sum())
    assert kept["equality"] < kept["standard"] < kept["block"]
    assert kept["standard"] > overlap, "the first draft is kept as often as can be"


def test_the_model_itself_is_always_right():
    for how in ("standard", "block"):
        assert pairs(how, rounds=2, same=True)[1] == MOST
