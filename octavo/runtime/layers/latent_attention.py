"""`LatentAttention` keeps one vector per token, from which every head makes its key and value (MLA).

Queries are brought to where the keys are, instead of keys to every head (the absorbed form of DeepSeek-V2,
https://arxiv.org/abs/2405.04434): attention has one key head, whose values are the keys themselves. A vector
has the components that rotate, then the latent ones.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from octavo.messages.kv import KVCacheSpec
from octavo.runtime.batch import ForwardBatch
from octavo.runtime.kernels.attention import HeadInputs, HeadNorms, PlainPrompts, Rotation
from octavo.runtime.kernels.cache_layout import make_latent_spec
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.layers.attention import Attention, check_heads
from octavo.runtime.layers.build import BuildContext, Layer
from octavo.runtime.layers.linear import MergedColumnLinear, ReplicatedLinear, RowLinear
from octavo.runtime.layers.norm import RMSNorm
from octavo.runtime.layers.rows import make_row_gather
from octavo.runtime.layers.self_attention import AttentionSetting
from octavo.runtime.quantization.blocks import blocks_of_one
from octavo.runtime.quantization.method import Term
from octavo.runtime.quantization.parameter import Layout

_EPS = 1e-6
"""Of the norms inside, whatever the model's others have."""


@dataclass(frozen=True, kw_only=True)
class LatentArch:
    """Keys and values of all heads come from a vector of `latent_size`; `rope_size` more components rotate.

    query_rank: queries come from a normalised vector of this size; 0 = from the input
    plain_size, value_size: components of a head's query that do not rotate, and of what it gives
    """

    num_heads: int
    latent_size: int
    rope_size: int
    plain_size: int
    value_size: int
    scale: float
    query_rank: int = 0
    bias: bool = False
    is_causal: ClassVar[bool] = True

    @property
    def query_size(self) -> int:
        """Return the components of a head's query."""
        return self.plain_size + self.rope_size

    @property
    def head_dim(self) -> int:
        """Return the components of what the cache keeps."""
        return self.rope_size + self.latent_size

    def kv_spec(self, tp_size: int, dtype: torch.dtype, sliding_window: int = 0) -> KVCacheSpec:
        """Return the cache of one rank, in numbers of this type. Raises ConfigError, Unsupported."""
        assert not sliding_window
        check_heads(self.num_heads, tp_size)
        return make_latent_spec(self.head_dim, dtype)


class LatentAttention(nn.Module):
    """Computes queries and the latent vector → norm, rope → attention over the cache → out."""

    def __init__(
        self, arch: LatentArch, build: BuildContext, layer_id: int, size: int, setting: AttentionSetting
    ) -> None:
        super().__init__()
        self._rotary = setting.rotary
        self._gather = make_row_gather(build)
        rank, width = arch.query_rank, arch.query_size
        if rank:
            self.q_a = ReplicatedLinear(build.at("q_a"), size, rank, arch.bias)
            self.q_norm = RMSNorm(build.at("q_norm"), rank, _EPS)
        queries = build.at("q").split("", arch.num_heads * width, width)
        self.q = MergedColumnLinear(build.at("q"), rank or size, (queries,), False)
        self.kv_a = _RopeFirst(build.at("kv_a"), size, arch)
        self.kv_norm = RMSNorm(build.at("kv_norm"), arch.latent_size, _EPS)
        self.heads = LatentHeads(build.at("heads"), arch)
        self._norms = HeadNorms(None, self.kv_norm.weight, _EPS)
        spec = arch.kv_spec(build.parallel.tp_size, build.kv_dtype, setting.sliding_window)
        self.attention = Attention(build, layer_id, spec, scale=arch.scale, keys_only=arch.rope_size)
        self.out = RowLinear(build.at("out"), arch.num_heads * arch.value_size, size, arch.bias)
        self._has_query_rank = bool(rank)
        self._prompts = build.kernels.attention.latent_prompts

    def forward(self, x: Tensor, batch: ForwardBatch, rows: Tensor | None = None) -> Tensor:
        """Map [T, size] to [T, size], or to these rows of it."""
        out: Tensor = self.out(self._attend(x, batch, rows))
        return out

    def defer(self, x: Tensor, batch: ForwardBatch, rows: Tensor | None = None) -> Term:
        """Return `forward` as a term for an RMS norm that adds it."""
        return self.out.defer(self._attend(x, batch, rows))

    def _attend(self, x: Tensor, batch: ForwardBatch, rows: Tensor | None) -> Tensor:
        q = self.q(self.q_norm(self.q_a(x)) if self._has_query_rank else x)
        latent = self.kv_a(x)[:, None]
        rotation = self._rotary.rotation(batch) if self._rotary else None
        if self._prompts is not None and batch.from_start and batch.longest_q > 1:
            return self._gather(self._attend_plainly(q, latent, batch, rotation), rows)
        seen = self.attention(self.heads.absorb(q), latent, latent, batch, rotation, self._norms)
        return self.heads.values(self._gather(seen, rows))

    def _attend_plainly(
        self, q: Tensor, latent: Tensor, batch: ForwardBatch, rotation: Rotation | None
    ) -> Tensor:
        """Attend for single tokens as always, and for prompts to keys and values made of what is stored."""
        assert self._prompts is not None
        heads, n = self.heads, batch.num_singles
        absorbed = heads.absorb(q, n)
        new = HeadInputs(absorbed, latent, latent, rotation, self._norms)
        absorbed, stored = self.attention.store(new, batch)
        out = q.new_empty(len(q), heads.num_heads, heads.value_size)
        if n:
            heads.values(self.attention.attend_singles(absorbed[:n], batch).flatten(1), out[:n])
        rope = absorbed.shape[2] - heads.latent_size
        prompts = PlainPrompts(
            q[n:].view(len(q) - n, heads.num_heads, -1),
            absorbed[n:, :, :rope],
            heads.keys_and_values(stored[n:, rope:]),
            stored[n:, :rope],
            batch.cu_q_lens[n:],
            self.attention.scale,
        )
        self._prompts(prompts, out[n:])
        return out.flatten(1)


