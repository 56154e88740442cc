"""A worker is one rank: it loads the model, owns the KV cache and the batch state, and runs steps."""
