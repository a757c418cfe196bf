"""Rewards outside the driver: processes that call the reward function, each call with a deadline."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import ray

from actors.rollout.call_workers import TURN_S, CallWorkers
from actors.rollout.rewards import (
    Outcome,
    Response,
    RewardScorer,
    Scores,
    Scoring,
    driver_scorer,
    failed_reward,
    overdue,
)
from slimefsdp.config import RunConfig
from slimefsdp.errors import SlimeError, portable


class RewardWorker:
    """One process that calls the reward function; a Ray actor.

    Args:
        search_path: the driver's sys.path, where the function was found there.
    """

    def __init__(self, name: str, timeout_s: float, concurrency: int, search_path: Sequence[str]) -> None:
        sys.path += [folder for folder in search_path if folder not in sys.path]
        self._scorer = RewardScorer(name, timeout_s=timeout_s, concurrency=concurrency)

    def run(self, responses: Sequence[Response]) -> list[Outcome]:
        """The outcomes of the first responses, one or more, as many as fit into a turn."""
        outcomes = self._scorer.score(responses, time.monotonic() + TURN_S)
        return [portable(one) if isinstance(one, SlimeError) else one for one in outcomes]  # type: ignore[misc]


class RewardWorkers(CallWorkers[Response, Scores]):
    """The processes that score a run's responses, replaced where they hang or end; with none of them, the driver does.

    Args:
        config: with `rollout.reward`.
    """

    def __init__(self, config: RunConfig) -> None:
        settings = config.rollout
        assert settings.reward is not None
        self._concurrency = settings.reward_concurrency
        # also where workers call it: a name that leads nowhere is an error here, and not in each of them
        self._scorer = driver_scorer(settings)
        super().__init__(
            settings.reward_workers,
            name=settings.reward,
            setting="rollout.reward_workers",
            timeout_s=settings.reward_timeout_s,
            launch_timeout_s=config.cluster.launch_timeout_s,
            calls_at_once=settings.reward_concurrency if self._scorer.is_async else None,
        )

    @classmethod
    def launch(cls, config: RunConfig) -> RewardWorkers:
        """Starts `rollout.reward_workers` processes and waits for them.

        Raises:
            ConfigError: the function cannot be imported. ResourceError: a process did not come up.
        """
        workers = cls(config)
        workers.wait_until_up("reward workers")
        return workers

    def score(self, responses: Sequence[Response]) -> list[Outcome]:
        """What the reward function returned for each response, in their order, or the error that it is instead.

        Raises:
            ResourceError: as `scoring`.
        """
        scoring = self.scoring()
        for response in responses:
            scoring.add(response)
        return scoring.finish()

    def scoring(self) -> Scoring:
        """For responses that come one after another; as `pending`, whose errors it has."""
        return self.pending() if self._workers else self._scorer.scoring()

    def _actor(self, options: dict[str, Any]) -> Any:
        actor: Any = ray.remote(RewardWorker).options(**options)
        return actor.remote(self.name, self._timeout_s, self._concurrency, sys.path)

    def _lost(self, call: Response, how: str | None) -> SlimeError:
        if how is None:
            return overdue(self.name, call, self._timeout_s)
        return failed_reward(f"{self.name} {how}", call.record, "correct it, or look at the memory of its node")
