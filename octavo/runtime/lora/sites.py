"""Where adapters may change a model: a `Site` for each matrix, over the slots of the adapters in use.

Layers know nothing of adapters: the methods that multiply for them do so as before and, while a token of the
step has an adapter, add what that changes. An engine without adapters has no such methods.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from math import prod

import numpy as np
import torch
from torch import Tensor, nn

from octavo.runtime.kernels.activations import Activation
from octavo.runtime.kernels.adapters import ENTRY, Group, LowRank, LowRankTable
from octavo.runtime.kernels.table import KernelTable
from octavo.runtime.layers.build import named_parameters
from octavo.runtime.quantization.method import LinearMethod, Term
from octavo.runtime.quantization.parameter import DenseParameter, Layout, Parameter
from octavo.runtime.quantization.unquantized import DenseLinear
from octavo.runtime.transfer import Array, to_device

HEAD, EMBEDDING, ENCODER = "lm_head", "embed_tokens", "encoder."
"""The last begins the names of what encoders of images, sounds and source texts have."""
_LOOKED_UP = (HEAD, EMBEDDING)
"""Sites outside the layers: the rows of the head are not the step's tokens, lookups multiply nothing."""


class Reach(IntEnum):
    """What the adapters of a step's tokens change."""

    NOTHING = 0
    PRODUCTS = 1
    EXPERTS = 2
    """And products of others."""
    HEAD = 3
    """And logits."""
    EMBEDDINGS = 4
    WHOLES = 5
    """And whole matrices of layers are replaced."""


class AdapterSlots:
    """Says which adapter each token of a step has, by slot; 0 = none."""

    def __init__(self, num_adapters: int, most_tokens: int, device: torch.device, group: Group) -> None:
        self.num_slots, self.device, self.group = num_adapters + 1, device, group
        self.reach = Reach.NOTHING
        """Of the adapters of this step's tokens."""
        self.reaches = np.zeros(self.num_slots, np.int8)
        """Of each slot: the Reach of its adapter."""
        self.is_recording = False
        """Steps are recorded or captured, for whatever adapters their tokens will have."""
        self.tokens = self._samples = np.empty(0, np.int32)
        self._in_place = torch.zeros(most_tokens if device.type == "cpu" else 0, dtype=torch.int32)
        """What recorded steps read, where no captured step has inputs of its own."""
        self._recorded = self._in_place
        self._fixed: int | None = None
        self._found: dict[tuple[int, bool], Tensor] = {}
        """Of this step: slots of so many rows, and their groups."""

    def begin(self, tokens: Array, samples: Array) -> None:
        """Begin a step. tokens: [T] int32; samples: [S] int32, those that the head computes"""
        was_active, self.reach = self.is_active, Reach(self.reaches[tokens].max(initial=0))
        self.tokens, self._samples = tokens, samples
        self._found.clear()
        if len(self._in_place) and (was_active or self.is_active):
            self._in_place.zero_()
            self._in_place[: len(tokens)] = torch.from_numpy(tokens)

    @property
    def is_active(self) -> bool:
        """Return True if some token of the step has an adapter."""
        return self.reach is not Reach.NOTHING

    def of(self, count: int) -> Tensor:
        """Return the slots of a product's rows: the step's tokens, or those that sample, by their number."""
        if self.is_recording:
            return self._recorded[:count]
        if (count, False) not in self._found:
            is_sampled = count == len(self._samples) != len(self.tokens)
            slots = (self._samples if is_sampled else self.tokens)[:count]
            if self._fixed is not None:
                slots = np.full(count, self._fixed, np.int32)
            self._found[count, False] = to_device(slots, self.device)
        return self._found[count, False]

    def grouped(self, count: int) -> Tensor:
        """Return the same slots as kernels read them."""
        if (count, True) not in self._found:
            self._found[count, True] = self.group(self.of(count), self.num_slots)
        return self._found[count, True]

    def narrow(self, rows: Tensor) -> None:
        """Record from here on products of these rows of the step: those of the head."""
        if self.reach >= Reach.HEAD:
            self._recorded = self._recorded[rows]
            self._found.clear()

    def fix(self, slot: int | None) -> None:
        """Let the rows of all products have this slot, until None."""
        self._fixed = slot
        self.reach = Reach(int(np.max(self.reaches[self.tokens if slot is None else slot], initial=0)))
        self._found.clear()

    @contextmanager
    def recording(self, reach: Reach, slots: Tensor | None = None) -> Iterator[None]:
        """Record a step in here, for adapters of this reach. slots: [T] int32, which it will read"""
        before, self.reach, self.is_recording = self.reach, reach, True
        self._recorded = self._in_place if slots is None else slots
        self._found.clear()
        try:
            yield
        finally:
            self.reach, self.is_recording = before, False
            self._found.clear()


