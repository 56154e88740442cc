"""An `Encoder` is a Decoder whose tokens all see each other; its embeddings have types and a norm.

Our parameter names beside the decoder's: embed_types, embed_norm, head_dense, head_norm.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.runtime.batch import ForwardBatch
from octavo.runtime.layers.build import BuildContext
from octavo.runtime.layers.embedding import Embedding
from octavo.runtime.layers.linear import ReplicatedLinear
from octavo.runtime.layers.mlp import make_activation
from octavo.runtime.layers.norm import make_norm
from octavo.runtime.models.arch import Arch
from octavo.runtime.models.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class EncoderArch(Arch):
    """An EncoderArch describes an encoder. position_offset: number of the first token's position"""

    num_token_types: int = 0
    embedding_norm: bool = True
    position_offset: int = 0
    tied_head: bool = True
    head_bias: bool = True
    head_dense_bias: bool = True
    head_activation: str = "gelu"
    """Of the layer between hidden states and the head that fills masked places."""


class Encoder(Decoder):
    """Takes an EncoderArch."""

    def __init__(self, arch: Arch, build: BuildContext) -> None:
        assert isinstance(arch, EncoderArch)
        super().__init__(arch, build)
        if self._learned_positions:
            place, rows, first = build.at("embed_positions"), arch.num_learned_positions, arch.position_offset
            self.embed_positions = Embedding(place, rows, arch.hidden_size, first=first)
        self._first_type = torch.zeros(1, dtype=torch.int64, device=build.device)
        self.embed_types = self.embed_norm = None
        if arch.num_token_types:
            self.embed_types = Embedding(build.at("embed_types"), arch.num_token_types, arch.hidden_size)
        if arch.embedding_norm:
            self.embed_norm = make_norm(arch.norm, build.at("embed_norm"), arch.hidden_size)
        if arch.has_head:
            size, kernel = arch.hidden_size, build.kernels.activate
            self.head_dense = ReplicatedLinear(build.at("head_dense"), size, size, arch.head_dense_bias)
            self.head_norm = make_norm(arch.norm, build.at("head_norm"), size)
            self._head_activation = make_activation(arch.head_activation, kernel, gated=False)

    def embed(self, batch: ForwardBatch) -> Tensor:
        x: Tensor = self.embed_tokens(batch.input_ids)
        if self.embed_types is not None:
            types = batch.token_types  # as a rule all have the first type: one row is read
            x = x + (self.embed_types(self._first_type)[0] if types is None else self.embed_types(types))
        if self._learned_positions:
            x = x + self.embed_positions(batch.positions)
        return x if self.embed_norm is None else self.embed_norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """See Model.logits: what could stand in a token's place."""
        return super().logits(self.head_norm(self._head_activation(self.head_dense(hidden))))
