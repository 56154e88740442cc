"""Which architectures take images, videos and audio, and by which processor.

Imports nothing, so that text needs nothing of media.
"""

from typing import Any

from octavo.base.registry import Registry

_HERE = "octavo.frontend.media.processors"

PROCESSORS: Registry[Any] = Registry(
    "image processor",
    {
        "Gemma3ForConditionalGeneration": f"{_HERE}.gemma3:Gemma3Processor",
        "Idefics3ForConditionalGeneration": f"{_HERE}.idefics3:Idefics3Processor",
        "SmolVLMForConditionalGeneration": f"{_HERE}.idefics3:Idefics3Processor",
        "InternVLForConditionalGeneration": f"{_HERE}.internvl:InternVLProcessor",
        "LlavaForConditionalGeneration": f"{_HERE}.llava:LlavaProcessor",
        "LlavaNextForConditionalGeneration": f"{_HERE}.llava_next:LlavaNextProcessor",
        "LlavaOnevisionForConditionalGeneration": f"{_HERE}.llava_next:OneVisionProcessor",
        "Mistral3ForConditionalGeneration": f"{_HERE}.pixtral:Mistral3Processor",
        "PixtralForConditionalGeneration": f"{_HERE}.pixtral:PixtralProcessor",
        "Qwen2VLForConditionalGeneration": f"{_HERE}.qwen_vl:Qwen2VLProcessor",
        "Qwen2_5_VLForConditionalGeneration": f"{_HERE}.qwen_vl:Qwen2VLProcessor",
        "Qwen3VLMoeForConditionalGeneration": f"{_HERE}.qwen_vl:Qwen3VLProcessor",
        "Qwen3VLForConditionalGeneration": f"{_HERE}.qwen_vl:Qwen3VLProcessor",
    },
)
"""Classes derived from ImageProcessor, by architecture."""

AUDIO_PROCESSORS: Registry[Any] = Registry(
    "audio processor",
    {
        "Qwen2AudioForConditionalGeneration": f"{_HERE}.audio:Qwen2AudioProcessor",
        "VoxtralForConditionalGeneration": f"{_HERE}.audio:VoxtralProcessor",
        "WhisperForConditionalGeneration": f"{_HERE}.audio:WhisperProcessor",
    },
)
"""Classes derived from AudioProcessor, by architecture."""


def processors_of(architecture: str) -> Registry[Any] | None:
    """Return the registry that has the processor of a model; None for a model of text alone."""
    return next((known for known in (PROCESSORS, AUDIO_PROCESSORS) if architecture in known), None)


MARKERS: dict[str, str] = {"Gemma3ForConditionalGeneration": "<start_of_image>"}
"""Texts that stand for an image in a conversation, where that is not the config's image token."""
