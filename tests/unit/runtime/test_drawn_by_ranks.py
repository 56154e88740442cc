"""Ranks with a part of the logits each draw the token that one rank with all of them would."""

import multiprocessing

import torch

from octavo.runtime.distributed.context import ParallelContext
from octavo.runtime.kernels.ref.draws import draw
from octavo.runtime.kernels.sampling import Draws
from octavo.runtime.layers.embedding import LMHead

SIZE, VOCAB, ROWS = 3, 1001, 600


class Part:
    """Stands for a head's matrix: the logits of one rank are given."""

    def __init__(self, logits):
        self.logits = logits

    def apply(self, hidden, bias):
        return self.logits.clone()


def make_case():
    """Logits of which some rows are hopeless in one part, greedy rows, ties, and every kind of noise."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn((ROWS, VOCAB), generator=generator)
    logits[::7, :400] = -1e4
    logits[::11] = logits[::11].round()
    temperature = torch.rand(ROWS, generator=generator).double() + 0.1
    temperature[::5], temperature[::13] = 0.0, 1e-5
    noise = torch.rand(ROWS, generator=generator).double()
    noise[:3] = torch.tensor([0.0, 1 - 2**-53, 0.5])
    return logits, Draws(temperature, noise)


def rank_main(rank, meeting):
    torch.set_num_threads(1)
    parallel = ParallelContext.create(rank, SIZE, f"file://{meeting}", torch.device("cpu"))
    logits, draws = make_case()
    head = LMHead.__new__(LMHead)
    torch.nn.Module.__init__(head)
    width = -(-VOCAB // SIZE)
    head._parallel, head._vocab_size, head._scale, head._soft_cap = parallel, VOCAB, 1.0, 0.0
    head._start, head._choose, head._bias = rank * width, draw, None
    head.method = Part(logits[:, rank * width : (rank + 1) * width])
    found, expected = head.draw(logits, lambda: draws), draw(logits, draws)
    torch.testing.assert_close(found.max_logits, expected.max_logits)
    assert torch.equal(found.token_ids, expected.token_ids)
    head._start += 1
    wrong = head.draw(logits, lambda: draws).token_ids
    assert torch.equal(wrong, expected.token_ids + 1), "wrong ids of a rank would be noticed"
    parallel.close()


def test_the_same_tokens(tmp_path):
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=rank_main, args=(r, tmp_path / "meeting")) for r in range(SIZE)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=100)
    assert [rank.exitcode for rank in ranks] == [0] * SIZE
