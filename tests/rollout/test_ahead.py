"""Batches that are drawn ahead: within the bound of staleness, from the weights that each says, and as without it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.engines.pool import EnginePool
from actors.loop import train
from actors.rollout.collect import AheadCollector
from actors.run_dir import RunFolder
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError
from slimefsdp.monitoring.metrics_log import read_metrics
from tests.support.waiting import PATIENCE_S, wait_until

PROMPTS = ["sort 31", "sort 2718", "sort 90210", "sort 5"]


class Scripted:
    """Stands for a Collector: notes the weights with which each step begins, and waits to be told to go on."""

    def __init__(self, fails_at: int = -1) -> None:
        self.begun: list[int] = []
        self.may_end = threading.Semaphore(0)
        self.fails_at = fails_at
        self.prompts = self

    def state(self) -> dict[str, Any]:
        return {"offset": len(self.begun)}

    def collect(self, step: int, version: int | None, seconds: dict[str, float]) -> tuple[None, dict[str, float]]:
        self.begun.append(step)
        assert self.may_end.acquire(timeout=PATIENCE_S)
        if step == self.fails_at:
            raise BatchError("the judge is ill", field="rollout.reward")
        return None, {"step": float(step)}


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_no_batch_begins_before_the_weights_are_new_enough(staleness: int) -> None:
    script: Any = Scripted()
    ahead = AheadCollector(script, first_step=2, steps=9, max_staleness=staleness)
    for done in range(2, 9):
        for _ in range(20):
            script.may_end.release()
        allowed = list(range(2, min(9, done + staleness + 1)))
        assert wait_until(lambda allowed=allowed: script.begun == allowed)
        time.sleep(0.05)
        assert script.begun == allowed, "and no more"
        found = ahead.next()
        assert (found.step, found.metrics, found.prompts) == (done, {"step": done}, {"offset": done - 1})
        ahead.step_done()
    ahead.close(PATIENCE_S)


def test_what_cannot_be_collected_is_raised_where_it_would_be_trained_on() -> None:
    script: Any = Scripted(fails_at=1)
    ahead = AheadCollector(script, first_step=0, steps=9, max_staleness=4)
    for _ in range(9):
        script.may_end.release()
    assert wait_until(lambda: script.begun == [0, 1])
    assert ahead.next().step == 0
    for _ in range(2):
        with pytest.raises(BatchError):
            ahead.next()
    ahead.settle(PATIENCE_S)
    ahead.close(PATIENCE_S)


def test_one_that_is_closed_collects_nothing_more() -> None:
    script: Any = Scripted()
    ahead = AheadCollector(script, first_step=0, steps=9, max_staleness=8)
    assert wait_until(lambda: script.begun == [0])
    closing = threading.Thread(target=ahead.close, args=(PATIENCE_S,))
    closing.start()
    script.may_end.release()
    closing.join(PATIENCE_S)
    assert not closing.is_alive() and script.begun == [0]


# --------------------------------------------------------------------------------------------------------- real engines


@pytest.mark.parametrize("aborts", [False, True])
def test_an_update_under_way_continues_or_redraws_what_is_being_sampled(
    cluster: None, make_config: Any, group: Any, small_batch: RolloutBatch, aborts: bool
) -> None:
    config = make_config(rollout={"max_new_tokens": 1500, "max_staleness": 1})
    pool = EnginePool.launch(config)

    def ticks() -> int:
        return sum(ray.get(one.progress.remote(), timeout=PATIENCE_S).progress.ticks for one in pool.receivers)

    try:
        before = pool.update_from(group)
        for attempt in range(5):  # on a busy machine all samples may have ended before the weights come
            group.train_step(small_batch)
            at_rest = ticks()
            with ThreadPoolExecutor(1) as thread:
                drawing = thread.submit(
                    pool.generate, PROMPTS, samples_per_prompt=2, seed=(attempt,), may_mix=True, each=lambda one: None
                )
                wait_until(lambda drawing=drawing, at_rest=at_rest: drawing.done() or ticks() > at_rest + 60)  # type: ignore[misc]
                after = pool.update_from(group, aborts=aborts)
                version, samples = drawing.result(timeout=PATIENCE_S)
            versions = [[span.version for span in one.versions] for one in samples]
            if any(after in one for one in versions):
                break
            before = after
        assert len(samples) == 8 and version == min(map(min, versions))
        assert {tuple(one) for one in versions} <= {(before,), (after,), *([] if aborts else [(before, after)])}
        if not aborts:
            assert (before, after) in {tuple(one) for one in versions}
    finally:
        pool.shutdown()


def parity(record: dict[str, Any], response: str, finished: bool) -> dict[str, float]:
    return {"reward": len(response) % 2 + len(set(response)) / 10}


@pytest.fixture
def run(cluster: None, make_config: Any, example: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    """Settings of a small run with one rank and one engine."""

    def made(name: str, *, checkpoint: dict[str, Any] | None = None, **rollout: Any) -> RunConfig:
        found: RunConfig = make_config(
            run={"steps": 5, "dir": str(tmp_path / name)},
            mesh={"dp": 1},
            batch={"samples_per_update": 8},
            data={"train": str(example / "train.jsonl"), "heldout": str(example / "heldout.jsonl")},
            rollout={
                "prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 6, "engines": 1,
                "reward": f"{__name__}:parity", **rollout,
            },
            **({} if checkpoint is None else {"checkpoint": checkpoint}),
        )  # fmt: skip
        return found

    return made


@pytest.mark.parametrize(("staleness", "on_update"), [(1, "wait"), (2, "continue"), (2, "abort")])
def test_a_run_ahead_trains_on_batches_no_older_than_it_may(
    run: Callable[..., RunConfig], staleness: int, on_update: str
) -> None:
    config = run("run", checkpoint={"interval_steps": 5}, max_staleness=staleness, on_update=on_update)
    train(config)
    rows = read_metrics(config.run.dir)
    assert [row["updates"] for row in rows] == [2.0] * 5, "16 samples, 8 an update"
    found = [(row["rollout/staleness"], row["rollout/staleness_max"]) for row in rows]
    assert all(0 <= mean <= most <= 2 * staleness for mean, most in found), found
    assert found[0] == (0, 0) and max(most for _, most in found) > 0
    if on_update == "wait":
        assert found == [(0, 0), *[(2, 2)] * 4], "always the batch beside the training of the one before"
    folder = RunFolder(config.run.dir)
    for step, row in enumerate(rows):
        recorded = folder.batches.read(step)
        assert recorded is not None
        versions = recorded[0].weight_versions
        oldest = recorded[0].weight_version if versions is None else versions.min()
        assert oldest == recorded[0].weight_version == 2 * step - row["rollout/staleness_max"]
