"""The import path under which vLLM's users know the forms of a prompt."""

from octavo.frontend.prompts import PromptType, TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
