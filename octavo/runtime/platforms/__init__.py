"""A platform says what this machine can do: device, memory, arithmetic types, kernels."""
