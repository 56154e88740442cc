"""`Experts` is a feed-forward block of which a token takes a few parts; an `ExpertsArch` describes it."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from octavo.base.errors import BadCheckpoint, ConfigError, Unsupported
from octavo.runtime.kernels.experts import ExpertForm, Routing, Shared
from octavo.runtime.kernels.experts import Router as Router  # noqa: PLC0414  # for models
from octavo.runtime.layers.build import BuildContext, Layer
from octavo.runtime.layers.expert_placement import ExpertPlacement
from octavo.runtime.layers.linear import ReplicatedLinear, RouterLinear
from octavo.runtime.layers.mlp import GATES, MLP, DenseArch
from octavo.runtime.quantization.experts import pad_rows
from octavo.runtime.quantization.method import Term
from octavo.runtime.quantization.packed_experts import PackedExperts
from octavo.runtime.quantization.parameter import Layout, Shard, vector


@dataclass(frozen=True, kw_only=True)
class ExpertsArch:
    """An ExpertsArch describes experts, and what chooses among them.

    intermediate_size: of one expert
    router_bias:    added to the logits
    choice_bias:    added to scores for the choice of experts only
    bias:           of both projections of an expert
    limit, alpha:   of gpt-oss's activation; see ExpertForm
    shared:         what every token takes besides; gates_shared: times the sigmoid of a score of the token
    """

    num_experts: int
    intermediate_size: int
    router: Router
    activation: str = "silu"
    weighs_inputs: bool = False
    router_bias: bool = False
    choice_bias: bool = False
    bias: bool = False
    limit: float = 0.0
    alpha: float = 1.0
    shared: DenseArch | None = None
    gates_shared: bool = False

    def __post_init__(self) -> None:
        router, count = self.router, self.num_experts
        if router.top_k > count:
            raise BadCheckpoint(
                f"num_experts_per_tok={router.top_k} is more than the {count} experts that there are."
            )
        if count % router.num_groups or router.top_groups > router.num_groups:
            raise BadCheckpoint(
                f"n_group={router.num_groups}, topk_group={router.top_groups}: n_group must divide the "
                f"{count} experts, and topk_group be at most n_group."
            )
        size = count // router.num_groups
        if router.top_groups * size < router.top_k or router.best_of_group > size:
            raise BadCheckpoint(
                f"n_group={router.num_groups}, topk_group={router.top_groups}: groups of {size} experts are "
                f"too few or too small for num_experts_per_tok={router.top_k}."
            )
        if self.activation not in GATES:
            raise Unsupported(
                f"Activation {self.activation!r} of experts is not supported. Supported: "
                f"{', '.join(sorted(GATES))}."
            )


class Experts(nn.Module):
    """Computes router → choice → experts, and adds what all tokens share.

    Each rank has a part of every expert; or, with expert parallelism, some of them whole. Where replicas
    share them, ranks exchange their tokens.
    """

    routes: Tensor | None = None
    """Where the ids of a step's experts are left, [most tokens, k] int32, if somebody reads them."""

    def __init__(self, arch: ExpertsArch, build: BuildContext, size: int) -> None:
        super().__init__()
        self.router = RouterLinear(build.at("router"), size, arch.num_experts, arch.router_bias)
        self.choice = _Choice(build, arch) if arch.choice_bias else None
        self.experts = _ExpertStack(build.at("experts"), arch, size)
        self.shared = MLP(arch.shared, build.at("shared"), size, reduces=False) if arch.shared else None
        self.shared_gate = (
            ReplicatedLinear(build.at("shared_gate"), size, 1, False) if arch.gates_shared else None
        )
        bias = self.choice.bias if self.choice else None
        self.num_experts, self.top_k = arch.num_experts, arch.router.top_k
        self._route = partial(build.kernels.experts.route, bias=bias, router=arch.router)
        self._parallel, self._exchange = build.parallel, build.parallel.exchange
        self.no_tokens = torch.empty((0, size), dtype=build.compute_dtype, device=build.device)
        ep, room = build.parallel.ep, build.parallel.redundant_experts
        self.placement = (
            None
            if room is None or ep.size == 1
            else ExpertPlacement(arch.num_experts, ep.rank, ep.size, room, build.device)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [T, size] to [T, size]."""
        y = self._part(x)
        return y if self._is_whole else self._parallel.all_reduce(y)

    @property
    def _is_whole(self) -> bool:
        """Return True if `_part` leaves nothing to be added."""
        return self._parallel.tp_size == 1 or self._exchange is not None

    def join(self) -> None:
        """Take part in an exchange without a token of this rank's own."""
        chosen = self.no_tokens.new_empty((0, self.top_k), dtype=torch.float32)
        self._sum_up(self.no_tokens, Routing(chosen.int(), chosen))

    def _part(self, x: Tensor) -> Tensor:
        """Return what this rank adds to the sum over all."""
        routing = self._route(self.router(x), ids=None if self.routes is None else self.routes[: len(x)])
        if self.placement is not None:
            self.placement.count(routing.ids)
        if self._exchange is not None:
            y, shared = self._sum_up(x, routing), self._share(x)
            return y if shared is None else y + self._parallel.all_reduce(_rows(shared))
        is_split = self._parallel.ep.size > 1
        return (self._compute_own if is_split else self.experts)(x, routing, self._share(x))

    def _sum_up(self, x: Tensor, routing: Routing) -> Tensor:
        assert self._exchange is not None
        return self._exchange.run(x, routing, self._owners, self._compute_own)

    def _compute_own(self, x: Tensor, routing: Routing, shared: Shared | None = None) -> Tensor:
        """Return the sum over this rank's experts, and its part of what is shared; the ranks add up.

        No token is dropped, and a sum has the same bits in any company.
        """
        if not len(x):
            return x
        routing = routing._replace(ids=self._own_places(routing.ids, x))
        part: Tensor = self.experts(x, routing, shared)
        return part

    def _own_places(self, ids: Tensor, x: Tensor) -> Tensor:
        """Return where this rank has the chosen experts, -1 = elsewhere."""
        if self.placement is not None:
            return self.placement.own_places(ids, x)
        own = self.experts.own
        return torch.where((ids >= own.start) & (ids < own.stop), ids - own.start, -1)

    def _owners(self, ids: Tensor, x: Tensor) -> Tensor:
        if self.placement is not None:
            return self.placement.owners(ids, x)
        return ids.div(len(self.experts.own), rounding_mode="floor")

    def defer(self, x: Tensor) -> Term:
        """Return `forward` as a term for an RMS norm that adds it."""
        y = self._part(x)
        return y if self._is_whole else self._parallel.defer_sum(y)

    def _share(self, x: Tensor) -> Shared | None:
        if self.shared is None:
            return None
        return Shared(self.shared(x), self.shared_gate(x) if self.shared_gate else None)


class _Choice(Layer):
    """Keeps what is added to the scores, in float32: experts whose scores differ by little change places."""

    def __init__(self, build: BuildContext, arch: ExpertsArch) -> None:
        super().__init__()
        self.bias = self.make_vector(build, vector(arch.num_experts), "bias", torch.float32)


class _ExpertStack(Layer):
    """Owns the matrices of the experts."""

    def __init__(self, build: BuildContext, arch: ExpertsArch, size: int) -> None:
        super().__init__()
        ep, inner = build.parallel.ep, arch.intermediate_size
        if arch.num_experts % ep.size:
            text = f"{ep.size} ranks cannot have equal numbers of {arch.num_experts} experts"
            raise ConfigError(
                f"enable_expert_parallel: {text}; use a tensor_parallel_size (times data_parallel_size) that "
                "divides them."
            )
        count, owners = arch.num_experts // ep.size, (ep.rank, ep.size)
        self.own = range(ep.rank * count, (ep.rank + 1) * count)
        part = build.split("", inner) if ep.size == 1 else Shard("", inner, 0, inner)
        names = [f"{expert}.{name}" for expert in self.own for name in ("gate", "up")]
        up = Layout(_shards(part, names), (1, size), split_axis=1, owners=owners)
        down = Layout(_shards(part, map(str, self.own)), (1, size), split_axis=2, owners=owners)
        self._adds_bias = build.parallel.tp_rank == 0 or ep.size > 1
        self._down_bias: Tensor | None = None
        biases: tuple[Tensor | None, Tensor | None] = None, None
        if arch.bias:
            rows = Layout(up.shards, (1,), split_axis=1, owners=owners)
            up_bias = self.make_vector(build, rows, "up_bias").view(count, -1)
            kept = Shard("", arch.num_experts, self.own.start, count)
            self._down_bias = self.make_vector(build, Layout((kept,), (size,)), "down_bias")
            biases = up_bias, self._down_bias
        form = ExpertForm(GATES[arch.activation], arch.weighs_inputs, *biases)
        self._form = form._replace(limit=arch.limit, alpha=arch.alpha)
        room = build.parallel.redundant_experts
        self._num_spare = None if room is None or ep.size == 1 else room // ep.size
        self.method = self.make_experts(build, up, down, self._num_spare)
        if ep.size > 1 and isinstance(getattr(self.method, "inner", self.method), PackedExperts):
            raise Unsupported("enable_expert_parallel: experts packed in this way are cut by ranks only.")

    def after_load(self) -> None:
        """Let one rank alone add what all would add."""
        super().after_load()
        if self._down_bias is not None and not self._adds_bias:
            self._down_bias.zero_()
        if self._num_spare is not None:
            biases = self._form.up_bias, self._form.down_bias
            up, down = (None if x is None else pad_rows(x, self._num_spare) for x in biases)
            self._form = self._form._replace(up_bias=up, down_bias=down)

    def slots(self) -> list[Tensor]:
        """Return all that experts are made of, [places, …] each."""
        biases = self._form.up_bias, self._form.down_bias
        return [*self.method.slots(), *(bias for bias in biases if bias is not None)]

    def forward(self, x: Tensor, routing: Routing, shared: Shared | None) -> Tensor:
        return self.method.apply(x, routing, self._form, shared)


def _rows(shared: Shared) -> Tensor:
    return shared.rows if shared.gate is None else shared.rows * shared.gate.sigmoid()


def _shards(part: Shard, names: Iterable[str]) -> tuple[Shard, ...]:
    return tuple(part._replace(name=name) for name in names)
