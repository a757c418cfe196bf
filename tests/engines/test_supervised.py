"""Engines of one's own in a pool, and lost ones: replaced alone, with the others' weights, within the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.engines.pool import EnginePool
from actors.engines.protocol import Request, Sample, check_sample
from actors.fault_tolerance.recovery import MAX_WITHOUT_PROGRESS
from actors.workers.weight_update import ObjectStoreUpdate
from slimefsdp.errors import BatchError, ConfigError, EngineError, StateError, SyncError, WorkerDied
from slimefsdp.results import SyncReport
from slimefsdp.sampling.params import SamplingParams, VersionSpan
from tests.support.own_engine import LIES, OTHER_LIES
from tests.support.ray_fixtures import end_actor
from tests.support.refusals import refused
from tests.support.waiting import PATIENCE_S, wait_until

PROMPTS = [[1] * length for length in (3, 1, 4, 2, 5, 6)]
WHOLE = [(place, [*prompt, len(prompt), number]) for place, prompt in enumerate(PROMPTS) for number in range(2)]
Launch = Callable[..., EnginePool]


class Policy:
    """Stands for a trainer group, whose weights are a version alone."""

    version = 7

    def __init__(self) -> None:
        self.sent_to: list[int] = []  # how many receivers, by update

    def update_weights(self, receivers: list[Any], *, drop_failed: bool) -> SyncReport:
        assert drop_failed
        self.sent_to.append(len(receivers))
        update = ObjectStoreUpdate(receivers, PATIENCE_S, drops=True)
        update.begin(self.version, {})
        update.commit(self.version)
        return SyncReport(self.version, 0, 0.0, tuple(update.failed))


@pytest.fixture
def launch(cluster: None, make_config: Any, tmp_path: Path) -> Iterator[Launch]:
    pools = []

    def launched(
        engine: str = "tests.support.own_engine:TellingEngine", engines: int = 2, **cluster_settings: Any
    ) -> EnginePool:
        settings = {"engine": engine, "engines": engines}
        config = make_config(run={"dir": str(tmp_path)}, rollout=settings, cluster=cluster_settings)
        pools.append(EnginePool.launch(config, restarts=True))
        return pools[-1]

    yield launched
    for pool in pools:
        pool.shutdown()


def pids(pool: EnginePool) -> list[int]:
    return ray.get([engine.pid.remote() for engine in pool.receivers], timeout=PATIENCE_S)


def whole(samples: list[Any]) -> list[tuple[int, list[int]]]:
    return [(sample.prompt, sample.tokens) for sample in samples]


def test_a_lost_engine_is_replaced_alone_and_every_sample_comes_once(launch: Launch, tmp_path: Path) -> None:
    engines, policy = launch(), Policy()
    assert engines.update_from(policy) == 7
    first, second = pids(engines)
    (tmp_path / "ends_at_generate").write_text("engine 1\n")
    version, samples = engines.generate(PROMPTS, samples_per_prompt=2, seed=(0,))
    assert (version, whole(samples)) == (7, WHOLE)
    assert pids(engines)[0] == first and pids(engines)[1] != second
    assert policy.sent_to == [2, 1], "the other one has its weights"


def test_an_engine_that_hangs_is_replaced_while_another_hands_samples_over(launch: Launch, tmp_path: Path) -> None:
    engines = launch("tests.support.own_engine:UnevenEngine", call_timeout_s=4.0)
    engines.update_from(Policy())
    (tmp_path / "hangs_at_generate").write_text("engine 1\n")
    _, samples = engines.generate(PROMPTS[:2], samples_per_prompt=2000, seed=(0,))
    assert [(one.prompt, one.number) for one in samples] == [
        (place, number) for place in (0, 1) for number in range(2000)
    ]
    lines = (tmp_path / "starts").read_text().splitlines()
    assert lines.index("end of engine 0") > lines.index("engine 1", 2), "it was not waited for"


def test_streams_that_nobody_reads_on_end_and_hold_no_later_call_up(launch: Launch, tmp_path: Path) -> None:
    engines = launch("tests.support.own_engine:UnevenEngine")
    engines.update_from(Policy())
    starts, many = tmp_path / "starts", engines.requests(PROMPTS, samples_per_prompt=1000, seed=(1,))
    for _ in range(30):  # some are given up before they have left this process
        stream = engines.stream(many)
        next(stream)
        stream.close()
    assert wait_until(lambda: "early end of engine 0" in starts.read_text().splitlines())
    assert [sample.prompt for sample in engines.generate(PROMPTS[3:], samples_per_prompt=1, seed=(1,))[1]] == [0, 1, 2]
    lines = starts.read_text().splitlines()
    assert lines.count("engine 0") == lines.count("engine 1") == 1, "neither was replaced"


def test_where_the_policy_has_gone_on_all_engines_get_its_weights_and_all_is_drawn_from_them(
    launch: Launch, tmp_path: Path
) -> None:
    engines, policy = launch(), Policy()
    engines.update_from(policy)
    policy.version = 8
    (tmp_path / "ends_at_generate").write_text("engine 0\n")
    version, samples = engines.generate(PROMPTS, samples_per_prompt=2, seed=(0,))
    assert (version, whole(samples)) == (8, WHOLE)
    assert {span.version for sample in samples for span in sample.versions} == {8}


def test_an_engine_that_is_lost_in_an_update_is_replaced_and_all_get_the_weights(launch: Launch) -> None:
    engines, policy = launch(), Policy()
    first, _ = pids(engines)

    def fails_once(receivers: list[Any], *, drop_failed: bool) -> Any:
        del policy.update_weights  # type: ignore[attr-defined]
        end_actor(receivers[1])
        raise SyncError("one has gone")

    policy.update_weights = fails_once  # type: ignore[method-assign]
    assert engines.update_from(policy) == 7
    assert pids(engines)[0] == first and policy.sent_to == [2]
    assert whole(engines.generate(PROMPTS, samples_per_prompt=2, seed=(0,))[1]) == WHOLE


@pytest.mark.default_tier  # what it starts are processes without torch
def test_an_engine_that_fails_in_an_update_comes_back_alone_and_the_others_have_the_weights(
    launch: Launch, tmp_path: Path
) -> None:
    engines, policy = launch(), Policy()
    first, second = pids(engines)
    for version, trouble in ((7, "ends_at_commit"), (8, "raises_at_begin")):
        policy.version = version
        (tmp_path / trouble).write_text("engine 1\n")
        assert engines.update_from(policy) == version
        now = pids(engines)
        assert now[0] == first and now[1] != second
        second = now[1]
    assert policy.sent_to == [2, 1, 2, 1]
    assert whole(engines.generate(PROMPTS, samples_per_prompt=2, seed=(0,))[1]) == WHOLE


def test_where_nothing_brings_an_engine_back_the_error_names_it_and_the_others_have_the_weights(
    make_config: Any, cluster: None, tmp_path: Path
) -> None:
    settings = {"engine": "tests.support.own_engine:TellingEngine", "engines": 2}
    engines = EnginePool.launch(make_config(run={"dir": str(tmp_path)}, rollout=settings))
    try:
        (tmp_path / "ends_at_commit").write_text("engine 1\n")
        with pytest.raises(SyncError) as failed:
            engines.update_from(Policy())
        assert failed.value.rank == 1
        assert ray.get(engines.receivers[0].committed.remote(), timeout=PATIENCE_S) == 7
    finally:
        engines.shutdown()


@pytest.mark.parametrize(("max_restarts", "starts"), [(0, 0), (2, 2), (10, MAX_WITHOUT_PROGRESS)])
def test_losses_beyond_the_budget_or_without_progress_end_the_run(
    launch: Launch, tmp_path: Path, max_restarts: int, starts: int
) -> None:
    engines = launch(max_restarts=max_restarts)
    engines.update_from(Policy())
    (tmp_path / "ends_at_generate").write_text("engine 1\n")
    (tmp_path / "ends_at_start").write_text(9 * "engine 1\n")
    with pytest.raises(WorkerDied):
        engines.generate(PROMPTS, samples_per_prompt=2, seed=(0,))
    assert (tmp_path / "starts").read_text().count("engine 1\n") == 1 + starts


@pytest.mark.default_tier  # what it starts are processes without torch
def test_engines_that_are_lost_while_they_start_are_replaced_too(launch: Launch, tmp_path: Path) -> None:
    engines = launch(max_restarts=3)
    engines.update_from(Policy())
    (tmp_path / "ends_at_generate").write_text("engine 1\n")
    (tmp_path / "ends_at_start").write_text(2 * "engine 1\n")
    assert whole(engines.generate(PROMPTS, samples_per_prompt=2, seed=(0,))[1]) == WHOLE
    assert (tmp_path / "starts").read_text().count("engine 1\n") == 4


def test_engines_that_are_lost_together_are_all_replaced(launch: Launch) -> None:
    engines = launch(engines=MAX_WITHOUT_PROGRESS + 2)  # as with a node; each of them is lost once
    engines.update_from(Policy())
    for engine in reversed(engines.receivers):
        end_actor(engine)
    assert whole(engines.generate(PROMPTS, samples_per_prompt=2, seed=(0,))[1]) == WHOLE


def test_without_restarts_a_lost_engine_is_an_error_that_names_it(launch: Launch, tmp_path: Path) -> None:
    engines = launch()
    Policy().update_weights(engines.receivers, drop_failed=True)
    (tmp_path / "ends_at_generate").write_text("engine 1\n")
    with pytest.raises(WorkerDied) as lost:  # nobody said where weights come from
        engines.generate(PROMPTS, samples_per_prompt=2, seed=(0,))
    assert (lost.value.rank, lost.value.call) == (1, "generate")


def test_a_pool_that_is_shut_down_refuses_what_it_is_asked(launch: Launch) -> None:
    engines, policy = launch(), Policy()
    engines.update_from(policy)
    engines.shutdown()
    for name, call in (
        ("update_from", lambda: engines.update_from(policy)),
        ("generate", lambda: engines.generate(["a text"], samples_per_prompt=1, seed=(0,))),
        ("encode", lambda: engines.encode(["a text"])),
        ("stream", lambda: list(engines.stream([]))),
        ("abort", engines.abort),
    ):
        with refused(StateError, name, "shutdown()"):
            call()
    engines.sleep()  # as a supervisor has engines do before it starts ranks
    engines.shutdown()
    assert policy.sent_to == [2]


def test_engines_that_are_shut_down_while_one_is_replaced_stay_so(launch: Launch, tmp_path: Path) -> None:
    engines = launch(max_restarts=9)
    engines.update_from(Policy())
    (tmp_path / "ends_at_generate").write_text("engine 1\n")
    (tmp_path / "ends_at_start").write_text("engine 1\n")
    with ThreadPoolExecutor(1) as thread:
        drawing = thread.submit(engines.generate, PROMPTS, samples_per_prompt=2, seed=(0,))
        assert wait_until(lambda: (tmp_path / "starts").read_text().count("engine 1\n") == 2)
        engines.shutdown()
        with pytest.raises(StateError):
            drawing.result(timeout=PATIENCE_S)
    for engine in engines.receivers:
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(engine.pid.remote(), timeout=PATIENCE_S)


BAD_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "one text": ({"prompts": "sort 12"}, "prompts"),
    "a generator": ({"prompts": (one for one in PROMPTS)}, "prompts"),
    "a token of no vocabulary": ({"prompts": [[1, 100_000]]}, "prompts"),
    "no sample": ({"samples_per_prompt": 0}, "samples_per_prompt"),
    "a truth of samples": ({"samples_per_prompt": True}, "samples_per_prompt"),
    "a truth as a seed": ({"seed": True}, "seed"),
    "no seed": ({"seed": None}, "seed"),
}


def test_calls_that_cannot_be_meant_are_refused_before_an_engine_is_asked(launch: Launch) -> None:
    engines = launch()
    engines.update_from(Policy())
    for name, (changes, field) in BAD_CALLS.items():
        arguments = {"prompts": PROMPTS, "samples_per_prompt": 1, "seed": (0,), **changes}
        with refused(BatchError, field):
            engines.generate(arguments.pop("prompts"), **arguments)
            pytest.fail(name)
    for name, call in (
        ("take_turn", lambda: engines.take_turn({})),
        ("sleep", engines.sleep),
        ("end_turn", lambda: engines.end_turn({}, wakes_trainer=True)),
    ):
        with refused(StateError, name):
            call()
    with refused(StateError, "group", "NoneType"):
        engines.update_from(None)


@pytest.mark.parametrize(
    "name",
    [
        "tests.support.own_engine:Path",
        "actors.engines.protocol:Engine",
        "tests.support.own_engine:HalfEngine",
        "tests.support.own_engine:absent",
        "absent:Engine",
    ],
)
def test_what_is_no_engine_is_refused_before_a_process_starts(make_config: Any, name: str) -> None:
    with refused(ConfigError, "rollout.engine", name.partition(":")[2]):
        EnginePool(make_config(rollout={"engine": name}))


@pytest.mark.default_tier  # what it starts are processes without torch
@pytest.mark.parametrize("what", ["says nothing", "raises"])
def test_an_engine_that_does_not_say_what_it_is_is_refused(launch: Launch, tmp_path: Path, what: str) -> None:
    (tmp_path / "info").write_text(what)
    with refused(EngineError, "rollout.engine", "engine 0"):
        launch()


def test_an_engine_that_takes_too_few_tokens_for_the_longest_prompt_is_refused(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "info").write_text("takes 300 tokens")
    engines = launch()
    most = engines._config.rollout.max_new_tokens
    engines.check_room(300 - most)
    with refused(EngineError, "rollout.max_new_tokens", 300, 301 - most, most):
        engines.check_room(301 - most)


@pytest.mark.parametrize("lie", LIES)
def test_what_is_no_sample_of_a_request_is_refused(lie: str) -> None:
    requests = [Request(prompt, 2, SamplingParams(8)) for prompt in PROMPTS]
    sample = Sample(0, 0, [3, 0], [-0.5, -1.0], "stop", (VersionSpan(7, 0, 2),), "text")
    check_sample(sample, requests, 320, 1)
    with refused(EngineError, "rollout.engine", "engine 1"):
        check_sample(replace(sample, **LIES[lie]), requests, 320, 1)


@pytest.mark.default_tier  # what it starts are processes without torch
def test_no_sample_is_taken_that_was_not_asked_for_or_cannot_be(launch: Launch, tmp_path: Path) -> None:
    lie = tmp_path / "lie"
    lie.write_text("")
    engines = launch(engine="tests.support.own_engine:LyingEngine")
    engines.update_from(Policy())
    for what in ("no tokens", "a surplus sample", *OTHER_LIES):
        lie.write_text(what)
        with refused(EngineError, "rollout.engine"):
            engines.generate(PROMPTS, samples_per_prompt=2, seed=(0,))
    lie.write_text("")
    assert whole(engines.generate(PROMPTS, samples_per_prompt=2, seed=(0,))[1]) == WHOLE
    assert (tmp_path / "starts").read_text().count("engine") == 2, "nobody was replaced"
