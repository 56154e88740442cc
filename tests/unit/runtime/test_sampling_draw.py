"""Noise and draws against plain formulas: the numbers themselves, and the distributions they make."""

import itertools

import numpy as np
import pytest
import torch

from octavo.messages.sampling import SamplingParams
from octavo.runtime.kernels import choice as draw
from octavo.runtime.kernels.choice import TORCH_SAMPLING, draw_truncated, greedy, top_candidates, truncate
from octavo.runtime.kernels.ref.noise import uniform
from octavo.runtime.kernels.sampling import Limits
from octavo.runtime.sampling.sampler import Sampler
from tests.sampling_reference import Case, distribution

pytestmark = pytest.mark.matrix(3)

TRUNCATIONS = [
    {"temperature": t, "top_k": k, "top_p": p, "min_p": m}
    for t, k, p, m in itertools.product([0.6, 1.3], [0, 7, 150], [1.0, 0.8], [0.0, 0.05])
]


def limits_of(rows: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> Limits:
    columns = (temperature, top_k, top_p, min_p)
    return Limits(*(torch.full((rows, 1), value, dtype=torch.float64) for value in columns))


def splitmix(seed: int, position: int) -> float:
    mask = 2**64 - 1

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    gamma = 0x9E3779B97F4A7C15
    return (mix(mix(seed + gamma & mask) + (position + 1) * gamma & mask) >> 11) / 2**53


def test_noise_is_splitmix64():
    cases = [(0, 0), (1, 0), (0, 1), (2**63 - 1, 0), (2**63 - 1, 131071), (123456789, 77)]
    seeds, positions = torch.tensor(cases).unbind(1)
    assert uniform(seeds, positions).tolist() == [splitmix(*case) for case in cases]


@pytest.mark.parametrize("axis", ["positions", "seeds"])
def test_noise_is_even_and_unrelated_to_its_neighbour(axis):
    count = torch.arange(100_000)
    same = torch.full_like(count, 42)
    noise = uniform(same, count) if axis == "positions" else uniform(count, same)
    assert noise.min() >= 0 and noise.max() < 1
    histogram = torch.histc(noise.float(), 100, 0, 1).double()
    assert ((histogram - 1000) ** 2 / 1000).sum() < 99 + 4 * (2 * 99) ** 0.5
    assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 0.01


@pytest.mark.parametrize("vocab_size", [24, 300])
@pytest.mark.parametrize("values", TRUNCATIONS, ids=lambda v: "-".join(map(str, v.values())))
def test_chi_square(values, vocab_size):
    """10,000 draws by seed and position follow the reference formula."""
    params = SamplingParams(**values)
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 2
    sampler = Sampler(vocab_size, 500, torch.device("cpu"), TORCH_SAMPLING)
    for slot in range(500):
        sampler.add(slot, Case(params, seed=slot).message())
    counts = np.zeros(vocab_size)
    for position in range(20):
        output = sampler.sample(logits.repeat(500, 1), np.arange(500), np.full(500, position))
        counts += np.bincount(output.token_ids.numpy(), minlength=vocab_size)
    expected = distribution(logits.numpy().astype(np.float64), params) * counts.sum()
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    cells = np.append(expected[common], max(expected[~common].sum(), 1e-9))
    seen = np.append(counts[common], counts[~common].sum())
    degrees = max(1, common.sum() - 1)
    assert ((seen - cells) ** 2 / cells).sum() < degrees + 5 * (2 * degrees) ** 0.5


@pytest.mark.parametrize("vocab_size", [40, 1000, 1009])
@pytest.mark.parametrize("values", TRUNCATIONS, ids=lambda v: "-".join(map(str, v.values())))
@pytest.mark.parametrize("spread", [0.02, 1.0, 5.0])
def test_evenly_spaced_noise_counts_out_the_probabilities(values, vocab_size, spread):
    """The inverse distribution function on a grid of noise: a count is its share, to within one."""
    rows = 512
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(1)) * spread
    noise = (torch.arange(rows, dtype=torch.float64) + 0.5) / rows
    params = SamplingParams(**values)
    batch, limits = logits.repeat(rows, 1), limits_of(rows, **values)
    if values == {"temperature": params.temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}:
        choice = draw.draw(batch, limits.temperature, noise)
    else:
        choice = draw_truncated(batch, limits, noise)
    counts = np.bincount(choice.token_ids.numpy(), minlength=vocab_size)
    expected = distribution(logits.numpy().astype(np.float64), params) * rows
    assert np.abs(counts - expected).max() < 1.01


@pytest.mark.parametrize(
    "values",
    [{"top_k": 130}, {"top_k": 3}, {"top_p": 0.5}, {"top_p": 0.999}, {"min_p": 0.5}, {"min_p": 0.001}],
    ids=str,
)
def test_ties_at_every_border(values):
    """Many equal logits, inside and outside the candidates: what is kept is what the reference keeps."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randint(-8, 3, (40, 1000), generator=generator).float()
    limits = limits_of(40, **values)
    expected = [distribution(row.numpy().astype(np.float64), SamplingParams(**values)) for row in logits]
    assert ((truncate(logits, limits) > -torch.inf).numpy() == (np.array(expected) > 0)).all()
    for noise in (0.0, 0.5, 1 - 2**-53):
        chosen = draw_truncated(logits, limits, torch.full((40,), noise, dtype=torch.float64)).token_ids
        assert all(row[token] > 0 for row, token in zip(expected, chosen.tolist(), strict=True))


def test_candidates_and_whole_vocabulary_keep_the_same_tokens(monkeypatch):
    """The bounded search is exact: with it and without, the same grid of noise gives the same counts."""
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(5)) * 4
    noise = (torch.arange(512, dtype=torch.float64) + 0.5) / 512
    for values in ({"top_k": 50, "top_p": 0.9}, {"top_p": 0.9}, {"min_p": 0.02}):
        arguments = logits.repeat(512, 1), limits_of(512, **values), noise
        few = draw_truncated(*arguments).token_ids
        with monkeypatch.context() as patch:
            patch.setattr(draw, "_NUM_CANDIDATES", 10**6)
            every = draw_truncated(*arguments).token_ids
        difference = few.bincount(minlength=1000) - every.bincount(minlength=1000)
        assert set(few.tolist()) == set(every.tolist())
        assert difference.abs().max() <= 1


@pytest.mark.parametrize("vocab_size", [1, 2, 97, 1000, 1009, 4096])
def test_greedy_is_the_first_maximum(vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randint(-3, 3, (50, vocab_size), generator=generator).float()
    token_ids, max_logits = greedy(logits)
    assert token_ids.tolist() == [int(np.argmax(row)) for row in logits.numpy()]
    assert torch.equal(max_logits, logits.amax(1))


@pytest.mark.parametrize("size", [1, 5, 31, 128, 1008])
@pytest.mark.parametrize("vocab_size", [1008, 4096, 4099])
def test_candidates_are_the_head_of_a_full_sort(vocab_size, size):
    logits = torch.randn(9, vocab_size, generator=torch.Generator().manual_seed(size))
    expected = torch.sort(logits, dim=1, descending=True, stable=True)
    values, ids = top_candidates(logits, size)
    assert torch.equal(values, expected.values[:, :size])
    assert torch.equal(ids, expected.indices[:, :size])
