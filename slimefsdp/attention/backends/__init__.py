"""Kernels that compute attention over packed sequences."""
