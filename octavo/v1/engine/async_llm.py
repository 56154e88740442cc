"""The import path under which vLLM's users know the asynchronous engine."""

from octavo.frontend.async_engine import AsyncLLM

__all__ = ["AsyncLLM"]
