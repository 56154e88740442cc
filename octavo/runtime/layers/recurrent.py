"""`Recurrent` layers keep one state per request: short convolutions between gates, Mamba-2, gated delta nets.

They stand where attention stands in other layers. A `RecurrentArch` describes them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from octavo.base.errors import BadCheckpoint, ConfigError, Unsupported
from octavo.messages.kv import StateKV
from octavo.runtime.batch import ForwardBatch
from octavo.runtime.kernels.recurrent import Conv, Decay, GateForm, Scanned, States
from octavo.runtime.layers.build import BuildContext, Layer
from octavo.runtime.layers.linear import MergedColumnLinear, RowLinear
from octavo.runtime.layers.rows import make_row_gather
from octavo.runtime.quantization.method import Term
from octavo.runtime.quantization.parameter import Layout, Shard, vector


@dataclass(frozen=True, kw_only=True)
class ScanArch:
    """Heads have a state each, `value_size` x `key_size`; `num_groups` of neighbours share keys and queries.

    is_delta: by the gated delta rule, with norms of single heads before the gate; otherwise Mamba-2
    limits:   of steps
    """

    num_heads: int
    value_size: int
    key_size: int
    num_groups: int
    is_delta: bool
    limits: tuple[float, float] = (0.0, float("inf"))

    def __post_init__(self) -> None:
        heads, groups, size = self.num_heads, self.num_groups, self.key_size
        if heads % groups:
            raise BadCheckpoint(f"{heads} recurrent heads cannot share the keys of {groups} groups")
        if size % 16 or size > 256:
            raise Unsupported(f"Keys of states have up to 256 components, by 16; this model has {size}.")

    def of_rank(self, tp_size: int) -> "ScanArch":
        """Return one rank's heads and their groups, which ranks may have in common. Raises ConfigError."""
        heads, groups = self.num_heads, self.num_groups
        if heads % tp_size or (groups % tp_size and tp_size % groups):
            raise ConfigError(
                f"tensor_parallel_size={tp_size} does not divide {heads} recurrent heads in {groups} groups."
            )
        return replace(self, num_heads=heads // tp_size, num_groups=max(groups // tp_size, 1))

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Return the components of a group's queries, keys and values."""
        return self.key_size, self.key_size, self.num_heads // self.num_groups * self.value_size

    @property
    def sizes(self) -> dict[str, int]:
        """Return those of all groups, in the order of the convolution."""
        sizes = zip(("queries", "keys", "values"), self.group_sizes, strict=True)
        return {name: self.num_groups * size for name, size in (sizes if self.is_delta else [*sizes][::-1])}

    def num_kept(self, num_drafts: int) -> int:
        """Return the size of a state; see Scanned."""
        values, keys = self.sizes["values"], self.sizes["keys"]
        logged = keys + values + (1 + self.is_delta) * self.num_heads
        return values * self.key_size + (num_drafts and values + (2 * num_drafts + 1) * logged)


@dataclass(frozen=True, kw_only=True)
class RecurrentArch:
    """A convolution over the last `taps` inputs of each channel, before a scan or between two gates.

    size: channels where there is no scan; bias: of projections
    has_norm, norm_first: of what Mamba-2 gives, before the gate or of the product
    """

    is_causal: ClassVar[bool] = True
    taps: int
    size: int = 0
    bias: bool = False
    conv_bias: bool = False
    scan: ScanArch | None = None
    has_norm: bool = True
    norm_first: bool = False
    num_drafts: int = 0
    """Most of a request that are verified in one step."""

    @property
    def channels(self) -> int:
        """Return how many channels the convolution has."""
        return sum(self.scan.sizes.values()) if self.scan else self.size

    @property
    def inner(self) -> int:
        """Return the size of what goes to the last projection."""
        return self.scan.sizes["values"] if self.scan else self.size

    def of_rank(self, tp_size: int) -> "RecurrentArch":
        """Return what one rank computes. Raises ConfigError."""
        scan = self.scan.of_rank(tp_size) if self.scan else None
        return replace(self, size=self.size // tp_size, scan=scan)

    def kv_spec(self, tp_size: int, dtype: torch.dtype | None = None, sliding_window: int = 0) -> StateKV:
        """Return the state of one layer on one rank. Raises BadCheckpoint, ConfigError."""
        if not 2 <= self.taps <= 8:
            raise BadCheckpoint(f"A convolution takes 2 to 8 inputs; the config has {self.taps}.")
        own = self.of_rank(tp_size)
        return StateKV(
            4 * (self.num_inputs * own.channels + (own.scan.num_kept(self.num_drafts) if own.scan else 0))
        )

    @property
    def num_inputs(self) -> int:
        """Return how many inputs the state of the convolution has; see Conv."""
        return self.taps + (self.num_drafts or -1)


class Recurrent(Layer):
    """Computes project → conv → out with gates, or project → conv → scan → gated norm → out.

    Ranks have some of the heads each, with their states; or, without a scan, some of the channels.
    """

    is_causal = True

    def __init__(
        self, arch: RecurrentArch, build: BuildContext, layer_id: int, size: int, eps: float
    ) -> None:
        super().__init__()
        own = arch.of_rank(build.parallel.tp_size)
        self.layer_id, self.kv_spec = layer_id, arch.kv_spec(build.parallel.tp_size)
        self._num_drafts = arch.num_drafts
        self._kernels, self._gather = build.kernels.recurrent, make_row_gather(build)
        self._scan, self._offset = own.scan, arch.num_inputs * own.channels
        channels = tuple(_channels(arch, build, ""))
        weight = self.make_vector(build, Layout(channels, (arch.taps,), 1, stack_axis=1), "conv")
        bias = self.make_vector(build, Layout(channels), "conv_bias") if arch.conv_bias else None
        self._conv = Conv(weight, bias, silu=arch.scan is not None)
        self._parts = _parts(own)
        self.project = MergedColumnLinear(build.at("project"), size, tuple(_rows(arch, build)), arch.bias)
        self.out = RowLinear(build.at("out"), arch.inner, size, arch.bias)
        if (scan := arch.scan) and own.scan:
            heads, kind = Layout((build.split("", scan.num_heads),)), torch.float32
            rate, bias = (self.make_vector(build, heads, name, kind) for name in ("rate", "step_bias"))
            skip = None if scan.is_delta else self.make_vector(build, heads, "skip", kind)
            self._decay = Decay(rate, bias, skip, scan.limits)
            normed = vector(scan.value_size) if scan.is_delta else Layout((build.split("", arch.inner),))
            norm = self.make_vector(build, normed, "norm") if arch.has_norm else None
            first = scan.is_delta or arch.norm_first
            groups = scan.num_groups if arch.has_norm and not scan.is_delta else build.parallel.tp_size
            self._form = GateForm(norm, eps, 1 if scan.is_delta else own.scan.num_groups, first)
            self._parallel, self._sharers = build.parallel, max(build.parallel.tp_size // groups, 1)

    def states(self, batch: ForwardBatch) -> States:
        """Return where the requests of the step have their states."""
        tables = batch.tables(self.layer_id)
        return States(
            batch.kv_caches[self.layer_id], 0, tables.block_tables, tables.slots, batch, self._num_drafts
        )

    def forward(self, x: Tensor, batch: ForwardBatch, rows: Tensor | None = None) -> Tensor:
        """Map [T, size] to [T, size], or to these rows of it."""
        out: Tensor = self.out(self._gather(self._mix(x, batch), rows))
        return out

    def defer(self, x: Tensor, batch: ForwardBatch, rows: Tensor | None = None) -> Term:
        """Return `forward` as a term for an RMS norm that adds it."""
        return self.out.defer(self._gather(self._mix(x, batch), rows))

    def _mix(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Let the tokens change the states, and return what `out` maps back."""
        parts = _split(self.project(x), self._parts)
        conv, scan, kernels, states = self._conv, self._scan, self._kernels, self.states(batch)
        if scan is None:
            return kernels.causal_conv(parts["conv"], conv, states, (parts["before"], parts["behind"]))
        mixed = _split(kernels.causal_conv(parts["conv"], conv, states, None), scan.sizes)
        queries, keys = (mixed[name].view(len(x), -1, scan.key_size) for name in ("queries", "keys"))
        values = mixed["values"].view(len(x), -1, scan.value_size)
        new = Scanned(queries, keys, values, parts["step"], parts.get("strength"))
        y = kernels.scan(new, self._decay, states._replace(offset=self._offset))
        return self._gate(y.flatten(1), parts["gate"])

    def _gate(self, y: Tensor, gates: Tensor) -> Tensor:
        """Gate and normalise y; where ranks share a group of the norm, by the squares of all of them."""
        form, kernels, count = self._form, self._kernels, self._sharers
        if count == 1 or form.weight is None:
            return kernels.gate(y, gates, form)
        plain = form._replace(weight=None)
        x = (y if form.norm_first else kernels.gate(y, gates, plain)).float()
        squares = self._parallel.all_gather(x.square().sum(1, keepdim=True))
        first = self._parallel.tp_rank // count * count
        mean = squares[:, first : first + count].sum(1, keepdim=True) / (count * x.shape[1])
        x = (x * (mean + form.eps).rsqrt() * form.weight.float()).to(y.dtype)
        return kernels.gate(x, gates, plain) if form.norm_first else x


def _parts(arch: RecurrentArch) -> dict[str, int]:
    """Return what `project` computes: sizes by name (and by kind), in the order of checkpoints."""
    inner = arch.inner
    if arch.scan is None:
        return {"before": inner, "behind": inner, "conv": inner}
    heads = arch.scan.num_heads
    if arch.scan.is_delta:
        inputs, scores = {"conv": arch.channels, "gate": inner}, {"strength": heads, "step": heads}
        return {f"{n}.inputs": s for n, s in inputs.items()} | {f"{n}.scores": s for n, s in scores.items()}
    return {"gate": inner, "conv": arch.channels, "step": heads}


def _rows(arch: RecurrentArch, build: BuildContext) -> Iterator[Shard]:
    """Yield what a rank keeps of each part of `project`."""
    for name, size in _parts(arch).items():
        if name.startswith("conv"):
            yield from _channels(arch, build, name)
        else:
            yield build.split(name, size)


def _channels(arch: RecurrentArch, build: BuildContext, name: str) -> Iterator[Shard]:
    """Yield what a rank keeps of the convolution's channels: of queries, keys and values apart, if split."""
    if arch.scan is None or build.parallel.tp_size == 1:
        yield build.split(name, arch.channels)
        return
    for part, size in arch.scan.sizes.items():
        unit = arch.scan.value_size if part == "values" else arch.scan.key_size
        yield build.split(f"{part}.{name}".rstrip("."), size, unit, repeat=True)


def _split(x: Tensor, sizes: dict[str, int]) -> dict[str, Tensor]:
    parts = zip(sizes, torch.split(x, list(sizes.values()), -1), strict=True)
    return {name.partition(".")[0]: part for name, part in parts}
