"""How the KV cache is laid out: what the runtime needs, and what the engine planned."""

from collections.abc import Sequence
from math import lcm
from typing import ClassVar

import msgspec


class HeadsKV(msgspec.Struct, array_like=True, frozen=True, tag="heads"):
    """A key and a value per head and token."""

    halves: ClassVar[int] = 2
    num_kv_heads: int
    """On one rank."""
    head_dim: int
    dtype: str
    """By torch's name; "int8" comes with scales."""
    bytes_per_token: int
    """Keys and values of one layer, all local heads."""
    sliding_window: int = 0
    """Positions a query sees, itself included; 0 = all."""


class CrossKV(HeadsKV, frozen=True, tag="cross"):
    """A key and a value per head and position of a request's source, all made when the request starts."""

    num_tokens: int = 0
    """Of the longest source; every request has so many slots."""


class LatentKV(msgspec.Struct, array_like=True, frozen=True, tag="latent"):
    """One vector per token, which is key and value of all heads, on every rank."""

    num_kv_heads: ClassVar[int] = 1
    halves: ClassVar[int] = 1
    head_dim: int
    """Components of the vector."""
    dtype: str
    bytes_per_token: int
    sliding_window: int = 0


class StateKV(msgspec.Struct, array_like=True, frozen=True, tag="state"):
    """One state per request, which every token changes.

    A block has one state for all its slots: that behind the last of its tokens which is computed. The next
    block begins with it, so blocks that are full keep the states of where they end.
    """

    bytes_per_token: ClassVar[int] = 0
    dtype: ClassVar[str] = "float32"
    sliding_window: ClassVar[int] = 2
    """A token needs the block of the one before it."""
    num_bytes: int
    """Of one layer's state, on one rank."""


KVCacheSpec = HeadsKV | CrossKV | LatentKV | StateKV
"""What one kind of layer keeps: a closed union, whose members tell their `bytes_per_token`."""


class KVCacheGroup(msgspec.Struct, array_like=True, frozen=True):
    """Layers that share one block table.

    All groups have the same number of layers (the last may be short of some): layer i of every group lives in
    cache tensor i, and one pool of blocks serves them all.
    """

    spec: KVCacheSpec
    layers: tuple[int, ...]


class ModelReady(msgspec.Struct, array_like=True):
    """What the workers tell the engine after loading."""

    groups: list[KVCacheGroup]
    available_bytes: int
    """Per rank, for the KV cache."""
    weight_bytes: int = 0
    """Per rank; 0 = not known."""
    workspace_bytes: int = 0
    """Per rank, kept back for the largest steps; 0 where that is not done."""
    host_weight_bytes: int = 0
    """Of `weight_bytes`, those that are kept in host memory."""

    @classmethod
    def of_all(cls, ranks: Sequence["ModelReady"]) -> "ModelReady":
        """Return the largest groups and uses of all ranks, and the least room."""
        largest = max(ranks, key=lambda r: max((len(group.layers) for group in r.groups), default=0))
        available = min(rank.available_bytes for rank in ranks)
        uses = zip(*((r.weight_bytes, r.workspace_bytes, r.host_weight_bytes) for r in ranks), strict=True)
        return cls(largest.groups, available, *map(max, uses))


class Forecast(msgspec.Struct, array_like=True):
    """What `ModelReady` will be, told before loading, and what its workspace consists of. Per rank."""

    ready: ModelReady
    step_bytes: int
    """Of the largest step. Where nothing is kept back for it, the system lends it."""
    recorded_bytes: int
    """Of recorded steps, which keep memory of their own."""
    table_bytes: int
    """Of the batch."""
    adapter_bytes: int
    """Of adapters in a GPU's slots, all of the largest rank."""
    matrices: dict[str, int] = {}
    """How many packed matrices there are, by type and shape."""


class StorePlan(msgspec.Struct, array_like=True, weakref=True):
    """A folder in which engines find each other's blocks."""

    folder: str
    fingerprint: bytes
    """Of all that keys and values depend on beside the tokens, and of how they are laid out; 32 bytes."""
    max_bytes: int
    num_ranks: int
    reads: bool
    writes: bool
    host: str = ""
    """Where blocks are served to engines that do not see the folder; empty: nowhere."""
    port: int = 0
    engine_id: str = ""
    may_recompute: bool = True
    """A prompt whose blocks do not come is computed; else its request ends with an error."""
    silence_s: float = 20.0
    """After which another engine is given up."""


class CachePlan(msgspec.Struct, array_like=True, tag="allocate"):
    """The planned cache; identical on every rank."""

    groups: list[KVCacheGroup]
    """None: no layer keeps anything, and there is no cache."""
    num_blocks: int
    block_size: int
    """Slots per block of the groups that keep the most bytes per token."""
    num_host_blocks: int = 0
    """Cells of host memory for contents of blocks, on each rank."""
    max_model_len: int = 0
    """Longest prompt + output that the engine takes; 0 = as configured."""
    store: StorePlan | None = None
    num_result_tokens: int = 0
    """1: the result of a prompt takes no place in max_model_len, as a token would."""
    state_interval: int = 512
    """Least number of tokens per block of the groups that keep states."""
    context_ranks: int = 1
    """Ranks that divide the tokens of a block: each has as many slots for them as `block_size` says."""

    @property
    def max_total_tokens(self) -> int:
        """Most tokens of a request, what it results in included."""
        return self.max_model_len + self.num_result_tokens

    @property
    def num_tensors(self) -> int:
        """Cache tensors, in each of which a block has its part."""
        return max((len(group.layers) for group in self.groups), default=0)

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of one block in one cache tensor: the same in all groups, on one rank.

        As many times `block_size` slots as it takes to hold a state.
        """
        unit = self.block_size * max((group.spec.bytes_per_token for group in self.groups), default=0)
        state = max((size for size, _ in self._states), default=0)
        return max(unit, -(-state // unit) * unit) if unit else state

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all its layers, on one rank."""
        return self.num_tensors * self.layer_block_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all groups, on one rank, until windows pass."""
        kept = (group.spec.bytes_per_token // self.ranks_of(group.spec) for group in self.groups)
        return self.num_tensors * sum(kept)

    def ranks_of(self, spec: KVCacheSpec) -> int:
        """Return how many ranks divide the tokens of such layers: each keeps whole windows and states."""
        return 1 if spec.sliding_window else self.context_ranks

    @property
    def block_sizes(self) -> list[int]:
        """Tokens per block, by group: the fewer bytes a token takes, the more of them share a block.

        Where a state ends, so do blocks of all groups.
        """
        specs = [group.spec for group in self.groups]
        kept = [(spec.bytes_per_token, self.ranks_of(spec)) for spec in specs]
        sizes = [size and self.layer_block_bytes // size * ranks for size, ranks in kept]
        unit = lcm(*filter(None, sizes))
        return [size or max(-(-self.state_interval // unit), 1) * unit for size in sizes]

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one request, in all its layers, on one rank."""
        return sum(size * count for size, count in self._states)

    @property
    def _states(self) -> list[tuple[int, int]]:
        """Return bytes of a state, layers, by group."""
        return [(g.spec.num_bytes, len(g.layers)) for g in self.groups if isinstance(g.spec, StateKV)]
