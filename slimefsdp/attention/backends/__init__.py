"""Wraps the kernels that compute attention over packed sequences."""
