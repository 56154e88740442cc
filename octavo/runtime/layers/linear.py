"""A linear layer keeps one rank's share of its matrix.

Column parallel: each rank computes some outputs. Row parallel: each rank holds some inputs, and the partial
sums are added over the ranks (Megatron-LM, https://arxiv.org/abs/1909.08053). How the matrix is stored is the
business of the scheme's LinearMethod.
"""

from torch import Tensor

from octavo.runtime.layers.build import BuildContext, Layer
from octavo.runtime.quantization.method import LinearMethod, Term
from octavo.runtime.quantization.parameter import Layout, Shard, vector


class Linear(Layer):
    """Maps x [T, inputs] to [T, outputs], on this rank's part."""

    def __init__(
        self, build: BuildContext, layout: Layout, bias: Layout | None, method: LinearMethod | None = None
    ) -> None:
        """Make the parameters. method: of the matrix; None = what the scheme says"""
        super().__init__()
        self.method = self.make_matrix(build, layout, method)
        self.bias = None if bias is None else self.make_vector(build, bias, "bias")

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        return self.method.apply(x, self.bias)


class MergedColumnLinear(Linear):
    """Computes several projections of one input, each split over the ranks, side by side."""

    def __init__(self, build: BuildContext, inputs: int, shards: tuple[Shard, ...], bias: bool) -> None:
        super().__init__(build, Layout(shards, (inputs,)), Layout(shards) if bias else None)


class QKVLinear(MergedColumnLinear):
    """Projects to queries, keys and values, split by heads; more ranks than key heads repeat these.

    is_gated: behind the queries of all heads stand as many gates, which count as heads
    """

    def __init__(
        self,
        build: BuildContext,
        inputs: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        is_gated: bool = False,
    ) -> None:
        names = ("queries.q", "gates.q") if is_gated else ("q",)
        queries = tuple(build.split(name, num_heads * head_dim, head_dim) for name in names)
        kv_size = num_kv_heads * head_dim
        keys, values = (build.split(name, kv_size, head_dim, repeat=True) for name in ("k", "v"))
        self.num_heads = sum(shard.size for shard in queries) // head_dim
        self.num_kv_heads = keys.size // head_dim
        super().__init__(build, inputs, (*queries, keys, values), bias)


class RowLinear(Linear):
    """Splits the inputs of a projection over the ranks; every rank gets the whole sum, or keeps its part."""

    def __init__(
        self, build: BuildContext, inputs: int, outputs: int, bias: bool, *, reduces: bool = True
    ) -> None:
        layout = Layout((build.split("", inputs),), (outputs,), split_axis=1)
        super().__init__(build, layout, vector(outputs) if bias else None)
        self._parallel = build.parallel
        self._is_whole = build.parallel.tp_size == 1 or not reduces
        assert reduces or not bias

    def forward(self, x: Tensor) -> Tensor:
        """Multiply, add up over the ranks, then add the bias once."""
        if self._is_whole:
            return self.method.apply(x, self.bias)
        y = self._parallel.all_reduce(self.method.apply(x, None))
        return y if self.bias is None else y + self.bias

    @property
    def is_product(self) -> bool:
        """Return True if `forward` is a product and nothing else."""
        return self._is_whole and self.bias is None

    def defer(self, x: Tensor) -> Term:
        """Return `forward` as a term for an RMS norm that adds it."""
        if self.is_product:
            return self.method.apply_deferred(x)
        if self._is_whole or self.bias is not None:
            return self.forward(x)
        return self._parallel.defer_sum(self.method.apply(x, None))


class ReplicatedLinear(Linear):
    """Computes a projection whole on every rank."""

    def __init__(self, build: BuildContext, inputs: int, outputs: int, bias: bool) -> None:
        whole = vector(outputs)
        super().__init__(build, Layout(whole.shards, (inputs,)), whole if bias else None)


class RouterLinear(Linear):
    """Scores the experts of a layer, all of them on every rank."""

    def __init__(self, build: BuildContext, inputs: int, num_experts: int, bias: bool) -> None:
        whole, method = vector(num_experts), build.scheme.router(build.path)
        super().__init__(build, Layout(whole.shards, (inputs,)), whole if bias else None, method)
