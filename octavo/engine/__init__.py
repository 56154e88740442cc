"""The engine: the core loop, its scheduler, the KV cache's bookkeeping, the executors. No torch."""

from octavo.names.modules import names_of

__getattr__ = names_of(__name__)
"""vLLM's names of this path: LLMEngine, AsyncLLMEngine, EngineArgs."""
