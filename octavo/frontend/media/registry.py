"""Which architectures take images, and by which processor.

Imports nothing, so that text needs nothing of media.
"""

from typing import Any

from octavo.base.registry import Registry

_HERE = "octavo.frontend.media.processors"

PROCESSORS: Registry[Any] = Registry(
    "image processor",
    {
        "Idefics3ForConditionalGeneration": f"{_HERE}.idefics3:Idefics3Processor",
        "SmolVLMForConditionalGeneration": f"{_HERE}.idefics3:Idefics3Processor",
        "InternVLForConditionalGeneration": f"{_HERE}.internvl:InternVLProcessor",
        "LlavaForConditionalGeneration": f"{_HERE}.llava:LlavaProcessor",
        "LlavaNextForConditionalGeneration": f"{_HERE}.llava_next:LlavaNextProcessor",
        "LlavaOnevisionForConditionalGeneration": f"{_HERE}.llava_next:OneVisionProcessor",
        "Mistral3ForConditionalGeneration": f"{_HERE}.pixtral:Mistral3Processor",
        "PixtralForConditionalGeneration": f"{_HERE}.pixtral:PixtralProcessor",
    },
)
"""Classes derived from ImageProcessor, by architecture."""

MARKERS: dict[str, str] = {}
"""Texts that stand for an image in a conversation, where that is not the config's image token."""
