"""Pure functions on tensors, each with a slow reference in `ref/`; the platform chooses a `KernelTable`."""
