"""`Model`: what the model runner and the loader ask of an architecture, and the list of architectures."""

from abc import ABC, abstractmethod
from typing import ClassVar, Self

from torch import Tensor, nn

from octavo.base.registry import Registry
from octavo.runtime.batch import ForwardBatch
from octavo.runtime.layers.attention import Attention
from octavo.runtime.layers.build import BuildContext, named_parameters
from octavo.runtime.models.arch import Arch, Config
from octavo.runtime.models.weights import WeightMap


class Model(nn.Module, ABC):
    """A causal language model on this rank.

    WEIGHTS, GGUF_WEIGHTS: names in safetensors and GGUF files to our parameters
    TINY:                  a config small enough for tests on a CPU
    """

    WEIGHTS: ClassVar[WeightMap]
    GGUF_WEIGHTS: ClassVar[WeightMap]
    TINY: ClassVar[Config]

    @staticmethod
    @abstractmethod
    def arch_from_hf(config: Config) -> Arch:
        """Read a config in Hugging Face's form. Raises BadCheckpoint or Unsupported."""

    @classmethod
    @abstractmethod
    def build(cls, arch: Arch, build: BuildContext) -> Self:
        """Construct with parameters still to be loaded."""

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Run the layers over a step's tokens: hidden states [T, hidden_size]."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [rows, hidden_size] to scores [rows, vocab_size], float32, on every rank."""

    @property
    def attention_layers(self) -> list[Attention]:
        """The layers that keep a KV cache, by layer id."""
        return [module for module in self.modules() if isinstance(module, Attention)]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that this rank keeps."""
        return sum(parameter.num_bytes for parameter in named_parameters(self).values())


MODELS: Registry[type[Model]] = Registry(
    "model architecture",
    {
        "GPT2LMHeadModel": "octavo.runtime.models.gpt2:GPT2",
        "Gemma3ForCausalLM": "octavo.runtime.models.gemma3:Gemma3",
        "LlamaForCausalLM": "octavo.runtime.models.llama:Llama",
        "MistralForCausalLM": "octavo.runtime.models.llama:Mistral",
        "Qwen2ForCausalLM": "octavo.runtime.models.qwen:Qwen2",
        "Qwen3ForCausalLM": "octavo.runtime.models.qwen:Qwen3",
    },
)