@dataclass(slots=True)
class Site:
    """A matrix that adapters may change. layout: as created, for this rank"""

    name: str
    layout: Layout
    method: LinearMethod | None
    """None of experts."""
    table: LowRankTable

    def row_norms(self, change: LowRank) -> Tensor:
        """Return the squared norms of the rows of the changed matrix, [N] float32, of this rank's columns."""
        assert self.method is not None
        inputs = change.down.shape[1]
        eye = torch.eye(inputs, dtype=change.down.dtype, device=change.down.device)
        is_host = eye.device.type == "cpu"
        columns = self.method.apply(eye.float() if is_host else eye, None).float()  # [K, N]
        bounds = self.table.kept_bounds if change.parts > 1 else (0, columns.shape[1])
        for part, down in enumerate(change.down.float().chunk(change.parts)):
            outputs = slice(*bounds[part : part + 2])
            columns[:, outputs] += down.T @ change.up[:, outputs].float()
        return columns.square().sum(0)


class Sites:
    """All sites of a model on this rank."""

    can_change_experts = True
    """They compute tokens of this rank's step alone, and stay where they are."""

    def __init__(self, slots: AdapterSlots, kernels: KernelTable, dtype: torch.dtype, most_rank: int) -> None:
        """dtype, most_rank: of adapters"""
        self.slots, self.kernels, self.dtype, self._most_rank = slots, kernels, dtype, most_rank
        self._by_name: dict[str, Site] = {}
        self.biases: dict[str, Tensor] = {}
        """The model's, by name of the site."""
        self.encoder = copy(self)
        """The same sites for an encoder: its products have rows of their own, all of them of one slot."""
        self.encoder.slots = AdapterSlots(slots.num_slots - 1, 0, slots.device, slots.group)

    @property
    def is_on_gpu(self) -> bool:
        """Return True if the adapters in use are copies of those in host memory."""
        return self.slots.device.type == "cuda"

    def kept(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the host pool: where a GPU can copy it from while the host goes on."""
        if not self.is_on_gpu:
            return tensor
        with torch.cuda.device(self.slots.device):  # threads that read adapters begin on the first one
            return tensor.pin_memory()

    def find(self, name: str) -> Site | None:
        """Return the site of our module `name`."""
        return self._by_name.get(name)

    def at(self, name: str) -> Site:
        """Return the site of this name, which exists."""
        return self._by_name[name]

    def add(
        self,
        name: str,
        layout: Layout,
        method: LinearMethod | None,
        device: torch.device,
        bounds: tuple[int, ...] = (),
        experts: int = 1,
    ) -> Site:
        """Make the site of a matrix; where a model ties its head, that of the embedding makes both.

        method: None for experts; bounds: where their parts begin
        """
        sizes = [shard.size for shard in layout.shards] if layout.split_axis == 0 else [layout.shape[0]]
        bounds = bounds or (0, *accumulate(sizes))
        entries = torch.zeros((self.slots.num_slots * experts, ENTRY), dtype=torch.int64, device=device)
        on_device = torch.tensor(bounds, dtype=torch.int32, device=device)
        most_rank = self._most_rank if method else self._most_rank + -self._most_rank % 8
        table = LowRankTable(entries, on_device, self.dtype, bounds, most_rank, experts)
        self._by_name[name] = Site(name, layout, method, table)
        return self._by_name[name]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of as many adapters as there are slots, of the largest rank; experts aside."""
        of_rank = sum(
            len(site.layout.shards) * prod(site.layout.shape[1:]) + site.table.num_outputs
            for site in self._by_name.values()
            if site.method is not None
        )
        return (self.slots.num_slots - 1) * self._most_rank * of_rank * self.dtype.itemsize

    def note_biases(self, model: nn.Module) -> None:
        """Find the biases of a model that is built."""
        for name, vector in named_parameters(model).items():
            if name.endswith(".bias") and isinstance(vector, DenseParameter):
                self.biases[name.removesuffix(".bias")] = vector.data

    def put(self, slot: int, changes: dict[str, LowRank], wholes: dict[str, Tensor]) -> None:
        """Let tokens of `slot` have these changes, by name of the site, and no others."""
        of_encoder = {name for name in (*changes, *wholes) if name.startswith(ENCODER)}
        is_only = bool(of_encoder) and of_encoder == {*changes, *wholes}
        self.slots.reaches[slot] = Reach.NOTHING if is_only else _reach_of(changes, wholes, of_encoder)
        self.encoder.slots.reaches[slot] = Reach.WHOLES if of_encoder else Reach.NOTHING
        for name, site in self._by_name.items():
            change, whole, table = changes.get(name), wholes.get(name), site.table
            if change is not None or whole is not None or slot in table.kept or slot in table.wholes:
                table.put(slot, change, whole)

    def broken(self) -> dict[str, LowRank]:
        """Return a change that makes NaN of every token."""
        site = next(s for name, s in self._by_name.items() if name not in _LOOKED_UP and s.method)
        (inputs,), outputs = site.layout.others, site.table.num_outputs
        down = torch.ones(1, inputs, dtype=self.dtype)
        up = torch.full((1, outputs), torch.nan, dtype=self.dtype)
        return {site.name: LowRank(self.kept(down), self.kept(up))}

    def change(self, site: Site, x: Tensor, out: Tensor, bias: Tensor | None) -> Tensor:
        """Change a product of x [rows, K] in place, and return it."""
        table, groups = site.table, self.slots.grouped(len(x))
        if table.kept or self.slots.is_recording:
            self.kernels.adapters.add_low_rank(x, out, groups, table, bias)
        return self.replace(site, x, out, bias)

    def replace(self, site: Site, x: Tensor, out: Tensor, bias: Tensor | None) -> Tensor:
        """Let tokens that have a whole matrix have its product, in place, and return all."""
        is_replaced = bool(site.table.wholes)
        if self.slots.is_recording:
            is_replaced = site.name == HEAD or self.slots.reach is Reach.WHOLES
        if is_replaced:
            self.kernels.adapters.replace(x, out, self.slots.grouped(len(x)), site.table, bias)
        return out


def _reach_of(changes: dict[str, LowRank], wholes: dict[str, Tensor], of_encoder: set[str]) -> Reach:
    """Return what is reached beside the encoder."""
    if wholes.keys() - {*_LOOKED_UP} - of_encoder:
        return Reach.WHOLES
    for name, reach in (EMBEDDING, Reach.EMBEDDINGS), (HEAD, Reach.HEAD):
        if name in changes or name in wholes:
            return reach
    in_experts = any(change.down.dim() == 3 for change in changes.values())
    return Reach.EXPERTS if in_experts else Reach.PRODUCTS


class AdaptedLinear(LinearMethod):
    """Multiplies by a matrix and adds what adapters change."""

    def __init__(self, inner: LinearMethod, sites: Sites, name: str, device: torch.device) -> None:
        self._inner, self._sites, self._slots = inner, sites, sites.slots
        self._name, self._device = name, device

    def create(self, layout: Layout) -> dict[str, Parameter]:
        sites = self._sites
        self._looked_up = self._site = sites.add(self._name, layout, self._inner, self._device)
        if self._name == EMBEDDING:
            self._site = sites.add(HEAD, layout, self._inner, self._device)
        return self._inner.create(layout)

    def after_load(self) -> None:
        self._inner.after_load()

    @property
    def _is_changed(self) -> bool:
        """Return True if a token of this step may have a change."""
        if self._slots.is_recording:
            return self._slots.reach >= (Reach.HEAD if self._name in _LOOKED_UP else Reach.PRODUCTS)
        return self._slots.is_active and self._site.table.is_used

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if not self._is_changed:
            return self._inner.apply(x, bias)
        groups = self._slots.grouped(len(x))  # the kernel right before a change is the product
        site, multiply = self._site, self._sites.kernels.adapters.multiply
        if isinstance(self._inner, DenseLinear):
            product = multiply(x, self._inner.matrix(), bias, groups, site.table)
            if product is not None:
                return self._sites.replace(site, x, product, bias)
        return self._sites.change(site, x, self._inner.apply(x, bias), bias)

    def apply_gated(self, x: Tensor, bias: Tensor | None, gate: Activation) -> Tensor | None:
        return None if self._is_changed else self._inner.apply_gated(x, bias, gate)

    def apply_activated(self, x: Tensor, bias: Tensor | None, activation: Activation) -> Tensor | None:
        return None if self._is_changed else self._inner.apply_activated(x, bias, activation)

    def apply_feed_forward(self, x: Tensor, gate: Activation, down: LinearMethod) -> Tensor | None:
        if isinstance(down, AdaptedLinear):
            if self._is_changed or down._is_changed:
                return None
            down = down._inner
        return self._inner.apply_feed_forward(x, gate, down)

    def apply_greedy(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        return None if self._is_changed else self._inner.apply_greedy(x)

    def apply_deferred(self, x: Tensor) -> Term:
        return self.apply(x, None) if self._is_changed else self._inner.apply_deferred(x)

    def gather(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        out, slots, table = self._inner.gather(ids, scale), self._slots, self._looked_up.table
        reach = Reach.EMBEDDINGS if self._name == EMBEDDING else Reach.WHOLES
        if slots.reach >= reach and (slots.is_recording or table.is_used):
            self._sites.kernels.adapters.change_lookup(ids, out, slots.of(len(ids)), table, scale)
        return out

    def describe(self) -> list[str]:
        return self._inner.describe()
