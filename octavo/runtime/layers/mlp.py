"""`MLP` is the feed-forward block, gated or plain; configs name its activation."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from octavo.base.errors import Unsupported
from octavo.runtime.kernels.activations import Activate, Activation
from octavo.runtime.layers.build import BuildContext, Layer
from octavo.runtime.layers.linear import MergedColumnLinear, RowLinear
from octavo.runtime.quantization.method import Term
from octavo.runtime.quantization.parameter import vector

GATES: dict[str, Activation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def make_activation(name: str, kernel: Activate, *, gated: bool) -> Callable[[Tensor], Tensor]:
    """Return the kernel of an activation; gated: of (gate, up). Raises Unsupported for an unknown name."""
    table: dict[str, Callable[[Tensor], Tensor]] = {
        known: partial(kernel, activation=kind, gated=gated) for known, kind in GATES.items()
    }
    if not gated:
        table |= {"relu": functional.relu, "silu": functional.silu}
        table["relu2"] = lambda x: (above := functional.relu(x)) * above
        table["quick_gelu"] = lambda x: x * torch.sigmoid(1.702 * x)
    if name not in table:
        raise Unsupported(f"Activation {name!r} is not supported. Supported: {', '.join(sorted(table))}.")
    return table[name]


class XIELU(Layer):
    """An activation with learned slopes to both sides of 0 (https://arxiv.org/abs/2411.13010)."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        names, one = ("alpha_p", "alpha_n", "beta", "eps"), vector(1)
        self._learned = [self.make_vector(build, one, name, torch.float32) for name in names]
        self._kernel = build.kernels.xielu

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations of any rows."""
        return self._kernel(x, self._learned)


@dataclass(frozen=True, kw_only=True)
class DenseArch:
    """A DenseArch describes a feed-forward block that every token takes."""

    intermediate_size: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    down_bias: bool = False
    """The second projection has a bias, whether the first has one or not."""


class MLP(nn.Module):
    """Computes up → activation → down; a gated one multiplies by the activation of `gate`."""

    def __init__(self, arch: DenseArch, build: BuildContext, size: int, *, reduces: bool = True) -> None:
        """Make the layers. reduces: every rank gets the whole sum, not its own part of it."""
        super().__init__()
        up, names = build.at("up"), ("gate", "up") if arch.gated else ("up",)
        shards = tuple(up.split(name, arch.intermediate_size) for name in names)
        self.up = MergedColumnLinear(up, size, shards, arch.bias)
        down_bias = arch.bias or arch.down_bias
        self.down = RowLinear(build.at("down"), arch.intermediate_size, size, down_bias, reduces=reduces)
        self._kind, self._is_gated = GATES.get(arch.activation), arch.gated
        self._activation: Callable[[Tensor], Tensor]
        if arch.activation == "xielu" and not arch.gated:
            self.slopes = XIELU(build.at("slopes"))
            self._activation = self.slopes.forward
        else:
            self._activation = make_activation(arch.activation, build.kernels.activate, gated=arch.gated)
        self._is_product = self.up.bias is None and self.down.is_product

    def forward(self, x: Tensor) -> Tensor:
        """Map [T, size] to [T, size]."""
        out = self._fused(x)
        return self.down(self._inner(x)) if out is None else out

    def defer(self, x: Tensor) -> Term:
        """Return `forward` as a term for an RMS norm that adds it."""
        out = self._fused(x)
        return self.down.defer(self._inner(x)) if out is None else out

    def _fused(self, x: Tensor) -> Tensor | None:
        """Return the result of one kernel for both projections; None if there is none."""
        if self._kind is None or not (self._is_gated and self._is_product):
            return None
        return self.up.method.apply_feed_forward(x, self._kind, self.down.method)

    def _inner(self, x: Tensor) -> Tensor:
        inner, method = None, self.up.method
        if self._kind is not None:
            apply = method.apply_gated if self._is_gated else method.apply_activated
            inner = apply(x, self.up.bias, self._kind)
        return self._activation(self.up(x)) if inner is None else inner
