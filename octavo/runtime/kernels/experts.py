"""The family of experts: which experts take a token, and the products with the matrices of those.

T = tokens, E = experts, k = of them per token, H = size of a token, I = size of an expert's inner layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from octavo.runtime.kernels.activations import Activation
from octavo.runtime.kernels.adapters import AdapterKernels, LowRankTable
from octavo.runtime.kernels.linear import Packed


class Router(NamedTuple):
    """How scores, one per expert, become a choice of experts and their weights.

    top_k:       experts of a token
    scores:      of the logits: softmax over all experts, sigmoid, or as they are; then the weights are a
                 softmax over the chosen ones
    normalises:  weights are divided by their sum + `epsilon`
    factor:      multiplies weights
    num_groups:  neighbouring experts form so many groups of one size, `top_groups` of which are open:
                 those whose `best_of_group` best experts have the highest sum
    """

    top_k: int
    scores: Literal["softmax", "sigmoid", "logits"] = "softmax"
    normalises: bool = False
    epsilon: float = 0.0
    factor: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    best_of_group: int = 1


class Routing(NamedTuple):
    """The experts of each token.

    ids: [T, k] int32, different ones, or -1: one that other ranks have; weights: [T, k] float32
    """

    ids: Tensor
    weights: Tensor


class Changes(NamedTuple):
    """What adapters change of both products of every expert, without factors and biases.

    slots: [T] int32, of the tokens; up, down: by slot * E + expert
    """

    slots: Tensor
    up: LowRankTable
    down: LowRankTable
    kernels: AdapterKernels


class ExpertForm(NamedTuple):
    """What an expert is beside its matrices.

    weighs_inputs: weights multiply what an expert takes, not what it gives
    up_bias, down_bias: [E, 2 I], gates first, and [E, H]
    limit, alpha:  where limit > 0, gpt-oss's activation: gates are cut off above it, values to both sides;
                   gate * sigmoid(alpha * gate) * (value + 1)
    changes:       BlockExperts adds them; tokens whose slots have none get the bits that they get without
    """

    activation: Activation = "silu"
    weighs_inputs: bool = False
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    limit: float = 0.0
    alpha: float = 1.0
    changes: Changes | None = None


class Stacks(NamedTuple):
    """Packed matrices of all experts, which may lie apart: [E, I, row bytes], and down [E, H, row bytes]."""

    gate: Packed
    up: Packed
    down: Packed


class Shared(NamedTuple):
    """What the experts' sum is added to: the output of shared experts.

    rows: [T, H]; gate: [T, 1], whose sigmoid multiplies them
    """

    rows: Tensor
    gate: Tensor | None = None


class Route(Protocol):
    """Choose experts."""

    def __call__(
        self, logits: Tensor, bias: Tensor | None, router: Router, ids: Tensor | None = None
    ) -> Routing:
        """Return the experts with the highest scores, the best first; of equal ones the lowest.

        logits: [T, E]; bias: [E] float32, added to scores for the choice, not in the weights.
        ids: where to put them, [T, k] int32, contiguous
        Where a row is not finite, its weights are NaN.
        """


DenseExperts = Callable[[Tensor, Routing, Tensor, Tensor, ExpertForm, Shared | None], Tensor]
"""Takes x [T, H], its routing, up [E, 2 I, H], gates first, and down [E, H, I], of the type of x.

Returns the weighted sum of each token's experts, in a fixed order: [T, H].
"""
BlockExperts = Callable[[Tensor, Routing, Stacks, ExpertForm, Shared | None], Tensor]
"""`DenseExperts` of packed matrices. The bits of a token do not depend on the others."""


class Places(NamedTuple):
    """Where matrices of experts lie that are not all in one stack, in int64.

    up, down: [E], of each expert's, counted in numbers from the beginning of up or down, which have the
    shapes of stacks of any number; the device reads there, whatever memory it is
    """

    up: Tensor
    down: Tensor


PlacedExperts = Callable[[Tensor, Routing, Tensor, Tensor, ExpertForm, Shared | None, Places], Tensor]
"""`DenseExperts` whose matrices have places."""


@dataclass(frozen=True)
class ExpertKernels:
    """The kernels of experts."""

    route: Route
    dense_experts: DenseExperts
    block_experts: BlockExperts
    placed_experts: PlacedExperts | None = None
    """On devices that read the host's memory."""
    arrange: Callable[[Packed, torch.dtype], Packed] | None = None
    """Returns a stack as `block_experts` multiplies it with inputs of a type, or as it is; scales: [E, …]."""
