"""Compiled CPU kernels: C++ sources with a plain C interface, and their binding."""
