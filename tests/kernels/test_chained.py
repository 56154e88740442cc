"""Kernels of chained steps: Triton against the references, and lookups against the host's."""

import pytest
import torch

from tests.triton_here import DEVICE  # skips where there is no Triton

# isort: split
from octavo.engine.speculation.token_run import TokenRun
from octavo.messages.step import UNTOLD
from octavo.runtime.kernels.chained import ChainRows
from octavo.runtime.kernels.ref.chained import CHAIN_KERNELS
from octavo.runtime.kernels.triton.chained import CHAIN_KERNELS as TRITON
from octavo.runtime.worker.packed_inputs import Packing

WIDTH, COLUMNS, SIZES, SPARE = 100, 8, (16, 32), 40


def make_step(counts: list[int], num_spare: int) -> ChainRows:
    """A step of requests with so many drafts each, in parts of one buffer."""
    num_rows, num_requests = sum(counts) + len(counts) + num_spare, len(counts) + (num_spare > 0)
    packing = Packing(num_rows, num_rows, len(SIZES), is_changed=False, num_chained=num_requests)
    inputs = packing.split(torch.zeros(packing.size, dtype=torch.int64, device=DEVICE))
    inputs.rows[:], inputs.num_known[:], inputs.num_wanted[:], inputs.num_taken[:] = SPARE, -1, -1, -1
    inputs.kv_lens[:] = 1
    inputs.cache_slots[:] = -1
    inputs.places[:] = inputs.targets[:] = SPARE * WIDTH
    inputs.firsts[:] = torch.arange(num_rows)
    inputs.heads[:] = num_rows - 1
    at = 0
    for request, count in enumerate(counts):
        many = slice(at, at + count + 1)
        number, start = torch.arange(count + 1, device=DEVICE), 20 + 3 * request
        inputs.rows[many], inputs.firsts[many], inputs.heads[request] = request, at, at
        inputs.places[many] = request * WIDTH + start + number
        inputs.targets[many] = request * WIDTH + start + number + 1
        inputs.positions[many], inputs.kv_lens[many] = start + number, start + number + 1
        inputs.output_positions[many], inputs.cache_slots[:, many] = number, 0
        inputs.num_known[many] = start - 1 if request % 2 else -1
        inputs.num_taken[many] = 2 if request % 5 == 4 else -1
        inputs.num_wanted[many] = request % 4
        inputs.drafts[at + 1 : at + count + 1] = torch.randint(-1, 2, (count,))
        inputs.drafts[at] = UNTOLD
        at += count + 1
    return ChainRows(*(getattr(inputs, name) for name in ChainRows._fields))


@pytest.mark.parametrize(
    ("counts", "num_spare"), [([3], 0), ([0], 0), ([2, 0, 5, 1, 3], 2), ([127, 2], 1), ([1] * 39, 5)]
)
def test_steps_are_moved_verified_and_linked(counts, num_spare):
    found = []
    for kernels in (CHAIN_KERNELS, TRITON):
        torch.manual_seed(len(counts))
        given = make_step(counts, num_spare)
        num_rows = len(given.rows)
        lengths = torch.randint(20, 40, (SPARE + 1,)).to(DEVICE)
        kept_ids = torch.randint(-1, 2, ((SPARE + 3) * WIDTH + 300,)).to(DEVICE)
        tables = torch.randint(0, 99, (len(SIZES), num_rows, 16), dtype=torch.int32).to(DEVICE)
        ids, max_logits = torch.zeros(num_rows, dtype=torch.int64, device=DEVICE), torch.ones(num_rows)
        max_logits[1::7], max_logits[4::9] = torch.inf, torch.nan
        kernels.move(given, lengths, kept_ids, tables, SIZES, ids)
        lasts = kernels.verify(given, lengths, kept_ids, max_logits.to(DEVICE))
        ahead = kernels.link(given, lasts, tables[:, lasts], SIZES, 4, SPARE * WIDTH)
        found.append([*given, ids, lengths, lasts, *ahead])
    for index, (one, other) in enumerate(zip(*found, strict=True)):
        assert torch.equal(one, other), index
    heads, lasts = found[0][ChainRows._fields.index("heads")], found[0][-3]
    assert (lasts > heads).any() or len(counts) < 5, "no draft came true"


@pytest.mark.parametrize(("size", "least", "most"), [(2, 3, 16), (3, 1, 2), (50, 2, 4), (10_000, 1, 3)])
@pytest.mark.parametrize("shift", [0, 1], ids=["", "shifted"])
def test_lookups_are_those_of_the_host(size, least, most, shift):
    """Shifted, the negative twin: of a sequence that is one token shorter."""
    torch.manual_seed(size)
    token_ids = torch.randint(0, size, (7, 2600)).to(DEVICE)
    rows = torch.tensor([5, 0, 3, 1, 2], device=DEVICE)
    lengths = torch.tensor([1, least, 40, 300, 2500], device=DEVICE)
    token_ids[2, 2480:2500] = token_ids[2, 1000:1020]
    found = []
    for kernels in (CHAIN_KERNELS, TRITON):
        found.append(kernels.look_up(token_ids, rows, lengths - shift * (lengths > 1), least, most, 6))
    assert torch.equal(*found)
    wanted = []
    for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
        run = TokenRun(token_ids[row, :length].tolist())
        match = run.find(least, most)
        following = [] if match is None else run.some(match.place, 6)
        wanted.append((following * 6)[:6] if following else [-1] * 6)
    assert (found[0].tolist() == wanted) != shift
