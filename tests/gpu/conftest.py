"""Tiny models and engines, as in tests/integration; there `device="auto"` finds the GPU."""

from tests.integration.conftest import make_llm, tiny_gemma3, tiny_llama, tiny_model

__all__ = ["make_llm", "tiny_gemma3", "tiny_llama", "tiny_model"]
