"""Which architectures take images, videos and audio, and by which processor.

Imports nothing, so that text needs nothing of media.
"""

from typing import Any

from octavo.base.registry import Registry

_HERE = "octavo.frontend.media.processors"

PROCESSORS: Registry[Any] = Registry(
    "image processor",
    {
        "CLIPModel": f"{_HERE}.contrastive:CLIPProcessor",
        "ColQwen2ForRetrieval": f"{_HERE}.qwen_vl:ColQwen2Processor",
        "Gemma3ForConditionalGeneration": f"{_HERE}.gemma3:Gemma3Processor",
        "Idefics3ForConditionalGeneration": f"{_HERE}.idefics3:Idefics3Processor",
        "SmolVLMForConditionalGeneration": f"{_HERE}.idefics3:SmolVLMProcessor",
        "InternVLForConditionalGeneration": f"{_HERE}.internvl:InternVLProcessor",
        "LlavaForConditionalGeneration": f"{_HERE}.llava:LlavaProcessor",
        "LlavaNextForConditionalGeneration": f"{_HERE}.llava_next:LlavaNextProcessor",
        "LlavaOnevisionForConditionalGeneration": f"{_HERE}.llava_next:OneVisionProcessor",
        "Mistral3ForConditionalGeneration": f"{_HERE}.pixtral:Mistral3Processor",
        "Phi4MultimodalForCausalLM": f"{_HERE}.phi4:Phi4Processor",
        "PixtralForConditionalGeneration": f"{_HERE}.pixtral:PixtralProcessor",
        "Qwen2VLForConditionalGeneration": f"{_HERE}.qwen_vl:Qwen2VLProcessor",
        "Qwen2_5_VLForConditionalGeneration": f"{_HERE}.qwen_vl:Qwen2VLProcessor",
        "Qwen2_5OmniThinkerForConditionalGeneration": f"{_HERE}.qwen_vl:Qwen2VLProcessor",
        "Qwen3VLMoeForConditionalGeneration": f"{_HERE}.qwen_vl:Qwen3VLProcessor",
        "Qwen3VLForConditionalGeneration": f"{_HERE}.qwen_vl:Qwen3VLProcessor",
        "SiglipModel": f"{_HERE}.contrastive:SigLIPProcessor",
    },
)
"""Classes derived from ImageProcessor, by architecture."""

AUDIO_PROCESSORS: Registry[Any] = Registry(
    "audio processor",
    {
        "Phi4MultimodalForCausalLM": f"{_HERE}.phi4:Phi4AudioProcessor",
        "Qwen2AudioForConditionalGeneration": f"{_HERE}.audio:Qwen2AudioProcessor",
        "Qwen2_5OmniThinkerForConditionalGeneration": f"{_HERE}.audio:OmniAudioProcessor",
        "VoxtralForConditionalGeneration": f"{_HERE}.audio:VoxtralProcessor",
        "WhisperForConditionalGeneration": f"{_HERE}.audio:WhisperProcessor",
    },
)
"""Classes derived from AudioProcessor, by architecture."""


def processors_of(architecture: str) -> list[Registry[Any]]:
    """Return the registries that have processors of a model, that of images first; [] for text alone."""
    return [known for known in (PROCESSORS, AUDIO_PROCESSORS) if architecture in known]


MARKERS: dict[str, dict[str, str]] = {
    "Gemma3ForConditionalGeneration": {"image": "<start_of_image>"},
    "InternVLForConditionalGeneration": {"video": "<video>"},
    "SmolVLMForConditionalGeneration": {"video": "<video>"},
}
"""Texts that stand for items in a conversation, where those are not tokens that the config names."""

NUMBERED = {"Phi4MultimodalForCausalLM": r"<\|(image|audio)_\d+\|>"}
"""How prompts of a family count their items, where the tokens that stand for items are called otherwise."""
