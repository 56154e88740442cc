"""`Model` is what the runner asks of a model, `Family` what the loader asks of one of octavo's own.

The architectures that octavo has a file for are listed here.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from octavo.base.registry import Registry
from octavo.messages.kv import KVCacheSpec
from octavo.runtime.batch import ForwardBatch
from octavo.runtime.layers.attention import Attention
from octavo.runtime.layers.build import BuildContext, named_parameters
from octavo.runtime.layers.cross_attention import CrossAttention
from octavo.runtime.layers.embedding import Choice, Find
from octavo.runtime.layers.pooler import ClassifierArch, Pooler
from octavo.runtime.layers.recurrent import Recurrent
from octavo.runtime.models.arch import Arch, Config
from octavo.runtime.models.weights import Target, WeightMap


class Model(nn.Module, ABC):
    """A Model computes a causal language model on this rank.

    is_recordable: `forward` and `logits` launch the same work for every batch of the same shapes
    """

    is_recordable: bool = True
    own_layers: range | None = None
    """Of this rank's stage; None = all."""
    has_logits: bool = True
    """Whether this is the last stage."""
    kv_specs: list[KVCacheSpec] | None = None
    """Of the cache's layers in all stages; None where there is one."""
    draft_kv_specs: Sequence[KVCacheSpec] = ()
    """Of the drafter's layers, where it is in another stage."""
    own_kv_specs: range | None = None
    """Those of this stage."""
    host_weight_bytes: int = 0
    """Of `weight_bytes`, those that are kept in host memory and copied to the device ahead of their use."""

    expert_cache: Any = None
    """Copies of experts in host memory (runtime/loader/expert_cache), if there are some."""
    adapters: Any = None
    """What reads adapters of this model (runtime/lora/reader), where they may change it."""

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Run the layers over a step's tokens: hidden states [T, hidden_size], or those of `batch.wanted`."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states [rows, hidden_size] to scores [rows, vocab_size] on every rank.

        In float32 or, where nothing was done to them since, as the head gave them.
        """

    def greedy(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the greedy token of each row, [rows] int64, of equal ones the lowest, and its logit.

        None where no kernel finds it sooner than `logits` and their argmax would.
        """
        return None

    def draw(self, hidden: Tensor, find: Find, *, is_cut: bool = False) -> Choice | None:
        """Return tokens [rows] int64 drawn from distributions, and the rows' greatest logits.

        None where `logits` and a choice from them are as fast. hidden: [rows, hidden_size]; find: says how
        each row is drawn; is_cut: some with limits
        """
        return None

    def shortened(self) -> AbstractContextManager[None]:
        """Let `forward` leave out layers, meanwhile, that launch the same kernels as others."""
        return nullcontext()

    @property
    def boundary(self) -> tuple[int, int, torch.dtype] | None:
        """Return sizes and type of what this stage takes and gives for a token; None where there is one."""
        return None

    @property
    def media_encoder(self) -> Any:
        """Return the MediaEncoder of a model that takes images and the like; None for text alone."""
        return self._modules.get("encoder")

    @property
    def cache_layers(self) -> list[Attention | Recurrent | CrossAttention]:
        """Return the layers that keep something between steps, by layer id."""
        kept = [x for x in self.modules() if isinstance(x, (Attention, Recurrent)) and x.is_causal]
        return [*kept, *self.cross_layers]

    @property
    def cross_layers(self) -> list[CrossAttention]:
        """Return the layers that read the source of an encoder-decoder, whose ids are the last."""
        return [x for x in self.modules() if isinstance(x, CrossAttention)]

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Return the bytes of the weights that this rank keeps."""


class Family(Model):
    """A Family is a model with a file of its own.

    WEIGHTS, GGUF_WEIGHTS: names in safetensors and GGUF files to our parameters
    """

    has_spare_layers: ClassVar[bool] = False
    """Checkpoints have layers behind the last one that only training or drafting uses."""
    MTP_NAMES: ClassVar[Mapping[str, Target]] = {}
    """Of the parts of a layer of MTP, where checkpoints have it under `mtp.`."""
    WEIGHTS: WeightMap
    GGUF_WEIGHTS: WeightMap
    CLASSIFIER: ClassVar[ClassifierArch] = ClassifierArch()
    """How the family's models for classification end."""
    MASKED_HEAD: ClassVar[Mapping[str, Target]] = {}
    """Where checkpoints have the head that fills masked places: head_dense, head_norm, lm_head.bias."""
    pooler: Pooler
    """Of a pooling model: what follows the layers."""

    @staticmethod
    @abstractmethod
    def arch_from_hf(config: Config) -> Arch:
        """Read a config in Hugging Face's form, plus `max_model_len` and `num_drafts`.

        Raises BadCheckpoint or Unsupported.
        """

    def __init__(self, arch: Arch, build: BuildContext) -> None:
        """Construct with parameters still to be loaded."""
        super().__init__()

    def is_elsewhere(self, parameter: str) -> bool:
        """Return True if another rank has this parameter."""
        return False

    @property
    def weight_bytes(self) -> int:
        return sum(parameter.num_bytes for parameter in named_parameters(self).values())


