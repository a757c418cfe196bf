"""Exact attention over packed sequences, behind one plan."""
