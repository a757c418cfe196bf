"""Optimisers, learning-rate schedule and gradient clipping."""
