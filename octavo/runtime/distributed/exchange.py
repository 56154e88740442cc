"""`TokenExchange` brings tokens to the ranks that have their experts, and back what these made of them.

Used by `Experts` where replicas share experts: every replica has tokens of its own. No token is dropped, and
the sums over ranks are in the order of the ranks, whichever way the tokens go.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from octavo.base.log import get_logger
from octavo.runtime.distributed.group import Group
from octavo.runtime.kernels.experts import Routing

logger = get_logger(__name__)

Compute = Callable[[Tensor, Routing], Tensor]
"""Takes tokens of any ranks, and returns the sums over this rank's experts; skips the ids of others."""
Owners = Callable[[Tensor, Tensor], Tensor]
"""Takes experts [T, k] of tokens [T, H], -1 = none; returns the ranks that have them for these tokens."""
_Unpack = Callable[[Tensor], tuple[Tensor, Routing]]
_SIZES = [1 << power for power in range(8, 14)]
_TIMES = 3


class TokenExchange:
    """Exchanges tokens between `ranks`; the tokens of a replica are divided among its ranks, `tp`.

    num_tokens:    of a replica's step at most, equal on all ranks
    is_captured:   the step may be replayed or tried out: messages do not depend on what was chosen
    most_gathered: tokens of a rank up to which it is faster to have all tokens on all ranks
    """

    def __init__(self, ranks: Group, tp: Group) -> None:
        self._ranks, self._tp = ranks, tp
        self.num_tokens, self.is_captured, self.most_gathered = 0, True, 256

    def run(self, x: Tensor, routing: Routing, owners: Owners, compute: Compute) -> Tensor:
        """Return the sum over the experts of each of this replica's tokens. All ranks call it together.

        x: [T, H], the same on the ranks of a replica, like its routing
        """
        share = -(-max(self.num_tokens, len(x)) // self._tp.size)
        packed = functional.pad(_pack(x, routing), (0, 0, 0, share * self._tp.size - len(x)))
        mine = packed[self._tp.rank * share :][:share]
        unpack = partial(_unpack, dtype=x.dtype, size=x.shape[1], top_k=routing.ids.shape[1])
        if self.is_captured or share <= self.most_gathered:
            total = self._gather(mine, unpack, compute)
        else:
            total = self._send(mine, unpack, compute, owners)
        return self._tp.gather_rows(total.to(x.dtype))[: len(x)]

    def _gather(self, mine: Tensor, unpack: _Unpack, compute: Compute) -> Tensor:
        """Have all ranks look at all tokens."""
        parts = self._ranks.all_to_all(compute(*unpack(self._ranks.gather_rows(mine))))
        first, *others = parts.chunk(self._ranks.size)
        total = first.float()
        for part in others:
            total += part
        return total

    def _send(self, mine: Tensor, unpack: _Unpack, compute: Compute, owners: Owners) -> Tensor:
        """Send a token to the ranks of its experts alone; the host waits to learn how many go where."""
        x, routing = unpack(mine)
        is_wanted = (
            owners(routing.ids, x)[:, :, None] == torch.arange(self._ranks.size, device=mine.device)
        ).any(1)
        tokens = is_wanted.T.nonzero()[:, 1]  # rank by rank
        counts = is_wanted.sum(0)
        sent, came = torch.stack([counts, self._ranks.all_to_all(counts)]).tolist()
        parts = compute(*unpack(self._ranks.all_to_all(mine[tokens], came, sent)))
        back = self._ranks.all_to_all(parts, sent, came)
        total = back.new_zeros((len(mine), back.shape[1]), dtype=torch.float32)
        for places, part in zip(torch.split(tokens, sent), torch.split(back, sent), strict=True):
            total[places] += part.float()
        return total

    def measure(self, x: Tensor, top_k: int, num_experts: int) -> None:
        """Find `most_gathered` by the times of all ranks. x: [1, H] of the model's type"""
        generator = torch.Generator(x.device).manual_seed(self._ranks.rank)
        self.is_captured, each = False, num_experts // self._ranks.size
        times = torch.zeros((len(_SIZES), 2), dtype=torch.float64, device=x.device)
        for row, number in zip(times, _SIZES, strict=True):
            chances = torch.rand((number, num_experts), device=x.device, generator=generator)
            routing = Routing(chances.topk(top_k).indices.int(), chances[:, :top_k].contiguous())
            for way, most in enumerate((number, 0)):
                self.most_gathered = most
                for _ in range(1 + _TIMES):
                    torch.cuda.synchronize(x.device)
                    began = time.perf_counter()
                    self.run(x.expand(number, -1), routing, lambda ids, _: ids // each, lambda x, _: x)
                    torch.cuda.synchronize(x.device)
                    row[way] = time.perf_counter() - began
        gather_s, send_s = self._ranks.all_reduce_by_nccl(times).T.tolist()
        faster = [n for n, a, b in zip(_SIZES, gather_s, send_s, strict=True) if a < b]
        self.most_gathered, self.is_captured = max(faster, default=0), True
        logger.info("Experts: tokens are gathered up to %d of a rank, else sent.", self.most_gathered)


def _pack(x: Tensor, routing: Routing) -> Tensor:
    """Return [T, bytes] uint8. A token of zeros has chosen no expert."""
    parts = x, routing.weights, routing.ids + 1
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)


def _unpack(packed: Tensor, dtype: torch.dtype, size: int, top_k: int) -> tuple[Tensor, Routing]:
    x, weights, ids = torch.split(packed, [size * dtype.itemsize, 4 * top_k, 4 * top_k], dim=1)
    routing = Routing(ids.contiguous().view(torch.int32) - 1, weights.contiguous().view(torch.float32))
    return x.contiguous().view(dtype), routing
