"""The engine: the core loop, its scheduler, the KV cache's bookkeeping, the executors. No torch."""
