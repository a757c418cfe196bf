"""Optimiser, learning-rate schedule and gradient clipping."""
