"""The torch references of all kernels."""
