"""A quantization scheme has the interface that is defined here, and a line in the list of schemes.

A scheme makes one `LinearMethod` per matrix, and one `ExpertsMethod` for the experts of a layer; a linear
layer, embedding or head owns its method and does not know how the matrix is stored. To add a scheme: one file
with a `Scheme`, one line in `SCHEMES`.
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
from octavo.runtime.kernels.experts import ExpertForm, ExpertKernels, Routing, Shared, Stacks
from octavo.runtime.kernels.linear import LinearKernels
from octavo.runtime.kernels.precision import InputPrecision
from octavo.runtime.quantization.arena import Arena
from octavo.runtime.quantization.parameter import Layout, Parameter
from octavo.runtime.quantization.roundings import PACKERS
from octavo.runtime.quantization.stored_config import ALIASES, check_name, stored_quantization

Deferred = Callable[[Tensor, float, Tensor], tuple[Tensor, Tensor]]
"""A term that is computed when an RMS norm adds it to the residual stream, by one kernel for both.

Takes the norm's weight [size], its eps and the stream [T, size]; returns (normalised sum, sum).
"""
Term = Tensor | Deferred
"""What a layer adds to the residual stream."""


_EIGHT_BITS: dict[str, InputPrecision] = {"F8": "float8", "S8": "int8"}


@dataclass(frozen=True, slots=True)
class Storage:
    """Says where and how weights are kept: `compute_dtype` is the type of activations, biases and norms.

    host_layers: the decoder layers whose matrices are kept in host memory
    splits_floats: products with float32 weights need 16 of their 24 bits, where that is faster
    host_experts: those of which experts are
    follows_recipes: kernels that multiply 8 bits by 8 bits serve checkpoints made for that
    input_precision: the inputs of products with packed weights are rounded to it
    dense_precision: the same with bfloat16 weights; None = input_precision
    arena:       where their memory comes from
    """

    device: torch.device
    weight_dtype: torch.dtype
    compute_dtype: torch.dtype
    kernels: LinearKernels
    experts: ExpertKernels
    input_precision: InputPrecision = "float32"
    dense_precision: InputPrecision | None = None
    splits_floats: bool = False
    follows_recipes: bool = True
    host_layers: frozenset[int] = frozenset()
    host_experts: range = range(0)
    arena: Arena = field(default_factory=Arena)

    def precision_of(self, type_name: str, *, rounds: bool = False) -> InputPrecision:
        """Return what the inputs of products with weights of a type are rounded to.

        rounds: to 8 bits, by the weights' recipe, where there is a kernel for that
        """
        own = _EIGHT_BITS.get(type_name.partition("_")[0])
        if rounds and own and self.follows_recipes and self.kernels.arrange is not None:
            return own
        if type_name == "F32" and not (self.splits_floats and self.kernels.splits_floats):
            return "float32"
        return self.dense_precision or self.input_precision if type_name == "BF16" else self.input_precision

    def has_experts_on_host(self, name: str) -> bool:
        """Return True if the experts of the layer `name` stay in host memory."""
        stack, _, rest = name.partition(".")
        return stack == "layers" and int(rest.partition(".")[0]) in self.host_experts

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
        return None

    def apply_activated(self, x: Tensor, bias: Tensor | None, activation: Activation) -> Tensor | None:
        """Return the activation of `apply`, computed by one kernel; None if there is none."""
        return None

    def apply_feed_forward(self, x: Tensor, gate: Activation, down: "LinearMethod") -> Tensor | None:
        """Return `down` of the gated activation of `apply`, without biases; None if no kernel does it all."""
        return None

    def apply_greedy(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return (argmax, maximum) of each row of `apply` without a bias; None if no kernel is faster."""
        return None

    def apply_deferred(self, x: Tensor) -> Term:
        """Return `apply` without a bias as a term, which the norm may compute if that is faster."""
        return self.apply(x, None)

    def matrix(self) -> Tensor:
        """Return the matrix where it is kept as plain numbers. Raises Unsupported for packed ones."""
        raise Unsupported(f"{type(self).__name__} keeps no plain matrix.")

    @abstractmethod
    def gather(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        """Return the rows `ids` [T] times `scale`, as activations [T, inputs]."""

    def roll(self, count: int) -> None:
        """Bring the last `count` rows to the front, once everything is loaded."""
        raise Unsupported(f"{type(self).__name__} cannot rearrange the rows of a matrix.")

    def describe(self) -> list[str]:
        """Return a line for each packed matrix: its type and shape, and how inputs are rounded for it."""
        return []


class ExpertsMethod(ABC):
    """Owns the matrices of all experts of one layer on this rank."""

    num_spare: int | None = None
    """Room behind them, for copies of others; None = experts stay where they are loaded."""

    @abstractmethod
    def create(self, up: Layout, down: Layout) -> dict[str, Parameter]:
        """Make the parameters: "up." or "down.", then the last part of the name in the checkpoint.

        up:   "0.gate", "0.up", "1.gate", … stacked along the first axis, [inputs] columns each
        down: "0", "1", … stacked along the first axis: [E, outputs, inner size]
        """

    def after_load(self) -> None:
        """Repack once everything is loaded, if need be."""
        return

    def stacks(self) -> Stacks:
        """Return the matrices, packed or plain, once everything is loaded."""
        raise Unsupported(f"{type(self).__name__}: adapters do not change experts that are stored like this.")

    @abstractmethod
    def apply(self, x: Tensor, routing: Routing, form: ExpertForm, shared: Shared | None = None) -> Tensor:
        """Return the weighted sum of the experts of each token x [T, H], and of `shared`: [T, H].

        The order of the sums is fixed. No token is dropped, however many choose one expert.
        """

    def slots(self) -> list[Tensor]:
        """Return the tensors that it multiplies by, [experts and room, …] each. Raises Unsupported."""
        raise Unsupported("enable_eplb: experts stored in this form are not moved.")

    def describe(self) -> list[str]:
        """Return a line for each packed stack; see LinearMethod.describe."""
        return []


Sources = Callable[[str], dict[str, str]]
"""Takes our name of a matrix; returns the modules of the checkpoint that hold it, by shard."""


class Scheme(ABC):
    """Says how the matrices of one checkpoint are stored."""

    def __init__(self, storage: Storage, config: EngineConfig, sources: Sources) -> None:
        """Read the config. sources: names in the checkpoint. Raises BadCheckpoint, Unsupported."""
        self.storage, self.config, self.sources = storage, config, sources

    @classmethod
    @abstractmethod
    def matches(cls, config: EngineConfig) -> bool:
        """Return True if the checkpoint is stored this way."""

    @classmethod
    def stored_name(cls, name: str) -> str | None:
        """Return under which name a tensor of the checkpoint is known to weight maps; None = not needed."""
        return name

    @abstractmethod
    def linear(self, name: str) -> LinearMethod:
        """Return a method for the matrix of the layer `name`."""

    def experts(self, name: str) -> ExpertsMethod:
        """Return a method for the experts of the layer `name`. Raises Unsupported if there is none."""
        raise Unsupported(f"{name}: experts stored by {type(self).__name__} are not supported.")

    def is_packed(self, name: str) -> bool:
        """Return True if the checkpoint has the matrix of the layer `name` in another form than numbers."""
        return False

    def router(self, name: str) -> LinearMethod:
        """Return a method for the matrix by which the layer `name` chooses experts."""
        return self.linear(name)


SCHEMES: Registry[type[Scheme]] = Registry(
    "quantization scheme",
    {
        "gguf": "octavo.runtime.quantization.gguf:GGUF",
        **dict.fromkeys(("online", *PACKERS), "octavo.runtime.quantization.online:Online"),
        "int8": "octavo.runtime.quantization.int8:Int8",
        "int8_per_channel_weight_only": "octavo.runtime.quantization.int8:Int8",
        "unquantized": "octavo.runtime.quantization.unquantized:Unquantized",
        "gptq": "octavo.runtime.quantization.gptq:GPTQ",
        "awq": "octavo.runtime.quantization.awq:AWQ",
        "auto-round": "octavo.runtime.quantization.auto_round:AutoRound",
        "compressed-tensors": "octavo.runtime.quantization.compressed_tensors:CompressedTensors",
        "mxfp4": "octavo.runtime.quantization.mxfp4:MXFP4",
        "fp8": "octavo.runtime.quantization.fp8:FP8",
        "bitsandbytes": "octavo.runtime.quantization.bitsandbytes:BitsAndBytes",
        "quark": "octavo.runtime.quantization.quark:Quark",
        "hqq": "octavo.runtime.quantization.hqq:HQQ",
        "torchao": "octavo.runtime.quantization.torchao:TorchAO",
    },
)


def select_scheme(config: EngineConfig) -> type[Scheme]:
    """Return the scheme that the options, or else the checkpoint, name. Raises Unsupported for none."""
    stored = stored_quantization(config).get("quant_method")
    stored = "gguf" if config.model.load_format == "gguf" else stored
    if name := config.model.quantization or ("online" if config.model.quantization_config else ""):
        check_name(name, stored, SCHEMES.names())
    first = stored or "unquantized"  # each other one would be imported to be asked
    names = [ALIASES.get(name, name)] if name else sorted(SCHEMES.names(), key=lambda known: known != first)
    names = ["online"] if name == "fp8" and stored is None else names
    for known in names:
        scheme = SCHEMES.load(known)
        if scheme.matches(config):
            return scheme
    how = f"stored by {stored!r}" if stored else "not quantized"
    use = "an unquantized checkpoint, or a GGUF file and no other quantization"
    if not stored:
        use = "int8, int4 or fp8, which round as they load, online with quantization_config, or leave it out"
    raise Unsupported(f"The weights are {how}, which does not fit {', '.join(names)}. Use {use}.")
