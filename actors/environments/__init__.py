"""Environments: what answers a policy turn by turn, and those that come with the project."""

from actors.rollout.environment import Environment, Observation, Prompt, StepResult

__all__ = ["Environment", "Observation", "Prompt", "StepResult"]
