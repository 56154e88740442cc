"""A `MediaEncoder` turns images and the like into embeddings that stand in for tokens of a text model.

A model for media is any text family of `MODELS` with an encoder of `MEDIA_ENCODERS`, which the loader
attaches to it as `encoder`; the worker's MediaPart calls it. A further modality is a further encoder. Our
parameter names:

    encoder.tower.{patches, class_token, positions, norm_in, blocks.*, norm_out}  encoder.<projector>
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from octavo.base.errors import Unsupported
from octavo.base.registry import Registry
from octavo.runtime.layers.build import BuildContext
from octavo.runtime.models.arch import Config
from octavo.runtime.models.interface import MODELS
from octavo.runtime.models.weights import Target, WeightMap
from octavo.runtime.transfer import Array, Send, send

Features = Mapping[str, Tensor]
"""What the front-end's processor made of one item, by name."""
SIZES = frozenset({"grid_thw", "grid", "image_sizes", "num_frames", "is_beside_images", "seconds"})
SIZES |= {"is_height_first"}
"""Features that encoders read as numbers stay on the host: reading them from a GPU would wait for it."""

_TEXT = "model.language_model.|language_model.|model.text_model.|"
"""What stands before the names of the text model, in checkpoints of transformers 5 and 4."""


class ItemEncoder(nn.Module, ABC):
    """Turns images, sounds or source texts into what the model reads."""

    has_patch_positions: ClassVar[bool] = False
    """The rope of the text model counts time, rows and columns of patches, as `patch_positions` says."""
    num_deep_layers: int = 0
    """So many first layers of the text model add to their outputs what stands beside the embeddings."""
    compute_dtype: torch.dtype
    """Of pixels, where there are some."""

    @abstractmethod
    def encode(self, items: Sequence[Features]) -> list[Tensor]:
        """Return the embeddings of each item, [placeholders, embedding_size], all computed as one batch.

        Of models with deep layers, [placeholders, (1 + num_deep_layers) * embedding_size].
        """

    def pixels(self, item: Features) -> Features:
        """Return the item with the `pixel_values` that the front-end left to the device."""
        return item


class MediaEncoder(ItemEncoder):
    """An encoder keeps its weights unquantized, on every rank as its layers are split.

    WEIGHTS: names in the checkpoint, without "model.", to parameters, which begin with "encoder."
    """

    WEIGHTS: ClassVar[Mapping[str, Target]]
    PREFIX: ClassVar[str] = ""
    """What stands before all names, with | behind it."""

    @abstractmethod
    def __init__(self, config: Config, build: BuildContext) -> None:
        """Construct from the whole config, with parameters still to be loaded.

        Raises BadCheckpoint, Unsupported.
        """
        super().__init__()
        self.compute_dtype = build.compute_dtype

    def unused(self) -> tuple[str, ...]:
        """Return patterns of tensors that nothing reads."""
        return ()

    def patch_positions(self, features: Mapping[str, Array]) -> list[Array]:
        """Return time, row and column of each placeholder, [3, N] int64 for every run of them, from 0 on."""
        raise NotImplementedError


class ImageEncoder(MediaEncoder):
    """Its batches may be captured: all that it sends to the device is decided by the sizes of images."""

    side: int
    """Pixels of a row of what is seen at once."""

    def encode(self, items: Sequence[Features]) -> list[Tensor]:
        """See ItemEncoder."""
        return self.see(items, send)

    @abstractmethod
    def see(self, items: Sequence[Features], send: Send) -> list[Tensor]:
        """Return what `encode` does, of images. send: brings to the device what sizes decide"""

    def sample(self, numbers: int, device: torch.device) -> Features:
        """Return a black image of about so many numbers, to measure with."""
        shape = max(1, numbers // (3 * self.side**2)), 3, self.side, self.side
        pixels = torch.zeros(shape, dtype=torch.uint8, device=device)
        return {"pixel_values": pixels, "levels": torch.zeros(3, 256, device=device)}


def media_weights(text: WeightMap, encoder: MediaEncoder) -> WeightMap:
    """Return the names of a text family and of an encoder together."""
    rules, ignored = {**text.rules, **encoder.WEIGHTS}, (*text.ignored, *encoder.unused())
    return replace(text, rules=rules, prefix=encoder.PREFIX + _TEXT + text.prefix, ignored=ignored)


MEDIA_ENCODERS: Registry[type[MediaEncoder]] = Registry(
    "media encoder",
    {
        "CLIPModel": "octavo.runtime.models.contrastive:CLIPEncoder",
        "ColQwen2ForRetrieval": "octavo.runtime.models.qwen_vl:ColQwen2Encoder",
        "Gemma3ForConditionalGeneration": "octavo.runtime.models.gemma3_vision:Gemma3Encoder",
        "Idefics3ForConditionalGeneration": "octavo.runtime.models.idefics3:Idefics3Encoder",
        "Qwen2AudioForConditionalGeneration": "octavo.runtime.models.audio:Qwen2AudioEncoder",
        "SmolVLMForConditionalGeneration": "octavo.runtime.models.idefics3:Idefics3Encoder",
        "InternVLForConditionalGeneration": "octavo.runtime.models.internvl:InternVLEncoder",
        "LlavaForConditionalGeneration": "octavo.runtime.models.llava:LlavaEncoder",
        "LlavaNextForConditionalGeneration": "octavo.runtime.models.llava_next:LlavaNextEncoder",
        "LlavaOnevisionForConditionalGeneration": "octavo.runtime.models.llava_next:OneVisionEncoder",
        "Mistral3ForConditionalGeneration": "octavo.runtime.models.pixtral:Mistral3Encoder",
        "Phi4MultimodalForCausalLM": "octavo.runtime.models.phi4_multimodal:Phi4MultimodalEncoder",
        "PixtralForConditionalGeneration": "octavo.runtime.models.pixtral:PixtralEncoder",
        "Qwen2VLForConditionalGeneration": "octavo.runtime.models.qwen_vl:Qwen2VLEncoder",
        "Qwen2_5_VLForConditionalGeneration": "octavo.runtime.models.qwen_vl:Qwen25VLEncoder",
        "Qwen2_5OmniThinkerForConditionalGeneration": "octavo.runtime.models.qwen_omni:OmniEncoder",
        "Qwen3VLMoeForConditionalGeneration": "octavo.runtime.models.qwen_vl:Qwen3VLMoEEncoder",
        "Qwen3VLForConditionalGeneration": "octavo.runtime.models.qwen_vl:Qwen3VLEncoder",
        "SiglipModel": "octavo.runtime.models.contrastive:SigLIPEncoder",
        "VoxtralForConditionalGeneration": "octavo.runtime.models.audio:VoxtralEncoder",
    },
)
"""By the architecture of the whole (Checkpoint.media_architecture)."""

_TEXT_MODELS = {
    "gemma3_text": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "phi4_multimodal": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_omni_text": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
"""Architectures of text models, by the model_type of a text_config."""


def text_model(config: Config) -> str:
    """Return the architecture that a text_config describes. Raises Unsupported."""
    for name in config.get("architectures") or ():
        if name in MODELS:
            return str(name)
    kind = config.get("model_type")
    if kind not in _TEXT_MODELS:
        raise Unsupported(
            f"A text model of type {kind!r} is not supported here: {', '.join(_TEXT_MODELS)} are."
        )
    return _TEXT_MODELS[kind]
