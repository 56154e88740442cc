"""`Pooler` maps pooled hidden states to embeddings or scores: a Sentence-BERT chain, or a classifier."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from octavo.config.pooling import PoolingConfig, Projection
from octavo.config.sentence_bert import Stage
from octavo.runtime.layers.build import BuildContext
from octavo.runtime.layers.linear import ReplicatedLinear
from octavo.runtime.layers.norm import NormArch, make_norm

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "GELU": functional.gelu,
    "ReLU": functional.relu,
    "SiLU": functional.silu,
    "Sigmoid": torch.sigmoid,
}
_NORM_EPS = 1e-5  # of torch's LayerNorm, which sentence-transformers takes


@dataclass(frozen=True, kw_only=True)
class ClassifierArch:
    """A ClassifierArch describes (dense → activation →) (norm →) linear, and names them in checkpoints.

    dense, norm: "" = there is none; per_token: token classification takes them, too; token_out: its name for
    out, if that is another
    """

    dense: str = ""
    dense_bias: bool = True
    activation: str = "Tanh"
    norm: str = ""
    out: str = "score"
    out_bias: bool = False
    token_out: str = ""
    per_token: bool = False


class Pooler(nn.Module):
    """Computes what follows pooling, but the last normalisation or activation, which a request may refuse."""

    def __init__(
        self, config: PoolingConfig, build: BuildContext, size: int, classifier: ClassifierArch
    ) -> None:
        """size: of a hidden state"""
        super().__init__()
        self.is_embedder = config.is_embedder
        self.projections = nn.ModuleDict(
            {p.task: _Projection(p, build.at(f"projections.{p.task}"), size) for p in config.projections}
        )
        if self.is_embedder:
            self.stages = nn.ModuleList(
                _make_stage(stage, build.at(f"stages.{i}")) for i, stage in enumerate(config.stages)
            )
            return
        if config.label_tokens:
            return
        per_token = config.tasks[0] == "token_classify"
        has_dense = classifier.per_token or not per_token
        self.dense = self.norm = None
        if classifier.dense and has_dense:
            self.dense = ReplicatedLinear(build.at("dense"), size, size, classifier.dense_bias)
        if classifier.norm and has_dense:
            norm = NormArch(kind="layer", eps=_NORM_EPS)
            self.norm = make_norm(norm, build.at("norm"), size)
        self._activation = _ACTIVATIONS[classifier.activation]
        self.out = ReplicatedLinear(
            build.at("out"), size, config.num_labels, classifier.out_bias or per_token
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, size] to embeddings or logits, float32."""
        if self.is_embedder:
            for stage in self.stages:
                x = stage(x)
            return x.float()
        if self.dense is not None:
            x = self._activation(self.dense(x))
        if self.norm is not None:
            x = self.norm(x)
        logits: Tensor = self.out(x)
        return logits.float()


class _Projection(nn.Module):
    def __init__(self, projection: Projection, build: BuildContext, size: int) -> None:
        super().__init__()
        linear = ReplicatedLinear(build.at("linear"), size, projection.outputs, projection.bias)
        self.linear, self._projection = linear, projection

    def forward(self, x: Tensor) -> Tensor:
        """Map all tokens of a prompt, [tokens, size], but the special ones that are left out."""
        projection = self._projection
        y: Tensor = self.linear(x[projection.skips_first : len(x) - projection.skips_last]).float()
        return y.relu() if projection.relu else y


class _Dense(nn.Module):
    def __init__(self, stage: Stage, build: BuildContext) -> None:
        super().__init__()
        self.linear = ReplicatedLinear(build.at("linear"), stage.inputs, stage.outputs, stage.bias)
        self._activation = _ACTIVATIONS[stage.activation]

    def forward(self, x: Tensor) -> Tensor:
        return self._activation(self.linear(x))


class _LayerNorm(nn.Module):
    def __init__(self, stage: Stage, build: BuildContext) -> None:
        super().__init__()
        self.norm = make_norm(
            NormArch(kind="layer", bias=True, eps=_NORM_EPS), build.at("norm"), stage.inputs
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        return out


class _Normalize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.normalize(x, dim=-1)


def _make_stage(stage: Stage, build: BuildContext) -> nn.Module:
    if stage.kind == "dense":
        return _Dense(stage, build)
    return _LayerNorm(stage, build) if stage.kind == "layer_norm" else _Normalize()
