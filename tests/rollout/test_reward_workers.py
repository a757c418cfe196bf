"""Reward workers give what the function gives in this process; what hangs or ends costs its own response."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import OutOfMemoryError

from actors.rollout import user_code_workers
from actors.rollout.user_code_workers import UserCodeWorkers
from slimefsdp.config import RunConfig
from slimefsdp.errors import BatchError, ConfigError, SlimeError
from tests.support.refusals import refused
from tests.support.user_code import calls_of, scored, scores_of
from tests.support.waiting import wait_until

HERE = __name__
COUNT = 23


def length(record: dict[str, Any], response: str, finished: bool) -> dict[str, float]:
    return {"reward": len(response) + record["number"] / 100, "finished": finished, "pid": os.getpid()}


async def length_later(record: dict[str, Any], response: str, finished: bool) -> dict[str, float]:
    await asyncio.sleep(0.001 * (record["number"] % 3))
    return length(record, response, finished)


def as_told(record: dict[str, Any], response: str, finished: bool) -> dict[str, float]:
    """What the response says is done."""
    if response == "hang":
        time.sleep(600)
    if response == "exit":
        os._exit(7)
    if response == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if response == "raise":
        raise OSError("the judge's disk is full")
    return {"reward": record["number"], "pid": os.getpid()}


async def as_told_later(record: dict[str, Any], response: str, finished: bool) -> dict[str, float]:
    if response == "wait":
        await asyncio.sleep(600)
    return as_told(record, response, finished)


@pytest.fixture
def launch(cluster: None, make_config: Any) -> Iterator[Any]:
    started: list[UserCodeWorkers] = []

    def workers(name: str, **settings: Any) -> UserCodeWorkers:
        started.append(UserCodeWorkers.launch(config(make_config, name, **settings)))
        return started[-1]

    yield workers
    for one in started:
        one.shutdown()


def config(make_config: Any, name: str, **settings: Any) -> RunConfig:
    made: RunConfig = make_config(rollout={"reward": f"{HERE}:{name}", **settings})
    return made


@pytest.mark.parametrize("name", ["length", "length_later"])
def test_workers_return_what_the_function_does_in_order(launch: Any, make_config: Any, name: str) -> None:
    asked = calls_of(*("x" * (n % 5) for n in range(COUNT)))
    here = scored(UserCodeWorkers(config(make_config, name), in_driver=True), asked)
    workers = launch(name, reward_workers=2, reward_concurrency=4)
    for _ in range(2):
        there = scored(workers, asked)
        pids = {one.pop("pid") for one in there}
        assert len(pids) == 2 and os.getpid() not in pids
        assert there == [{key: value for key, value in one.items() if key != "pid"} for one in here]
    assert scored(workers, []) == []


def test_a_process_that_the_machine_had_no_memory_for_is_not_told_as_the_functions_fault(
    launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = launch("as_told", reward_workers=1)
    scored(workers, calls_of(""))

    class Ray:
        def __getattr__(self, name: str) -> Any:
            return getattr(ray, name)

        def get(self, *arguments: Any, **how: Any) -> Any:
            raise OutOfMemoryError("Task was killed due to the node running low on memory.")

    monkeypatch.setattr(user_code_workers, "ray", Ray())
    pending = workers.pending()
    pending.add(calls_of("")[0])
    while not pending._outcomes:  # the test itself has a time limit
        pending._advance(0.1)
    monkeypatch.undo()
    (outcome,) = pending.finish()
    assert isinstance(outcome, BatchError) and "want of memory on its machine" in outcome.message
    assert scored(workers, calls_of(""))[0]["reward"] == 0


def test_what_hangs_or_ends_costs_its_own_response_and_its_process_is_replaced(launch: Any) -> None:
    told = ["", "raise", "", "hang", "", "exit", "", "kill", ""]
    workers = launch("as_told", reward_workers=2, reward_timeout_s=2.0)
    before = {one["pid"] for one in scored(workers, calls_of(*[""] * COUNT))}
    outcomes = scored(workers, calls_of(*told))
    for number, (text, outcome) in enumerate(zip(told, outcomes, strict=True)):
        assert isinstance(outcome, BatchError) == bool(text), (number, outcome)
        if text:
            assert outcome.field == "rollout.reward" and outcome.hint and f"train.jsonl:{number}" in outcome.message
        else:
            assert outcome["reward"] == number
    assert "2 s" in outcomes[3].message and "disk is full" in outcomes[1].message
    after = {one["pid"] for one in scored(workers, calls_of(*[""] * COUNT))}
    assert not before & after
    assert wait_until(lambda: not any(Path(f"/proc/{int(pid)}").exists() for pid in before)), "they are gone"


def test_two_threads_have_their_responses_scored_at_once(launch: Any) -> None:
    workers = launch("as_told", reward_workers=2, reward_timeout_s=2.0)
    told = [calls_of(*[""] * 30, "raise", *[""] * 9), calls_of(*[""] * 5, "exit", *[""] * 40)]
    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(lambda calls: scored(workers, calls), told))
    for asked, outcomes in zip(told, both, strict=True):
        for number, (call, outcome) in enumerate(zip(asked, outcomes, strict=True)):
            assert isinstance(outcome, BatchError) if call.responses[0][0] else outcome["reward"] == number


@pytest.mark.default_tier  # what it starts are processes without torch
def test_what_is_added_is_scored_before_the_last_one_is_there(launch: Any) -> None:
    scoring = launch("length").pending()
    asked = calls_of("x", "xx", "xxx")
    scoring.add(asked[0])
    assert wait_until(lambda: scoring._advance(0.01) or 0 in scoring._outcomes)
    for call in asked[1:]:
        scoring.add(call)
    assert [int(outcome["reward"]) for outcome in scores_of(scoring.finish())] == [1, 2, 3]


def test_an_async_function_that_blocks_its_process_costs_its_own_response(launch: Any) -> None:
    workers = launch("as_told_later", reward_timeout_s=2.0, reward_concurrency=4)
    outcomes = scored(workers, calls_of("", "wait", "", "hang", "", "raise"))
    failed = [number for number, outcome in enumerate(outcomes) if isinstance(outcome, SlimeError)]
    assert failed == [1, 3, 5]
    assert [outcomes[n]["reward"] for n in (0, 2, 4)] == [0, 2, 4]


def test_what_the_driver_cannot_call_is_refused_before_a_process_is_started(make_config: Any) -> None:
    with refused(ConfigError, "rollout.reward_workers"):
        UserCodeWorkers.launch(config(make_config, "length_later", reward_workers=0))
    with refused(ConfigError, "rollout.reward", "'no_such'"):
        UserCodeWorkers.launch(config(make_config, "no_such"))
