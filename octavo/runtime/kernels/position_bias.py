"""`PositionBias` attends with scores that depend on the distance between tokens, too.

No kernel adds such terms: torch attends, a request at a time, so results do not depend on its neighbours.
"""

import torch
from torch import Tensor
from torch.nn import functional


class PositionBias:
    """Is made once per step, shared by its layers."""

    def __init__(self, by_distance: Tensor, starts: list[int]) -> None:
        """by_distance: [H, 2 * N + 1], terms of keys -N … N positions behind the query; starts: [R + 1]"""
        self._by_distance, self._starts = by_distance, starts
        self._made: dict[int, Tensor] = {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Let the tokens of each request see each other: [T, H, D], as q, k and v are."""
        parts = []
        for start, end in zip(self._starts, self._starts[1:], strict=False):
            if start < end:
                heads = [x[start:end].transpose(0, 1) for x in (q, k, v)]
                bias = self._of_length(end - start).to(q.dtype)
                out = functional.scaled_dot_product_attention(
                    heads[0], heads[1], heads[2], attn_mask=bias, scale=scale
                )
                parts.append(out.transpose(0, 1))
        return torch.cat(parts)

    def _of_length(self, length: int) -> Tensor:
        """Return the terms of all pairs: [H, length, length]."""
        if length not in self._made:
            place = torch.arange(length, device=self._by_distance.device)
            middle = self._by_distance.shape[1] // 2
            self._made[length] = self._by_distance[:, place[None] - place[:, None] + middle]
        return self._made[length]


class SeenKeys(PositionBias):
    """Lets sequences of one length attend to some of their tokens only, the same for all queries."""

    def __init__(self, seen: Tensor) -> None:
        """seen: [N, length] bool, at least one of each sequence"""
        self._seen = seen

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        query, key, value = (x.view(*self._seen.shape, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        mask = self._seen[:, None, None]
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
        return out.transpose(1, 2).flatten(0, 1)
