"""`ForwardBatch`: one step as tensors; the only thing a model's `forward` receives.

Made by worker/prepare, read by models, layers and attention. Ragged: the tokens of all requests stand one
after the other, without padding. T = tokens of the step, R = requests of the step.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from octavo.runtime.kernels.attention import Ragged, Rotation
from octavo.runtime.kernels.position_bias import PositionBias

MAX_CAPTURED_TOKENS = 2048
"""Tokens of a step that may be captured in a CUDA graph; longer steps never are."""


@dataclass(slots=True)
class GroupTables:
    """Where one KV cache group keeps the step's tokens.

    block_tables: [R, max_blocks] int32, row r = blocks of request r in order; entries past its length, and
                  those a sliding window has left, are arbitrary and must not be read
    slots:        [T] int64, block_id * block_size + offset of each new token; -1 = keep nothing
    """

    block_tables: torch.Tensor
    slots: torch.Tensor


@dataclass(slots=True)
class StepTables(GroupTables):
    """Where layers that keep nothing between steps have a step's keys and values, by turns.

    num_blocks: of the memory, which grows to the largest layer's (attention/step_cache)
    """

    num_blocks: int
    memory: torch.Tensor | None = None


def group_tables(block_tables: Iterable[torch.Tensor], slots: Iterable[torch.Tensor]) -> list[GroupTables]:
    """Return the tables of all groups from what each has of both."""
    return [GroupTables(*tables) for tables in zip(block_tables, slots, strict=True)]


@dataclass(slots=True)
class GivenEmbeds:
    """Rows of the step whose embeddings come with the request.

    rows: [N] int64, distinct; values: [N, embedding_size]
    """

    rows: torch.Tensor
    values: torch.Tensor

    def add_part(self, index: int, stream: torch.Tensor) -> torch.Tensor:
        """Return `stream`, [T, size], with part `index` of the values' columns, if there is one, added."""
        size = stream.shape[-1]
        part = self.values[:, index * size : (index + 1) * size]
        return stream.index_add(0, self.rows, part.to(stream.dtype)) if part.shape[1] else stream


@dataclass(slots=True)
class MutualSpans:
    """Runs of tokens that see each other, later ones too, and what stands before them.

    rows: [N] int64, places in the step, run by run; owners: [runs] int64, the request of each
    runs: their bounds in `rows`, and the tokens of their requests up to the end of each
    """

    rows: torch.Tensor
    owners: torch.Tensor
    runs: Ragged


@dataclass(slots=True, kw_only=True)
class ForwardBatch(Ragged):
    """The step's tokens and where their keys and values live.

    input_ids:  [T] int64
    positions:  [T] int64, place of each token in its request; behind images, where a rope counts them by
                rows and columns, moved by as much as that differs
    kv_caches:  by layer id, as in kernels.cache_layout; layers may share a tensor
    groups:     tables by group; layer i reads groups[group_of_layer[i]]
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    kv_caches: list[torch.Tensor]
    groups: list[GroupTables]
    group_of_layer: list[int]
    given_embeds: GivenEmbeds | None = None
    deep_embeds: GivenEmbeds | None = None
    """What the first layers add to their outputs, side by side: values [N, layers * hidden_size]."""
    patch_positions: torch.Tensor | None = None
    """[3, T] int64: time, row and column of each token, where they differ; None = `positions` for all."""
    wanted: torch.Tensor | None = None
    """[S] int64: the tokens whose last hidden states somebody reads; None = all."""
    mutual: MutualSpans | None = None
    """In layers that are causal otherwise."""
    rotations: dict[str, Rotation] = field(default_factory=dict)
    """Rotary tables by rope: made once per step, shared by layers."""
    shared: dict[Hashable, Any] = field(default_factory=dict)
    """The same of what else depends on positions (layers/positions)."""
    token_types: torch.Tensor | None = None
    """[T] int64, 1 for tokens of the second text of a pair; None = all 0."""
    position_bias: PositionBias | None = None
    """Of models whose scores depend on distances, too; where tokens see each other,"""
    distance_terms: torch.Tensor | None = None
    """and where they see earlier ones in the cache, as in kernels.attention.DistanceAttention."""
    entered: torch.Tensor | None = None
    """[T, size]: what the stage before has left, where others receive and send it than the model."""
    step_tables: StepTables | None = None
    """Of layers without a cache: made once per step, shared by them."""
    source_lens: torch.Tensor | None = None
    """[R] int32, positions of each request's source, whose keys and values groups of CrossKV have."""
    source_rows: dict[bool, tuple[torch.Tensor | None, Ragged]] = field(default_factory=dict)
    """How tokens read sources (layers/cross_attention): made once per step, shared by layers."""
    source_queries: dict[int, torch.Tensor] | None = None
    """By layer id: where those layers leave their queries, [T, heads, head_dim], if asked to."""

    def give_embeds(self, given: GivenEmbeds) -> None:
        """Add rows, distinct from those that are given already."""
        if (known := self.given_embeds) is not None:
            given = GivenEmbeds(torch.cat([known.rows, given.rows]), torch.cat([known.values, given.values]))
        self.given_embeds = given

    def with_given_embeds(self, embeddings: torch.Tensor) -> torch.Tensor:
        """The embeddings of `input_ids`, [T, embedding_size], but the given ones where there are some."""
        given = self.given_embeds
        if given is None:
            return embeddings
        return embeddings.index_copy(0, given.rows, given.values.to(embeddings.dtype))

    def tables(self, layer_id: int) -> GroupTables:
        """The tables that layer `layer_id` uses."""
        return self.groups[self.group_of_layer[layer_id]]
