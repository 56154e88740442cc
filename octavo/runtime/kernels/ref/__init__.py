"""The torch twins of all kernels."""
