"""A quantization scheme has the interface that is defined here, and a line in the list of schemes.

A scheme makes one `LinearMethod` per matrix; a linear layer, embedding or head owns its method and does not
know how the matrix is stored. To add a scheme: one file with a `Scheme`, one line in `SCHEMES`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from octavo.base.errors import Unsupported
from octavo.base.registry import Registry
from octavo.config.engine import EngineConfig
from octavo.runtime.kernels.activations import Activation
from octavo.runtime.kernels.linear import LinearKernels
from octavo.runtime.kernels.precision import InputPrecision
from octavo.runtime.quantization.arena import Arena
from octavo.runtime.quantization.parameter import Layout, Parameter

Deferred = Callable[[Tensor, float, Tensor], tuple[Tensor, Tensor]]
"""A term that is computed when an RMS norm adds it to the residual stream, by one kernel for both.

Takes the norm's weight [size], its eps and the stream [T, size]; returns (normalised sum, sum).
"""
Term = Tensor | Deferred
"""What a layer adds to the residual stream."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Says where and how weights are kept: `compute_dtype` is the type of activations, biases and norms.

    host_layers: the decoder layers whose matrices are kept in host memory
    input_precision: the inputs of products with packed weights are rounded to it
    arena:       where their memory comes from
    """

    device: torch.device
    weight_dtype: torch.dtype
    compute_dtype: torch.dtype
    kernels: LinearKernels
    input_precision: InputPrecision = "float32"
    host_layers: frozenset[int] = frozenset()
    arena: Arena = field(default_factory=Arena)

    def device_of(self, name: str) -> torch.device:
        """Return the device that keeps the matrix of the layer `name`."""
        stack, _, rest = name.partition(".")
        is_on_host = stack == "layers" and int(rest.partition(".")[0]) in self.host_layers
        return torch.device("cpu") if is_on_host and self.device.type != "meta" else self.device


class LinearMethod(ABC):
    """Owns one matrix [outputs, inputs] on this rank."""

    @abstractmethod
    def create(self, layout: Layout) -> dict[str, Parameter]:
        """Make the parameters that hold the matrix, by the last part of their name in the checkpoint."""

    def after_load(self) -> None:
        """Repack once everything is loaded, if need be."""
        return

    @abstractmethod
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply x [T, inputs] by the matrix transposed, and add the bias: [T, outputs]."""

    def apply_gated(self, x: Tensor, bias: Tensor | None, gate: Activation) -> Tensor | None:
        """Return the gated activation of `apply`, computed by one kernel; None if there is none."""
        del x, bias, gate
        return None

    def apply_feed_forward(self, x: Tensor, gate: Activation, down: "LinearMethod") -> Tensor | None:
        """Return `down` of the gated activation of `apply`, without biases; None if no kernel does it all."""
        del x, gate, down
        return None

    def apply_greedy(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return (argmax, maximum) of each row of `apply` without a bias; None if no kernel is faster."""
        del x
        return None

    def apply_deferred(self, x: Tensor) -> Term:
        """Return `apply` without a bias as a term, which the norm may compute if that is faster."""
        return self.apply(x, None)

    @abstractmethod
    def gather(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        """Return the rows `ids` [T] times `scale`, as activations [T, inputs]."""


class Scheme(ABC):
    """Says how the matrices of one checkpoint are stored."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    @staticmethod
    @abstractmethod
    def matches(config: EngineConfig) -> bool:
        """Return True if the checkpoint is stored this way."""

    @abstractmethod
    def linear(self, name: str) -> LinearMethod:
        """Return a method for the matrix of the layer `name`."""


SCHEMES: Registry[type[Scheme]] = Registry(
    "quantization scheme",
    {
        "gguf": "octavo.runtime.quantization.gguf:GGUF",
        "int8": "octavo.runtime.quantization.int8:Int8",
        "int8_per_channel_weight_only": "octavo.runtime.quantization.int8:Int8",
        "unquantized": "octavo.runtime.quantization.unquantized:Unquantized",
    },
)


def select_scheme(config: EngineConfig, storage: Storage) -> Scheme:
    """Return the scheme that the options, or else the checkpoint, name. Raises Unsupported for none."""
    names = [config.model.quantization] if config.model.quantization else SCHEMES.names()
    for name in names:
        scheme = SCHEMES.load(name)
        if scheme.matches(config):
            return scheme(storage)
    stored = config.checkpoint.config.get("quantization_config", {}).get("quant_method", "nothing known")
    stored = "gguf" if config.model.load_format == "gguf" else stored
    raise Unsupported(
        f"The weights are stored by {stored!r}, which does not fit {', '.join(names)}. "
        "Use an unquantized checkpoint, or a GGUF file and no other quantization."
    )
