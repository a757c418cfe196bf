"""Weights on their way to rollout engines."""
