"""What this machine can do: device, memory, arithmetic types, kernels."""
