"""Checkpoints (weights, optimiser, generators, counters, loop state), whole or absent; and Hugging Face export."""
