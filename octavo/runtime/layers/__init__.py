"""Models are made of layers: each keeps its own shard and knows nothing of architectures."""
