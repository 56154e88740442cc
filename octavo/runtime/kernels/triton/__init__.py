"""The Triton kernels, for GPUs."""
