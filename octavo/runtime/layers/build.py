"""Every layer's constructor receives a `BuildContext`; a `Layer` is a module that owns parameters.

Made once by the loader. `at` gives a child its name, so that a layer knows its place
("layers.3.attention.qkv"). torch.nn.Module serves for structure and names only: no autograd, no buffers, no
state_dict.
"""

from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from octavo.base.errors import ConfigError
from octavo.runtime.attention.interface import AttentionBackend
from octavo.runtime.distributed.context import ParallelContext
from octavo.runtime.kernels.table import KernelTable
from octavo.runtime.quantization.method import ExpertsMethod, LinearMethod, Scheme
from octavo.runtime.quantization.parameter import DenseParameter, Layout, Parameter, Shard
from octavo.runtime.quantization.parameter import Stored as Stored  # noqa: PLC0414  # for models' weight maps


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """The context holds device, types, kernels, ranks and storage scheme of the model under construction."""

    device: torch.device
    compute_dtype: torch.dtype
    kv_dtype: torch.dtype
    kernels: KernelTable
    attention: AttentionBackend
    parallel: ParallelContext
    scheme: Scheme
    step_dtype: torch.dtype | None = None
    """Of keys and values that last for a step; None = compute_dtype."""
    splits_floats: bool = False
    """Attention to both sides needs 16 of the 24 bits of float32, where that is faster."""
    path: str = ""

    def at(self, name: str) -> "BuildContext":
        """Return the context of the child `name`."""
        return replace(self, path=f"{self.path}.{name}" if self.path else name)

    def split(self, name: str, full: int, unit: int = 1, *, repeat: bool = False) -> Shard:
        """Return this rank's even share of `full` entries, which belong together in units (a head's rows).

        repeat: units fewer than ranks are kept by several ranks each. Raises ConfigError for an uneven split.
        """
        rank, size, units = self.parallel.tp_rank, self.parallel.tp_size, full // unit
        if units % size and not (repeat and size % units == 0):
            raise ConfigError(
                f"tensor_parallel_size={size} does not divide the {units} parts of {self.path}.{name}: "
                f"use a size that divides {units}."
            )
        return Shard(name, full, rank * units // size * unit, max(units // size, 1) * unit)


class Layer(nn.Module):
    """A Layer has parameters of its own, by the last part of their names."""

    def __init__(self) -> None:
        super().__init__()
        self.parameters_by_name: dict[str, Parameter] = {}
        self.matrices: list[LinearMethod | ExpertsMethod] = []
        self.vectors: dict[str, DenseParameter] = {}
        """Those of the parameters that are no part of a matrix."""

    def make_matrix(
        self, build: BuildContext, layout: Layout, method: LinearMethod | None = None
    ) -> LinearMethod:
        """Make the parameters of a matrix, as the scheme or `method` stores it, and return its method."""
        method = method or build.scheme.linear(build.path)
        self.parameters_by_name |= method.create(layout)
        self.matrices.append(method)
        return method

    def make_experts(
        self, build: BuildContext, up: Layout, down: Layout, num_spare: int | None = None
    ) -> ExpertsMethod:
        """Make the parameters of all experts, as the scheme stores them, and return their method.

        num_spare: see ExpertsMethod
        """
        method = build.scheme.experts(build.path)
        method.num_spare = num_spare
        self.parameters_by_name |= method.create(up, down)
        self.matrices.append(method)
        return method

    def make_vector(
        self, build: BuildContext, layout: Layout, name: str = "weight", dtype: torch.dtype | None = None
    ) -> Tensor:
        """Make a parameter, by default of the type of the activations, for norms and biases: its tensor."""
        data = torch.empty(layout.shape, dtype=dtype or build.compute_dtype, device=build.device)
        self.parameters_by_name[name] = self.vectors[name] = DenseParameter(layout, data)
        return data

    def describe(self) -> list[str]:
        """Return a line for each packed matrix."""
        return [line for matrix in self.matrices for line in matrix.describe()]

    def after_load(self) -> None:
        """Let matrices be repacked, once all parameters are loaded."""
        for matrix in self.matrices:
            matrix.after_load()


def named_parameters(model: nn.Module) -> dict[str, Parameter]:
    """Return all parameters under `model` by full name."""
    return {
        f"{path}.{name}": parameter
        for path, module in model.named_modules()
        if isinstance(module, Layer)
        for name, parameter in module.parameters_by_name.items()
    }


def leave_out(model: nn.Module, endings: tuple[str, ...], shard: str) -> None:
    """Take zeros for a shard of the vectors with such names, which checkpoints do not have."""
    for name, parameter in named_parameters(model).items():
        if name.endswith(endings) and isinstance(parameter, DenseParameter):
            parameter.leave_out(shard)


def finish_loading(model: nn.Module) -> None:
    """Let every layer under `model` repack what it loaded."""
    for module in model.modules():
        if isinstance(module, Layer):
            module.after_load()


def packed_matrices(model: nn.Module) -> dict[str, int]:
    """Return how many packed matrices there are under `model`, by type, shape and rounding of inputs."""
    layers = [module for module in model.modules() if isinstance(module, Layer)]
    return dict(Counter(line for layer in layers for line in layer.describe()))
