"""How often lost engines are replaced: also when others are lost while they start, and within the budget."""

from __future__ import annotations

from typing import Any

import pytest

from actors.fault_tolerance.restarts import MAX_WITHOUT_PROGRESS
from actors.rollout.engine import EnginePool
from actors.rollout.supervised import RestartingEngines
from slimefsdp.errors import WorkerDied, WorkerHung

LOSSES: list[Exception] = [WorkerDied("an engine ended", rank=0, call="launch"), WorkerHung("one does not come up")]


class Scripted:
    """What engines do: launches fail as told, and sampling fails until a launch has succeeded."""

    def __init__(self, failures: list[Exception]) -> None:
        self.failures = failures
        self.launches = 0
        self.is_up = False
        self.updated_after = -1  # so many launches

    def update_from(self, pool: Any, group: Any) -> int:
        self.updated_after = self.launches
        return 7

    def relaunch(self, pool: Any) -> None:
        self.launches += 1
        if self.failures:
            raise self.failures.pop(0)
        self.is_up = True

    def generate(self, pool: Any, prompts: Any, **options: Any) -> tuple[int, list[Any]]:
        if not self.is_up:
            raise WorkerDied("the first loss")
        assert self.updated_after == self.launches, "these engines have the policy's weights"
        return 7, []


def scripted_engines(
    monkeypatch: pytest.MonkeyPatch, make_config: Any, failures: list[Exception], max_restarts: int
) -> tuple[Scripted, RestartingEngines]:
    script = Scripted(failures)
    for name in ("relaunch", "generate", "update_from"):
        method = getattr(script, name)
        monkeypatch.setattr(EnginePool, name, lambda pool, *args, method=method, **kw: method(pool, *args, **kw))
    engines = RestartingEngines(make_config(cluster={"max_restarts": max_restarts}))
    engines.update_from(object())
    return script, engines


def test_engines_that_are_lost_while_they_start_are_replaced_too(
    monkeypatch: pytest.MonkeyPatch, make_config: Any
) -> None:
    script, engines = scripted_engines(monkeypatch, make_config, list(LOSSES), max_restarts=3)
    assert engines.generate(["a"], samples_per_prompt=1, seed=(0,)) == (7, [])
    assert script.launches == 3


@pytest.mark.parametrize(("max_restarts", "launches"), [(0, 0), (2, 2), (10, MAX_WITHOUT_PROGRESS)])
def test_losses_beyond_the_budget_or_without_progress_end_the_run(
    monkeypatch: pytest.MonkeyPatch, make_config: Any, max_restarts: int, launches: int
) -> None:
    script, engines = scripted_engines(monkeypatch, make_config, 9 * LOSSES, max_restarts)
    with pytest.raises((WorkerDied, WorkerHung)):
        engines.generate(["a"], samples_per_prompt=1, seed=(0,))
    assert script.launches == launches