ENCODERS: Registry[type[Family]] = Registry(
    "encoder",
    {
        "BertModel": "octavo.runtime.models.bert:Bert",
        "CLIPModel": "octavo.runtime.models.contrastive:CLIP",
        "DistilBertModel": "octavo.runtime.models.bert:DistilBert",
        "GteModel": "octavo.runtime.models.rotary_bert:GTE",
        "JinaEmbeddingsV3Model": "octavo.runtime.models.rotary_bert:JinaV3",
        "MPNetModel": "octavo.runtime.models.mpnet:MPNet",
        "ModernBertModel": "octavo.runtime.models.modernbert:ModernBert",
        "NomicBertModel": "octavo.runtime.models.rotary_bert:NomicBert",
        "RobertaModel": "octavo.runtime.models.bert:Roberta",
        "SiglipModel": "octavo.runtime.models.contrastive:SigLIP",
    },
)
"""Architectures that generate nothing."""

ENCODER_DECODERS: Registry[type[Family]] = Registry(
    "encoder-decoder",
    {
        "BartForConditionalGeneration": "octavo.runtime.models.bart:Bart",
        "T5ForConditionalGeneration": "octavo.runtime.models.t5:T5",
        "WhisperForConditionalGeneration": "octavo.runtime.models.whisper:Whisper",
    },
)
"""Architectures whose decoder reads a source."""

