"""`CrossAttention` lets a decoder's tokens read what an encoder made of their request's source.

Keys and values of a source are made once, when its request starts (`keep`, called by the worker's
SourcePart). To the kernels of the paged cache every token is a row with one query, which sees all of the
source, wherever the token itself stands: so steps are captured and recorded as those of any decoder.
"""

import torch
from torch import Tensor, nn

from octavo.messages.kv import CrossKV, HeadsKV
from octavo.runtime.batch import ForwardBatch
from octavo.runtime.kernels.attention import HeadInputs, Ragged, Scores
from octavo.runtime.kernels.cache_layout import make_spec
from octavo.runtime.layers.attention import check_heads
from octavo.runtime.layers.build import BuildContext
from octavo.runtime.layers.linear import MergedColumnLinear, RowLinear
from octavo.runtime.layers.self_attention import HeadsArch


class CrossAttention(nn.Module):
    """Computes queries of tokens → attention over the source's keys and values → out."""

    is_causal = False

    def __init__(
        self, arch: HeadsArch, build: BuildContext, layer_id: int, size: int, num_source_tokens: int
    ) -> None:
        """Make the layers. layer_id: behind those of all others; num_source_tokens: of the longest source."""
        super().__init__()
        heads, head_dim = arch.num_heads, arch.head_dim
        check_heads(heads, build.parallel.tp_size)
        self.layer_id, self._head_dim = layer_id, head_dim
        at_q, at_kv = build.at("q"), build.at("kv")
        queries = at_q.split("", heads * head_dim, head_dim)
        keys, values = (at_kv.split(name, heads * head_dim, head_dim) for name in ("k", "v"))
        self.q = MergedColumnLinear(at_q, size, (queries,), arch.qkv_bias)
        self.kv = MergedColumnLinear(at_kv, size, (keys, values), arch.qkv_bias)
        self.out = RowLinear(build.at("out"), heads * head_dim, size, arch.out_bias)
        one = make_spec(heads // build.parallel.tp_size, head_dim, build.kv_dtype)
        assert isinstance(one, HeadsKV)
        sizes = one.num_kv_heads, head_dim, one.dtype, one.bytes_per_token
        self.kv_spec = CrossKV(*sizes, num_tokens=num_source_tokens)
        self._kernels = build.kernels.attention
        self._scores = Scores(arch.scale, input_precision=build.attention.input_precision)

    def keep(self, source: Tensor, cache: Tensor, slots: Tensor) -> None:
        """Store the keys and values of a source, [S, size], at its slots, [S] int64."""
        k, v = self.kv(source).unflatten(-1, (-1, self._head_dim)).chunk(2, dim=1)
        self._kernels.store_kv(HeadInputs(torch.empty_like(k), k, v), cache, slots)

    def keys(self, source: Tensor) -> Tensor:
        """Return the keys of a source, [S, heads, head_dim]."""
        heads: Tensor = self.kv(source).unflatten(-1, (-1, self._head_dim))
        return heads.chunk(2, dim=1)[0]

    def weights(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return how much queries [T, head_dim] of a head attend to keys [S, head_dim] of it: [T, S]."""
        return (queries @ keys.t() * self._scores.scale).softmax(-1)

    def forward(self, x: Tensor, batch: ForwardBatch, rows: Tensor | None = None) -> Tensor:
        """Map [T, size] to [T, size]. rows: tokens of the batch that x has, [T] int64; None = all."""
        q = self.q(x).unflatten(-1, (-1, self._head_dim))
        if batch.source_queries is not None:
            batch.source_queries[self.layer_id] = q
        owners, ragged = _read_as_rows(batch, rows)
        tables = batch.tables(self.layer_id).block_tables
        tables = tables if owners is None else tables[owners]
        cache = batch.kv_caches[self.layer_id]
        seen = self._kernels.paged_attention(q, cache, tables, ragged, self._scores)
        out: Tensor = self.out(seen.flatten(1))
        return out


def _read_as_rows(batch: ForwardBatch, rows: Tensor | None) -> tuple[Tensor | None, Ragged]:
    """Return the request of each token, None if each has one; and the tokens as rows of one query."""
    key = rows is None
    if key not in batch.source_rows:
        lens, ends = batch.source_lens, batch.cu_q_lens[1:]
        assert lens is not None, "the batch has no sources"
        if rows is None and batch.num_singles == len(lens):
            batch.source_rows[key] = (
                None,
                Ragged(cu_q_lens=batch.cu_q_lens, kv_lens=lens, num_singles=len(lens), longest_q=1),
            )
            return batch.source_rows[key]
        count, device = len(batch.positions), ends.device
        tokens = torch.arange(count, dtype=torch.int32, device=device) if rows is None else rows.int()
        owners = torch.searchsorted(ends, tokens, right=True).clamp(max=len(lens) - 1)
        starts = torch.arange(len(tokens) + 1, dtype=torch.int32, device=device)
        ragged = Ragged(cu_q_lens=starts, kv_lens=lens[owners], num_singles=len(tokens), longest_q=1)
        batch.source_rows[key] = owners, ragged
    return batch.source_rows[key]
