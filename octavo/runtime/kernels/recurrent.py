"""The family of recurrent layers: what a token adds to the state of its request, and reads of it.

T = tokens, R = requests, C = channels, H = heads of P values each, G = groups of heads with keys and queries
of N components in common. On a CPU tokens are added up in their order: neither chunks nor company change
a bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from octavo.runtime.kernels.attention import Ragged

SCAN_CHUNK = 32
"""Tokens that pass a state at once where scans go by chunks."""


class States(NamedTuple):
    """Where the requests of a step have a layer's states, in float32.

    cache:        [num_blocks, block_size, numbers], where all slots of a block are the same memory
    offset:       of the first number of the state that is meant
    block_tables: [R, max_blocks] int32; slots: [T] int64, as in batch.GroupTables

    A request begins with the state in the block of its last token that is computed; without one, with zeros.
    Behind its last new token in each block the state goes there, unless the slot of that token is -1.

    Where steps verify up to `num_drafts` tokens of a request, each is a request of its own in the batch,
    behind that of the last known token, and its slot is the next one in the same block. It begins with the
    state of the row before, and leaves none: its inputs go to a log by positions. What came true of them is
    there for the next step, which lets the state pass it first.
    """

    cache: Tensor
    offset: int
    block_tables: Tensor
    slots: Tensor
    batch: Ragged
    num_drafts: int = 0

    @property
    def num_logged(self) -> int:
        """Return how many positions a log has: one step may read the drafts of another and write its own."""
        return 2 * self.num_drafts + 1


class Conv(NamedTuple):
    """A convolution of each channel with its last W inputs, then perhaps silu; of the activations' type.

    weight: [W, C], 2 <= W <= 8, that of the newest input last; bias: [C]. The state: inputs by positions,
    modulo its length, [`num_inputs`, C].
    """

    weight: Tensor
    bias: Tensor | None
    silu: bool

    def num_inputs(self, num_drafts: int) -> int:
        """Return how many inputs the state has: a step with drafts writes no place that it still reads."""
        return len(self.weight) + (num_drafts or -1)


class Decay(NamedTuple):
    """How fast heads forget: [H] float32. A step is softplus(step + bias) within limits.

    rate: below 0; a step multiplies the state by e^(rate * step). skip: of values, added to results
    """

    rate: Tensor
    bias: Tensor
    skip: Tensor | None = None
    limits: tuple[float, float] = (0.0, float("inf"))


class Scanned(NamedTuple):
    """What a token brings, token-strided; its step, and with the delta rule the strength, of each head.

    queries, keys: [T, G, N], N a multiple of 16; values: [T, H, P]; steps, strengths: [T, H]

    Without strengths the state [H, P, N] becomes decay x state + step * value x key, as in Mamba-2
    (https://arxiv.org/abs/2405.21060). By the gated delta rule (https://arxiv.org/abs/2412.06464) keys become
    unit vectors, queries such x N^-0.5, and what is added sigmoid(strength) * (value - state @ key) x key.

    With drafts there are behind the state [H, P] the number of tokens that each row of it has passed; and a
    log of keys, values, steps and strengths, [States.num_logged, G * N + H * P + H, or 2 H with strengths].
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    steps: Tensor
    strengths: Tensor | None = None


class GateForm(NamedTuple):
    """How rows x and their gates become a layer's output.

    weight: of an RMS norm over parts of x; these have their weights in turn, of `groups`; None = no norm
    norm_first: the norm is of x alone, not of the product; sigmoid: of the gate, in the place of silu
    """

    weight: Tensor | None = None
    eps: float = 0.0
    groups: int = 1
    norm_first: bool = False
    sigmoid: bool = False


Factors = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class RecurrentKernels:
    """The kernels of recurrent layers; what they return for tokens of no request is arbitrary but finite."""

    causal_conv: Callable[[Tensor, Conv, States, Factors | None], Tensor]
    """Returns the convolution of x [T, C]. The first of factors multiplies inputs, the second results."""
    scan: Callable[[Scanned, Decay, States], Tensor]
    """Returns state @ query + skip * value, [T, H, P], contiguous."""
    gate: Callable[[Tensor, Tensor, GateForm], Tensor]
    """Returns x [T, size] times silu of the gate [T, size], normalised. All inputs are token-strided."""
