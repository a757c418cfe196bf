"""Computes exact attention over packed sequences on one or several context-parallel ranks."""
