"""Scans in chunks against the reference: many chunks, which requests share and blocks end in."""

import pytest
import torch

from tests.triton_here import DEVICE

# isort: split
from octavo.runtime.kernels.attention import Ragged
from octavo.runtime.kernels.recurrent import Conv, Decay, Scanned, States
from octavo.runtime.kernels.ref import recurrent as reference
from octavo.runtime.kernels.triton import recurrent as fast

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
HEADS, GROUPS, KEYS, VALUES, BLOCK = 4, 2, 32, 24, 48
LENS = [(1, 60), (100, 130), (70, 70), (0, 9), (3, 3)]  # new tokens, of so many
BEYOND = 5  # tokens of no request


def states_of(numbers: int) -> States:
    counts = torch.tensor([count for count, _ in LENS])
    lens = torch.tensor([total for _, total in LENS]).int()
    bounds = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
    columns = -(-int(lens.max()) // BLOCK)
    tables = 1 + torch.randperm(len(LENS) * columns).view(len(LENS), columns).int()
    slots = [
        int(tables[request, position // BLOCK]) * BLOCK + position % BLOCK
        for request, (count, total) in enumerate(LENS)
        for position in range(total - count, total)
    ]
    cache = torch.randn(len(LENS) * columns + 1, 1, numbers, device=DEVICE).expand(-1, BLOCK, -1)
    batch = Ragged(cu_q_lens=bounds.to(DEVICE), kv_lens=lens.to(DEVICE), num_singles=1)
    return States(cache, 0, tables.to(DEVICE), torch.tensor(slots + [-1] * BEYOND, device=DEVICE), batch)


def copied(states: States) -> States:
    return states._replace(cache=states.cache[:, :1].clone().expand_as(states.cache))


def make(*, is_delta: bool, alike: bool) -> tuple[Scanned, Decay, States]:
    torch.manual_seed(0)
    tokens = sum(count for count, _ in LENS) + BEYOND

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE)

    keys = draw(tokens, GROUPS, KEYS)
    if alike:
        keys = keys[:1] + 0.01 * keys
    strengths = draw(tokens, HEADS) + 3 * alike if is_delta else None
    values = draw(tokens, HEADS, VALUES)
    new = Scanned(draw(tokens, GROUPS, KEYS), keys, values, draw(tokens, HEADS) - 2, strengths)
    decay = Decay(-draw(HEADS).exp() * (0.01 if alike else 1), draw(HEADS), None if is_delta else draw(HEADS))
    return new, decay, states_of(HEADS * VALUES * KEYS)


@pytest.mark.parametrize(
    ("is_delta", "alike"), [(False, False), (True, False), (True, True)], ids=["mamba", "delta", "like_keys"]
)
def test_scans(is_delta, alike):
    new, decay, states = make(is_delta=is_delta, alike=alike)
    ours, theirs = copied(states), copied(states)
    made, exact = fast.scan(new, decay, ours), reference.scan(new, decay, theirs)
    assert made.isfinite().all()
    known = len(made) - BEYOND
    scale = float(exact[:known].abs().max())
    assert (made - exact)[:known].abs().max() <= 1e-5 * scale
    assert (ours.cache - theirs.cache).abs().max() <= 1e-5 * theirs.cache.abs().max()


@pytest.mark.parametrize("is_gated", [False, True])
def test_convolutions(is_gated):
    torch.manual_seed(0)
    tokens, channels, taps = sum(count for count, _ in LENS) + BEYOND, 83, 4
    x, before, behind = (torch.randn(tokens, channels, device=DEVICE) for _ in range(3))
    conv = Conv(torch.randn(taps, channels, device=DEVICE), None, not is_gated)
    states, factors = states_of((taps - 1) * channels), (before, behind) if is_gated else None
    ours, theirs = copied(states), copied(states)
    made, exact = fast.causal_conv(x, conv, ours, factors), reference.causal_conv(x, conv, theirs, factors)
    assert made.isfinite().all()
    assert (made - exact)[:-BEYOND].abs().max() <= 1e-5 * exact.abs().max()
    assert torch.equal(ours.cache, theirs.cache)
