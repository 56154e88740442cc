"""`SharedContext` lets ranks that have the same key heads keep some tokens of a request each, not copies.

Runs of `interleave` tokens go to the ranks in turn. Blocks of all ranks have the same numbers, and `size`
times as many tokens as slots: only this file knows which rank has which token. Queries of the ranks are
gathered; every rank attends to the tokens that it has, for the heads of all; what it has seen goes to the
rank of its heads, which adds up what came, weighted by log-sum-exp. So does vLLM's decode context
parallelism with its exchange all to all; here prompts go the same way, but for latent ones that begin in
the step: every rank has their latent vectors, and makes the keys and values of its heads.
"""

import torch
from torch import Tensor

from octavo.messages.kv import CrossKV, KVCacheSpec
from octavo.runtime.attention.paged import PagedBackend
from octavo.runtime.batch import ForwardBatch, GroupTables
from octavo.runtime.distributed.group import Group
from octavo.runtime.kernels.attention import HeadInputs, Ragged, Scores, Share
from octavo.runtime.kernels.precision import InputPrecision
from octavo.runtime.platforms.platform import Platform

_SUM_BYTES = 4


class SharedContext(PagedBackend):
    """Attends to a cache whose tokens `ranks` have divided; where tokens see each other, to all of them."""

    def __init__(
        self, platform: Platform, input_precision: InputPrecision, ranks: Group, interleave: int
    ) -> None:
        super().__init__(platform, input_precision)
        self._ranks, self._interleave = ranks, interleave

    @staticmethod
    def supports(spec: KVCacheSpec, platform: Platform) -> str | None:
        return "a source is read whole." if isinstance(spec, CrossKV) else None

    def of_layers(self, spec: KVCacheSpec) -> PagedBackend:
        """Return this one, or of layers with a window, which every rank keeps whole, the usual."""
        return PagedBackend(self.platform, self.input_precision) if spec.sliding_window else self

    def run(
        self, new: HeadInputs, cache: Tensor, tables: GroupTables, batch: ForwardBatch, scores: Scores
    ) -> Tensor:
        if not scores.is_causal or self._ranks.process_group is None:  # ranks of a plan
            return super().run(new, cache, tables, batch, scores)
        q = self.platform.kernels.attention.store_kv(new, cache, self.slots(tables, cache, batch))
        return self._attend(q, cache, tables, *self._of_step(batch, len(q)), scores)

    def store(
        self, new: HeadInputs, cache: Tensor, tables: GroupTables, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """See AttentionBackend: all tokens are rounded as the cache rounds, then a rank keeps its own."""
        store, num_tokens = self.platform.kernels.attention.store_kv, len(new.q)
        every = cache.new_zeros(-(-num_tokens // cache.shape[2]), *cache.shape[1:])
        q = store(new, every, torch.arange(num_tokens, device=cache.device))
        stored = every.view(-1, cache.shape[-1])[:num_tokens].to(q.dtype)
        latent = stored[:, None]
        store(HeadInputs(q[:, :1], latent, latent), cache, self.slots(tables, cache, batch))
        return q, stored

    def attend_singles(
        self, q: Tensor, cache: Tensor, tables: GroupTables, batch: ForwardBatch, scores: Scores
    ) -> Tensor:
        if self._ranks.process_group is None:  # ranks of a plan
            return super().attend_singles(q, cache, tables, batch, scores)
        num_seen = self._count(batch.kv_lens[: len(q)])
        keys = Ragged(cu_q_lens=batch.cu_q_lens[: len(q) + 1], kv_lens=num_seen)
        return self._attend(q, cache, tables, keys, num_seen, scores)

    def _attend(
        self, q: Tensor, cache: Tensor, tables: GroupTables, keys: Ragged, num_seen: Tensor, scores: Scores
    ) -> Tensor:
        """Attend for heads of all ranks to what this one has of the first requests of a step; merge."""
        every = self._ranks.all_gather(q.flatten(1)).view(len(q), -1, q.shape[2])
        share = Share(num_seen, every.new_empty(every.shape[:2], dtype=torch.float32))
        plain = scores._replace(sinks=None)
        blocks = tables.block_tables[: len(keys.kv_lens)]
        seen = self.platform.kernels.attention.paged_attention(every, cache, blocks, keys, plain, share)
        return self._merge(seen, share.log_sums, scores.sinks)

    def slots(self, tables: GroupTables, cache: Tensor, batch: ForwardBatch) -> Tensor:
        """Return those of the tokens that this rank keeps; made once per step, shared by layers."""
        key = "context", id(tables)
        if key not in batch.shared:
            batch.shared[key] = own_slots(self._ranks, self._interleave, tables.slots, cache.shape[2])
        found: Tensor = batch.shared[key]
        return found

    def _of_step(self, batch: ForwardBatch, num_tokens: int) -> tuple[Ragged, Tensor]:
        """Return the requests with this rank's keys, and how many of them each token sees; once per step."""
        if "context" not in batch.shared:
            seen, ends = batch.kv_lens, batch.cu_q_lens[1:]
            if num_tokens != len(seen):
                token = torch.arange(num_tokens, dtype=ends.dtype, device=seen.device)
                request = torch.searchsorted(ends, token, right=True).clamp(max=len(ends) - 1)
                seen = (batch.kv_lens[request] - (ends[request] - 1 - token)).clamp(min=0)
            if (mutual := batch.mutual) is not None:
                counts = mutual.runs.cu_q_lens.diff().long()
                seen = seen.index_copy(0, mutual.rows, mutual.runs.kv_lens.repeat_interleave(counts))
            keys = Ragged(
                cu_q_lens=batch.cu_q_lens,
                kv_lens=self._count(batch.kv_lens),
                num_singles=batch.num_singles,
                common_start=batch.common_start,
            )
            batch.shared["context"] = keys, self._count(seen)
        keys, num_seen = batch.shared["context"]
        return keys, num_seen

    def _count(self, num_tokens: Tensor) -> Tensor:
        """Return how many of the first `num_tokens` tokens of a request this rank has: int32."""
        run = self._interleave
        rounds, rest = num_tokens // (run * self._ranks.size), num_tokens % (run * self._ranks.size)
        return (rounds * run + (rest - self._ranks.rank * run).clamp(0, run)).int()

    def _merge(self, seen: Tensor, log_sums: Tensor, sinks: Tensor | None) -> Tensor:
        """Return what all ranks have seen for the heads of this one: [T, num_heads, head_dim].

        seen, log_sums: of the heads of all ranks, [T, size * num_heads, …]; sinks: of this one's
        """
        ranks, size = self._ranks, self._ranks.size
        if ranks.peers is not None and ranks.peers.takes_gather(seen):
            own = slice(ranks.rank * seen.shape[1] // size, (ranks.rank + 1) * seen.shape[1] // size)
            parts, sums = (ranks.peers.gather(x)[:, :, own] for x in (seen, log_sums))
        else:
            packed = torch.cat([seen.view(torch.uint8), log_sums[:, :, None].view(torch.uint8)], -1)
            sent = packed.view(len(seen), size, -1).transpose(0, 1).flatten(0, 1)
            came = ranks.all_to_all(sent).view(size, len(seen), -1, packed.shape[2])
            parts = came[..., :-_SUM_BYTES].view(seen.dtype)
            sums = came[..., -_SUM_BYTES:].view(torch.float32)[..., 0]
        merge = self.platform.kernels.attention.merge_parts or merge_parts
        return merge(parts, sums, sinks)


def own_slots(ranks: Group, interleave: int, slots: Tensor, block_size: int) -> Tensor:
    """Return where this rank keeps the tokens of these slots, which are those of all ranks; -1 = not here."""
    blocks, places = slots // (block_size * ranks.size), slots % (block_size * ranks.size)
    turns, offsets = places // interleave, places % interleave
    own = turns // ranks.size * interleave + offsets
    is_own = (slots >= 0) & (turns % ranks.size == ranks.rank)
    return torch.where(is_own, blocks * block_size + own, -1)


def merge_parts(parts: Tensor, log_sums: Tensor, sinks: Tensor | None) -> Tensor:
    """See attention.MergeParts."""
    highest = log_sums.amax(0) if sinks is None else torch.maximum(log_sums.amax(0), sinks)
    highest = highest.clamp(min=torch.finfo(torch.float32).min)
    weights = (log_sums - highest).exp()
    total = weights.sum(0) if sinks is None else weights.sum(0) + (sinks - highest).exp()
    weights = weights / total.clamp(min=torch.finfo(torch.float32).tiny)
    return (weights[..., None] * parts).sum(0).to(parts.dtype)
