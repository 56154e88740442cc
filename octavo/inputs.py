"""The import path under which vLLM's users know the forms of a prompt."""

from octavo.frontend.prompts import EmbedsPrompt, PromptType, TextPrompt, TokensPrompt
from octavo.frontend.streaming_input import StreamingInput

__all__ = ["EmbedsPrompt", "PromptType", "StreamingInput", "TextPrompt", "TokensPrompt"]
