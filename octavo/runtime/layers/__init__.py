"""What models are made of: each layer keeps its own shard and knows nothing of architectures."""
