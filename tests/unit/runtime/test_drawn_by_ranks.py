"""Ranks with a part of the logits each draw the token that one rank with all of them would."""

import torch

from octavo.runtime.distributed.context import ParallelContext
from octavo.runtime.kernels.choice import TORCH_SAMPLING
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.kernels.sampling import Draws, Limits
from octavo.runtime.layers.embedding import LMHead
from tests.rank_processes import exit_codes

SIZE, ROWS = 3, 210


class Part:
    """Stands for a head's matrix: the logits of one rank are given."""

    def __init__(self, logits):
        self.logits = logits

    def apply(self, hidden, bias):
        return self.logits.clone()


class CountedGroup:
    """Counts the numbers that a rank sends to be gathered."""

    def __init__(self, group):
        self.group, self.num_bytes = group, 0

    def __getattr__(self, name):
        return getattr(self.group, name)

    def gather_rows(self, x):
        self.num_bytes += x.nbytes
        return self.group.gather_rows(x)

    def all_gather(self, x):
        self.num_bytes += x.nbytes
        return self.group.all_gather(x)


class Ranks:
    """Stands for ParallelContext."""

    def __init__(self, parallel):
        self.tp = CountedGroup(parallel.tp)
        self.tp_size, self.all_gather = parallel.tp_size, self.tp.all_gather


def make_case(vocab):
    """Logits of which some rows are hopeless in one part, greedy rows, ties, and every kind of noise."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn((ROWS, vocab), generator=generator)
    logits[::7, : vocab * 2 // 5] = -1e4
    logits[::11] = logits[::11].round()
    temperature = torch.rand(ROWS, generator=generator).double() + 0.1
    temperature[::5], temperature[::13] = 0.0, 1e-5
    noise = torch.rand(ROWS, generator=generator).double()
    noise[:3] = torch.tensor([0.0, 1 - 2**-53, 0.5])
    return logits, Draws(temperature, noise)


def make_limits(temperature):
    """Every limit alone and with others, also none and those that keep most tokens."""
    row = torch.arange(ROWS)
    top_k = torch.tensor([0, 1, 40, 0, 0, 50, 1000])[row % 7].double()
    top_p = torch.tensor([0.95, 1.0, 1.0, 0.5, 0.9, 1.0, 0.0001, 1.0, 0.8])[row % 9].double()
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.05, 0.0])[row // 4 % 5].double()
    return Limits(torch.where(temperature > 0, temperature, 1.0), top_k, top_p, min_p)


def make_head(parallel, logits, kernels):
    vocab = logits.shape[1]
    head, width = LMHead.__new__(LMHead), -(-vocab // SIZE)
    torch.nn.Module.__init__(head)
    head._parallel, head._vocab_size, head._scale, head._soft_cap = Ranks(parallel), vocab, 1.0, 0.0
    head._start, head._kernels, head._bias = parallel.tp.rank * width, kernels, None
    head.method = Part(logits[:, head._start : head._start + width])
    return head


def draw_whole(parallel):
    logits, draws = make_case(1001)
    kernels = ref_table().sampling
    head, expected = make_head(parallel, logits, kernels), kernels.choose(logits, draws)
    found = head.draw(logits, lambda: (draws, None))
    torch.testing.assert_close(found.max_logits, expected.max_logits)
    assert torch.equal(found.token_ids, expected.token_ids)
    assert head.draw(logits, lambda: (draws, None), is_cut=True) is None, "parts are too small for candidates"
    head._start += 1
    wrong = head.draw(logits, lambda: (draws, None)).token_ids
    assert torch.equal(wrong, expected.token_ids + 1), "wrong ids of a rank would be noticed"


def draw_cut(parallel):
    """The vocabulary divides by no number of ranks."""
    logits, draws = make_case(49_153)
    limits, kernels = make_limits(draws.temperature), TORCH_SAMPLING
    head, expected = make_head(parallel, logits, kernels), kernels.choose(logits.clone(), draws, limits)
    found = head.draw(logits, lambda: (draws, limits), is_cut=True)
    assert torch.equal(found.max_logits, expected.max_logits)
    assert torch.equal(found.token_ids, expected.token_ids)
    head._start += 1
    wrong = head.draw(logits, lambda: (draws, limits), is_cut=True).token_ids
    assert not torch.equal(wrong, expected.token_ids), "wrong ids of a rank would be noticed"


def count_bytes(parallel):
    """Of rows with one limit each, as of a model that is sure: no logits are gathered."""
    logits, draws = make_case(49_153)
    draws = Draws(draws.temperature.clamp(min=0.2) * 0.2, draws.noise)
    kind, kernels = torch.arange(ROWS) % 3, TORCH_SAMPLING
    top_k, top_p, min_p = (
        torch.where(kind == i, x, off) for i, (x, off) in enumerate(((40, 0), (0.95, 1), (0.1, 0)))
    )
    limits = Limits(draws.temperature, top_k.double(), top_p.double(), min_p.double())
    head = make_head(parallel, logits, kernels)
    found = head.draw(logits, lambda: (draws, limits), is_cut=True)
    assert torch.equal(found.token_ids, kernels.choose(logits.clone(), draws, limits).token_ids)
    assert head._parallel.tp.num_bytes == ROWS * 4 * (2 * 128 + 1), "65.5 KB a row for logits"


def where_rounding_decides(parallel):
    """Equal tokens at whose edge the draw falls: what is added in another order may decide, so all gather."""
    logits = torch.full((64, 49_153), -100.0)
    logits[:, ::1000] = 1.0
    logits[:, 0] += torch.arange(64) * 1e-6
    noise = (torch.arange(64) / 64).double()
    draws, ones = Draws(torch.ones_like(noise), noise), torch.ones_like(noise)
    limits, kernels = Limits(ones, 0 * ones, (torch.arange(64) % 50 / 50).double(), 0 * ones), TORCH_SAMPLING
    head = make_head(parallel, logits, kernels)
    found = head.draw(logits, lambda: (draws, limits), is_cut=True)
    assert torch.equal(found.token_ids, kernels.choose(logits.clone(), draws, limits).token_ids)
    assert head._parallel.tp.num_bytes > 64 * 4 * (2 * 128 + 1), "some rows are gathered"


def rank_main(rank, meeting):
    torch.set_num_threads(1)
    parallel = ParallelContext.create(rank, SIZE, f"file://{meeting}", torch.device("cpu"))
    for check in (draw_whole, draw_cut, count_bytes, where_rounding_decides):
        check(parallel)
    parallel.close()


def test_the_same_tokens(tmp_path):
    assert exit_codes(rank_main, [(rank, tmp_path / "meeting") for rank in range(SIZE)]) == [0] * SIZE