class _RopeFirst(ReplicatedLinear):
    """Makes latent vectors: checkpoints have what rotates last, caches have it first."""

    def __init__(self, build: BuildContext, size: int, arch: LatentArch) -> None:
        super().__init__(build, size, arch.head_dim, arch.bias)
        self._rope_size = arch.rope_size

    def after_load(self) -> None:
        super().after_load()
        self.method.roll(self._rope_size)
        if self.bias is not None:
            self.bias.copy_(self.bias.roll(self._rope_size))


class LatentHeads(Layer):
    """Owns what makes a head's key and value of the latent: [plain_size + value_size, latent_size] each.

    Kept as plain numbers, whatever the checkpoint has.
    """

    def __init__(self, build: BuildContext, arch: LatentArch) -> None:
        super().__init__()
        rows = arch.plain_size + arch.value_size
        layout = Layout((build.split("", arch.num_heads * rows, rows),), (arch.latent_size,))
        self._dtype, self._packed = build.scheme.storage.weight_dtype, build.scheme.is_packed(build.path)
        if self._packed:
            self._method = self.make_matrix(build, layout)
            self._weight = torch.empty(layout.shape, dtype=self._dtype, device="meta")
        else:
            self._weight = self.make_vector(build, layout, dtype=self._dtype)
        self._arch, self._on_cpu, self._device = arch, build.device.type == "cpu", build.device
        self._multiply = build.kernels.linear.block_matmul
        self.num_heads = self._weight.numel() // (rows * arch.latent_size)
        self.latent_size, self.value_size = arch.latent_size, arch.value_size

    def after_load(self) -> None:
        """Turn queries' rotating components to the front, and the matrices of keys to those of queries."""
        super().after_load()
        arch = self._arch
        if self._packed:
            rows = torch.arange(len(self._weight), device=self._device)
            self._weight = self._method.gather(rows).to(self._dtype)
            self.matrices.clear()
            del self._method
        heads = self._weight.view(-1, arch.plain_size + arch.value_size, arch.latent_size)
        keys, self._values = heads[:, : arch.plain_size], heads[:, arch.plain_size :]
        self._queries = keys.new_zeros(len(heads), arch.head_dim, arch.query_size)
        self._queries[:, : arch.rope_size, arch.plain_size :] = torch.eye(arch.rope_size).to(keys)
        self._queries[:, arch.rope_size :, : arch.plain_size] = keys.transpose(1, 2)

    def absorb(self, q: Tensor, first: int | None = None) -> Tensor:
        """Bring queries [T, heads * query_size] to where the keys are: [T, heads, head_dim].

        first: so many of them whole; of the others only what rotates
        """
        q = q.view(len(q), self.num_heads, self._arch.query_size)
        if first is None:
            return self._product(q, self._queries)
        out = q.new_empty(len(q), self.num_heads, self._arch.head_dim)
        self._product(q[:first], self._queries, out[:first])
        out[first:, :, : self._arch.rope_size] = q[first:, :, self._arch.plain_size :]
        return out

    def values(self, seen: Tensor, out: Tensor | None = None) -> Tensor:
        """Make each head's output of what it has seen, [T, heads * head_dim]: [T, heads * value_size]."""
        latent = seen.view(len(seen), len(self._values), self._arch.head_dim)[:, :, self._arch.rope_size :]
        return self._product(latent, self._values, out).flatten(1)

    def keys_and_values(self, latent: Tensor) -> Tensor:
        """Make those of all heads, but what rotates: [T, heads, plain_size + value_size]."""
        made = functional.linear(latent, self._weight.view(-1, self.latent_size))
        return made.view(len(latent), self.num_heads, -1)

    def _product(self, x: Tensor, matrices: Tensor, out: Tensor | None = None) -> Tensor:
        """Multiply heads [T, heads, inputs] by a matrix each, [heads, outputs, inputs]."""
        out = x.new_empty((len(x), *matrices.shape[:2])) if out is None else out
        if not self._on_cpu:
            torch.bmm(x.transpose(0, 1), matrices.transpose(1, 2), out=out.transpose(0, 1))
            return out
        for head, matrix in enumerate(matrices):
            blocks = blocks_of_one(matrix)
            self._multiply(x[:, head], Packed(blocks.data, blocks.type.name), None, out[:, head])
        return out
