"""Sampling from a policy, a token at a time for many rows at once; what the embedded rollout engine does."""
