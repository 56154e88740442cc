"""One rank of the runtime: loads the model, owns the KV cache and the batch state, runs steps."""
