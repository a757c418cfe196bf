"""Sampling from a policy by continuous batching, for the embedded rollout engine and the sampling service."""
