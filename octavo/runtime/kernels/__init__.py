"""Pure functions on tensors, each with a slow twin in `ref/`; chosen as one `KernelTable` by the platform."""