MODELS: Registry[type[Family]] = Registry(
    "model architecture",
    {
        "ApertusForCausalLM": "octavo.runtime.models.apertus:Apertus",
        "ArceeForCausalLM": "octavo.runtime.models.nemotron:Arcee",
        "CohereForCausalLM": "octavo.runtime.models.cohere:Cohere",
        "Cohere2ForCausalLM": "octavo.runtime.models.cohere:Cohere2",
        "DeepseekV2ForCausalLM": "octavo.runtime.models.deepseek:DeepseekV2",
        "DeepseekV3ForCausalLM": "octavo.runtime.models.deepseek:DeepseekV3",
        "Ernie4_5ForCausalLM": "octavo.runtime.models.ernie:Ernie45",
        "Ernie4_5_MoeForCausalLM": "octavo.runtime.models.ernie:Ernie45MoE",
        "Exaone4ForCausalLM": "octavo.runtime.models.exaone:Exaone4",
        "FalconForCausalLM": "octavo.runtime.models.falcon:Falcon",
        "FalconH1ForCausalLM": "octavo.runtime.models.falcon_h1:FalconH1",
        "GPT2LMHeadModel": "octavo.runtime.models.gpt2:GPT2",
        "GPTJForCausalLM": "octavo.runtime.models.gptj:GPTJ",
        "GPTNeoXForCausalLM": "octavo.runtime.models.gpt_neox:GPTNeoX",
        "GemmaForCausalLM": "octavo.runtime.models.gemma:Gemma",
        "Gemma2ForCausalLM": "octavo.runtime.models.gemma:Gemma2",
        "Gemma3ForCausalLM": "octavo.runtime.models.gemma:Gemma3",
        "GlmForCausalLM": "octavo.runtime.models.glm:GLM",
        "Glm4ForCausalLM": "octavo.runtime.models.glm:GLM4",
        "Glm4MoeForCausalLM": "octavo.runtime.models.glm:GLM4MoE",
        "GptOssForCausalLM": "octavo.runtime.models.gpt_oss:GptOss",
        "GraniteMoeForCausalLM": "octavo.runtime.models.granite:GraniteMoE",
        "GraniteMoeSharedForCausalLM": "octavo.runtime.models.granite:GraniteMoE",
        "GraniteMoeHybridForCausalLM": "octavo.runtime.models.granite:GraniteHybrid",
        "GraniteForCausalLM": "octavo.runtime.models.granite:Granite",
        "HunYuanDenseV1ForCausalLM": "octavo.runtime.models.hunyuan:Hunyuan",
        "HunYuanMoEV1ForCausalLM": "octavo.runtime.models.hunyuan:HunyuanMoE",
        "InternLM2ForCausalLM": "octavo.runtime.models.internlm:InternLM2",
        "InternLM3ForCausalLM": "octavo.runtime.models.internlm:InternLM3",
        "Lfm2ForCausalLM": "octavo.runtime.models.lfm2:LFM2",
        "Lfm2MoeForCausalLM": "octavo.runtime.models.lfm2:LFM2MoE",
        "LlamaForCausalLM": "octavo.runtime.models.llama:Llama",
        "Llama4ForCausalLM": "octavo.runtime.models.llama4:Llama4",
        "MinistralForCausalLM": "octavo.runtime.models.llama:Mistral",
        "Ministral3ForCausalLM": "octavo.runtime.models.llama:Ministral3",
        "MistralForCausalLM": "octavo.runtime.models.llama:Mistral",
        "MiniMaxM2ForCausalLM": "octavo.runtime.models.minimax:MiniMaxM2",
        "MixtralForCausalLM": "octavo.runtime.models.llama:Mixtral",
        "NemotronForCausalLM": "octavo.runtime.models.nemotron:Nemotron",
        "OlmoeForCausalLM": "octavo.runtime.models.olmo:OLMoE",
        "Olmo2ForCausalLM": "octavo.runtime.models.olmo:Olmo2",
        "Olmo3ForCausalLM": "octavo.runtime.models.olmo:Olmo3",
        "OPTForCausalLM": "octavo.runtime.models.opt:OPT",
        "PhiForCausalLM": "octavo.runtime.models.phi:Phi",
        "Phi3ForCausalLM": "octavo.runtime.models.phi:Phi3",
        "Qwen2MoeForCausalLM": "octavo.runtime.models.qwen:Qwen2MoE",
        "Qwen3MoeForCausalLM": "octavo.runtime.models.qwen:Qwen3MoE",
        "Qwen2ForCausalLM": "octavo.runtime.models.qwen:Qwen2",
        "Qwen3NextForCausalLM": "octavo.runtime.models.qwen_next:Qwen3Next",
        "Qwen3_5ForCausalLM": "octavo.runtime.models.qwen_next:Qwen35",
        "Qwen3_5MoeForCausalLM": "octavo.runtime.models.qwen_next:Qwen35MoE",
        "Qwen3ForCausalLM": "octavo.runtime.models.qwen:Qwen3",
        "SeedOssForCausalLM": "octavo.runtime.models.seed_oss:SeedOss",
        "SmolLM3ForCausalLM": "octavo.runtime.models.smollm3:SmolLM3",
        "StableLmForCausalLM": "octavo.runtime.models.stablelm:StableLM",
        "Starcoder2ForCausalLM": "octavo.runtime.models.starcoder2:Starcoder2",
    },
)
