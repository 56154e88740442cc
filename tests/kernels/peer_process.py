"""What one rank of tests/kernels/test_peers computes: every kernel over memory that processes share."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from octavo.runtime.kernels.peers import MOST_PROGRAMS, PeerMemory
from octavo.runtime.kernels.ref.elementwise import add_norm
from octavo.runtime.kernels.sampling import Choice


def inputs(rank, rows, size, dtype, salt=0):
    """The same of a rank in every process."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randn((rows, size), generator=generator).to(dtype)


def ordered_sum(parts):
    """In float32, rank by rank, rounded once."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


def memory_of(rank, shared, region_bytes):
    regions = torch.tensor([region.data_ptr() for region, _ in shared])
    flags = torch.tensor([flag.data_ptr() for _, flag in shared])
    turns = torch.zeros(MOST_PROGRAMS, dtype=torch.int32)
    return PeerMemory(rank, len(shared), regions, flags, turns, region_bytes)


def run(rank, shared, region_bytes, first_turn, results):
    """Put what went wrong into `results`, or nothing."""
    from octavo.runtime.kernels.triton import peers
    from tests import triton_here  # noqa: F401  # the interpreter's mended

    peers.MOST_PROGRAMS = 4  # so that they have several rows each
    memory, size = memory_of(rank, shared, region_bytes), len(shared)
    memory.turns.fill_(first_turn)
    found = []
    for salt, (rows, columns, dtype, two_shots) in enumerate(
        [
            (1, 700, torch.float16, False),
            (5, 96, torch.float32, True),
            (9, 513, torch.float16, True),
            (9, 70, torch.float16, False),
            (3, 4096, torch.float16, True),
        ]
    ):
        parts = [inputs(r, rows, columns, dtype, salt) for r in range(size)]
        total, case = ordered_sum(parts), (rows, columns, dtype, two_shots)
        if not torch.equal(peers.sum_ranks(memory, parts[rank], two_shots=two_shots), total):
            found.append(("sum", *case))
        if not torch.equal(peers.gather(memory, parts[rank]), torch.stack(parts)):
            found.append(("gather", *case))
        weight, residual = inputs(7, 1, columns, dtype)[0], inputs(8, rows, columns, dtype)
        made = peers.sum_add_norm(memory, parts[rank], weight, 1e-5, residual, two_shots=two_shots)
        norm, stream = add_norm(total, weight, 1e-5, residual)
        if not torch.equal(made[1], stream):
            found.append(("stream", *case))
        if not torch.allclose(made[0].float(), norm.float(), rtol=2e-3, atol=1e-3):
            found.append(("norm", *case))
        logits = [part.float().round() for part in parts]
        choice = Choice(logits[rank].argmax(1), logits[rank].max(1).values)
        ids, best = peers.choose_among(memory, choice, rank * columns)
        whole = torch.cat(logits, 1)
        if not (torch.equal(best, whole.max(1).values) and torch.equal(ids, whole.argmax(1))):
            found.append(("choose", *case))
    absent = torch.full((2, 96), -1, dtype=torch.int16).view(torch.float16)
    for two_shots in (False, True):
        if not peers.sum_ranks(memory, absent, two_shots=two_shots).isnan().all():
            found.append("bits of a part that is not there")
    results.put((rank, found))
