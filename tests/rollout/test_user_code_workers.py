"""Environments and rewards run in processes of their own: what hangs, ends or cannot be used costs its own episode."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import OutOfMemoryError

from actors.rollout import user_code_workers
from actors.rollout.environment import MOST_CHARACTERS, load_environment
from actors.rollout.records import Record
from actors.rollout.user_code import Answer, EpisodeCall
from actors.rollout.user_code_workers import UserCodeWorkers
from slimefsdp import Environment, StepResult
from slimefsdp.config import RunConfig
from slimefsdp.errors import BatchError, ConfigError, SlimeError, StateError
from tests.support.refusals import refused
from tests.support.user_code import calls_of, scored, scores_of
from tests.support.waiting import wait_until

HERE = __name__


class Counting(Environment):
    """Answers how often it was spoken to and by which words, and does what it is told by some of them."""

    def __init__(self, closed: str | None = None, start: int = 0) -> None:
        self.said: list[str] = []
        self.closed, self.start = closed, start

    def reset(self, record: Any, seed: int) -> Any:
        self.number = record["number"]
        if record.get("reset") == "raise":
            raise OSError("no such world")
        record["number"] = -1  # which is nobody else's
        return record.get("begins", f"{record['prompt']} {seed}")

    def step(self, response: str, finished: bool) -> StepResult:
        self.said.append(response)
        if response == "hang":
            time.sleep(600)
        if response == "exit":
            os._exit(7)
        if response == "raise":
            raise OSError("the world is full")
        if response == "pid":
            return StepResult(str(os.getpid()))
        if response == "end":
            return StepResult(None, reward=1.0, done=True, scores={"number": self.number})
        results: dict[str, Any] = {
            "tuple": ("text", 0.0, False),
            "none": StepResult(),
            "nan": StepResult("x", reward=float("nan")),
            "text reward": StepResult("x", reward="1"),  # type: ignore[arg-type]
            "maybe": StepResult("x", done=1),  # type: ignore[arg-type]
            "giant": StepResult("x" * (MOST_CHARACTERS + 1)),
            "number": StepResult(3),  # type: ignore[arg-type]
            "messages": StepResult([{"role": "tool"}]),
            "keys": StepResult([{"role": "tool", "content": "x", (1, 2): 3}]),  # type: ignore[dict-item]
            "reserved": StepResult("x", scores={"turns": 3}),
        }
        return results.get(response) or StepResult(f"{self.start + len(self.said)} {self.said} {finished}")

    def close(self) -> None:
        if self.said[-1:] == ["close"]:
            sys.exit("closed badly")
        if self.closed is not None:
            with Path(self.closed).open("a") as file:
                file.write(f"{self.number} ")


class CountingLater(Counting):
    """The same, in coroutines."""

    async def reset(self, record: Any, seed: int) -> Any:
        await asyncio.sleep(0.001 * (record["number"] % 3))
        return super().reset(record, seed)

    async def step(self, response: str, finished: bool) -> StepResult:  # type: ignore[override]
        await asyncio.sleep(600 if response == "wait" else 0.001)
        return super().step(response, finished)


class Picky(Counting):
    """Fails on its arguments in its own way, and writes to them."""

    def __init__(self, level: Any) -> None:
        super().__init__(start=len(level))
        level.append("x")

    @classmethod
    def check_arguments(cls, **arguments: Any) -> None:
        if not isinstance(arguments["level"], list):
            raise KeyError(arguments["level"])


class Forgetful(Counting):
    """Answers with a number that another process does not know."""

    def step(self, response: str, finished: bool) -> StepResult:
        return super().step("pid" if response == "x" else response, finished)


@pytest.fixture
def launch(cluster: None, make_config: Any) -> Iterator[Any]:
    """Starts processes for an environment, or for a reward where `settings` has one."""
    started: list[UserCodeWorkers] = []

    def workers(name: str = "Counting", **settings: Any) -> UserCodeWorkers:
        of_code = {key: value for key, value in settings.items() if key.startswith("reward_")}
        of_episodes = {key: value for key, value in settings.items() if key not in of_code}
        config = make_config(rollout={"environment": f"{HERE}:{name}", **of_code}, environment=of_episodes)
        started.append(UserCodeWorkers.launch(config))
        return started[-1]

    def reward_workers(name: str, **settings: Any) -> UserCodeWorkers:
        started.append(UserCodeWorkers.launch(reward_config(make_config, name, **settings)))
        return started[-1]

    yield SimpleNamespace(environment=workers, reward=reward_workers)
    for one in started:
        one.shutdown()


def _record(place: int, more: dict[str, Any]) -> Record:
    return Record({"prompt": "p", "number": place, **more}, f"train.jsonl:{place}")


class Played:
    """Episodes that go on side by side, as a driver has them go on."""

    def __init__(self, workers: UserCodeWorkers, count: int, call: int = 0, **record: Any) -> None:
        self._workers = workers
        self.episodes = [EpisodeCall((call, place, 0), _record(place, record), place, (), ()) for place in range(count)]
        self.outcomes: list[Any] = self._run(self.episodes)

    def _run(self, calls: Sequence[EpisodeCall]) -> list[Any]:
        pending = self._workers.pending()
        for one in calls:
            pending.add(one)
        return list(pending.finish())

    def say(self, *texts: str, is_last: bool = False) -> list[Any]:
        self.episodes = [
            EpisodeCall(
                one.key, one.record, one.seed, (*one.responses, (text, True)),
                (*one.digests, answer.digest if isinstance(answer, Answer) else ""), is_last,
            )
            for one, answer, text in zip(self.episodes, self.outcomes, texts, strict=True)
        ]  # fmt: skip
        self.outcomes = self._run(self.episodes)
        return self.outcomes


@pytest.mark.parametrize("name", ["Counting", "CountingLater"])
def test_episodes_are_answered_by_environments_of_their_own(launch: Any, name: str) -> None:
    played = Played(launch.environment(name, reward_workers=2, arguments={"start": 10}), 9)
    assert played.outcomes[0].__class__ is Answer, played.outcomes[0]
    assert [one.prompt for one in played.outcomes] == [f"p {place}" for place in range(9)]
    said = []
    for turn in range(1, 4):
        said.append(f"t{turn}")
        for answer in played.say(*[f"t{turn}"] * 9):
            assert answer.result == StepResult(f"{10 + turn} {said} True")
    done = played.say(*["end"] * 9)
    assert [one.result for one in done] == [StepResult(None, 1.0, True, {"number": place}) for place in range(9)]


@pytest.mark.default_tier  # what it starts are two processes without torch
def test_what_hangs_ends_or_raises_costs_its_own_episode_and_all_others_go_on_as_they_were(launch: Any) -> None:
    workers = launch.environment(reward_workers=2, reward_timeout_s=1.0)
    before = {one.result.observation for one in Played(workers, 9).say(*["pid"] * 9)}
    told = ["a", "raise", "b", "hang", "c", "exit", "d", "e", "f"]
    played = Played(workers, 9, call=1)
    played.say(*"abcdefghi")
    for place, (text, outcome) in enumerate(zip(told, outcomes := played.say(*told), strict=True)):
        assert isinstance(outcome, BatchError) == (len(text) > 1), (place, outcome)
        if isinstance(outcome, BatchError):
            assert outcome.field == "rollout.environment" and outcome.hint
            assert f"in turn 2 of episode 0 of train.jsonl:{place}" in outcome.message
        else:
            assert outcome.result.observation == f"2 {['abcdefghi'[place], text]} True", "repeated up to there"
    assert "the world is full" in outcomes[1].message
    assert "1 s" in outcomes[3].message and "ended its process" in outcomes[5].message
    after = {one.result.observation for one in Played(workers, 2, call=2).say("pid", "pid")}
    assert len(before & after) == len(after - before) == 1, "the other process is as it was"


def test_an_episode_that_is_lost_in_a_process_is_refused_if_it_does_not_repeat(launch: Any) -> None:
    workers = launch.environment("Forgetful", reward_timeout_s=2.0)
    played = Played(workers, 2)
    played.say("x", "x")
    first, second = played.say("exit", "a")
    assert "ended its process" in first.message
    assert isinstance(second, SlimeError) and "did not answer as it had before in turn 1" in second.message


def test_what_an_environment_must_not_return_is_named(launch: Any) -> None:
    faults = {
        "tuple": "which is no StepResult", "none": "no observation, though it is not done, in turn",
        "nan": "'reward': nan, which is not finite",
        "text reward": "'reward': '1', which is a str and not a number",
        "maybe": "neither True nor False", "giant": f"{MOST_CHARACTERS:,}",
        "number": "is a int", "messages": "index 0", "reserved": "something else", "keys": "no JSON",
    }  # fmt: skip
    outcomes = Played(launch.environment(), len(faults)).say(*faults)
    for outcome, fault in zip(outcomes, faults.values(), strict=True):
        assert isinstance(outcome, BatchError) and outcome.hint
        assert fault in outcome.message and "in turn 1 of episode 0" in outcome.message


def test_what_an_episode_must_not_begin_with_is_named(launch: Any) -> None:
    workers = launch.environment()
    faults: list[tuple[Any, str]] = [
        ([], "empty"), ("", "empty"), (7, "is a int"), ({"messages": "a"}, "messages and tools"),
        ({"messages": "a", "tools": []}, "text beside tools"), ({"messages": [], "tools": [1]}, "JSON objects"),
    ]  # fmt: skip
    for call, (begins, fault) in enumerate(faults):
        (outcome,) = Played(workers, 1, call=call, begins=begins).outcomes
        assert isinstance(outcome, BatchError) and fault in outcome.message and "at the beginning" in outcome.message


def test_a_coroutine_has_its_time_and_costs_its_own_episode(launch: Any) -> None:
    played = Played(launch.environment("CountingLater", reward_timeout_s=1.0), 6)
    outcomes = played.say("a", "wait", "b", "raise", "c", "end")
    assert [isinstance(one, BatchError) for one in outcomes] == [False, True, False, True, False, False]
    assert "1 s" in outcomes[1].message


@pytest.mark.parametrize("name", ["Counting", "CountingLater"])
def test_nothing_depends_on_how_it_closes(launch: Any, name: str) -> None:
    workers = launch.environment(name)
    played = Played(workers, 2)
    (before, _) = played.say("pid", "a")
    assert all(isinstance(one, Answer) for one in played.say("close", "close", is_last=True))
    (after,) = Played(workers, 1, call=1).say("pid")
    assert after.result.observation == before.result.observation, "the process is the same"


def test_a_response_that_was_drawn_anew_is_a_turn_once(launch: Any) -> None:
    """Engines that are started anew draw again, and what was drawn before was asked about already."""
    played = Played(launch.environment("CountingLater"), 1)
    (call,), (answer,) = played.episodes, played.outcomes
    said = [
        EpisodeCall(call.key, call.record, call.seed, ((text, True),), (answer.digest,)) for text in ("a", "b", "b")
    ]
    played.outcomes = played._run(said)
    assert [one.result.observation for one in played.outcomes] == [f"1 {[text]} True" for text in "abb"]


def test_environments_are_closed_once_when_they_are_done_failed_or_forgotten(launch: Any, tmp_path: Path) -> None:
    file = tmp_path / "closed"
    workers = launch.environment(arguments={"closed": str(file)})
    played = Played(workers, 5)
    played.say("a", "end", "raise", "a", "a")
    assert file.read_text().split() == ["1", "2"]
    workers.forget(0)
    assert wait_until(lambda: len(file.read_text().split()) == 5)
    Played(workers, 2, call=1).say("a", "b", is_last=True)
    assert sorted(file.read_text().split()[5:]) == ["0", "1"]


@pytest.mark.parametrize(
    ("name", "arguments", "field", "fault"),
    [
        (f"{HERE}:Played", {}, "rollout.environment", "no environment"),
        (f"{HERE}:HERE", {}, "rollout.environment", "HERE"),
        ("slimefsdp:Environment", {}, "rollout.environment", "no environment"),
        (f"{HERE}:Counting", {"level": 3}, "environment.arguments", "level"),
        (f"{HERE}:Picky", {"level": 3}, "environment.arguments", "KeyError: 3"),
    ],
)
def test_a_name_that_is_no_environment_is_refused(name: str, arguments: Any, field: str, fault: str) -> None:
    with refused(ConfigError, field, fault):
        load_environment(name, arguments)


def test_processes_that_were_shut_down_say_so(launch: Any) -> None:
    workers = launch.environment()
    pending = workers.pending()
    workers.shutdown()
    with refused(StateError, "rollout.reward_workers", f"{HERE}:Counting"):
        pending.add(EpisodeCall((0, 0, 0), _record(0, {}), 0, (), ()))
    workers.forget(0)


# ---------------------------------------------------------------------- rewards


COUNT = 23


def length(record: dict[str, Any], response: str, finished: bool) -> dict[str, float]:
    return {"reward": len(response) + record["number"] / 100, "finished": finished, "pid": os.getpid()}


async def length_later(record: dict[str, Any], response: str, finished: bool) -> dict[str, float]:
    await asyncio.sleep(0.001 * (record["number"] % 3))
    return length(record, response, finished)


def as_told(record: dict[str, Any], response: str, finished: bool) -> dict[str, float]:
    """Does what the response says."""
    if response == "exit":
        os._exit(7)
    if response == "raise":
        raise OSError("the judge's disk is full")
    return {"reward": record["number"], "pid": os.getpid()}


def reward_config(make_config: Any, name: str, **settings: Any) -> RunConfig:
    made: RunConfig = make_config(rollout={"reward": f"{HERE}:{name}", **settings})
    return made


@pytest.mark.parametrize("name", ["length", "length_later"])
def test_workers_return_what_the_function_does_in_order(launch: Any, make_config: Any, name: str) -> None:
    asked = calls_of(*("x" * (n % 5) for n in range(COUNT)))
    here = scored(UserCodeWorkers(reward_config(make_config, name), in_driver=True), asked)
    workers = launch.reward(name, reward_workers=2, reward_concurrency=4)
    for _ in range(2):
        there = scored(workers, asked)
        pids = {one.pop("pid") for one in there}
        assert len(pids) == 2 and os.getpid() not in pids
        assert there == [{key: value for key, value in one.items() if key != "pid"} for one in here]
    assert scored(workers, []) == []


def test_a_process_that_the_machine_had_no_memory_for_is_not_told_as_the_functions_fault(
    launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = launch.reward("as_told", reward_workers=1)
    scored(workers, calls_of(""))

    class Ray:
        def __getattr__(self, name: str) -> Any:
            return getattr(ray, name)

        def get(self, *arguments: Any, **how: Any) -> Any:
            raise OutOfMemoryError("Task was killed due to the node running low on memory.")

    monkeypatch.setattr(user_code_workers, "ray", Ray())
    pending = workers.pending()
    pending.add(calls_of("")[0])
    while pending._queued[0].outcome is None:  # the test itself has a time limit
        workers.advance(0.1)
    monkeypatch.undo()
    (outcome,) = pending.finish()
    assert isinstance(outcome, BatchError) and "want of memory on its machine" in outcome.message
    assert scored(workers, calls_of(""))[0]["reward"] == 0


def test_two_threads_have_their_responses_scored_at_once(launch: Any) -> None:
    workers = launch.reward("as_told", reward_workers=2, reward_timeout_s=2.0)
    told = [calls_of(*[""] * 30, "raise", *[""] * 9), calls_of(*[""] * 5, "exit", *[""] * 40)]
    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(lambda calls: scored(workers, calls), told))
    for asked, outcomes in zip(told, both, strict=True):
        for number, (call, outcome) in enumerate(zip(asked, outcomes, strict=True)):
            assert isinstance(outcome, BatchError) if call.responses[0][0] else outcome["reward"] == number


@pytest.mark.default_tier  # what it starts are processes without torch
def test_what_is_added_is_scored_before_the_last_one_is_there(launch: Any) -> None:
    workers = launch.reward("length")
    scoring = workers.pending()
    asked = calls_of("x", "xx", "xxx")
    scoring.add(asked[0])
    assert wait_until(lambda: workers.advance(0.01) or scoring._queued[0].outcome is not None)
    for call in asked[1:]:
        scoring.add(call)
    assert [int(outcome["reward"]) for outcome in scores_of(scoring.finish())] == [1, 2, 3]


def test_what_the_driver_cannot_call_is_refused_before_a_process_is_started(make_config: Any) -> None:
    with refused(ConfigError, "rollout.reward_workers"):
        UserCodeWorkers.launch(reward_config(make_config, "length_later", reward_workers=0))
    with refused(ConfigError, "rollout.reward", "'no_such'"):
        UserCodeWorkers.launch(reward_config(make_config, "no_such"))
