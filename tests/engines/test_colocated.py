"""Engines in the places of ranks: who holds what of a device at every moment, whoever is lost meanwhile; the bits."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

from actors import loop
from actors.cluster.placement import PlacementGroups
from actors.engines.pool import EnginePool
from actors.engines.processes import ColocatedRanks
from actors.engines.protocol import ENGINE_TAGS, EngineTag
from actors.engines.updates import EngineUpdates
from actors.run_dir import RunFolder
from actors.workers.weight_update import ObjectStoreUpdate
from actors.workers.worker_group import WorkerGroup
from slimefsdp.config import RunConfig
from slimefsdp.errors import ConfigError, EngineError, StateError, SyncError
from slimefsdp.results import TAGS, SyncReport, Tag
from tests.support.ray_fixtures import end_actor
from tests.support.refusals import refused
from tests.support.runs import bits, rows_of
from tests.support.waiting import PATIENCE_S

PROMPTS = [[1] * length for length in (3, 1, 4, 2, 5, 6)]
COLOCATED = {"placement": "colocated", "engines": 1}
OWN_ENGINE = {**COLOCATED, "engine": "tests.support.own_engine:SleepingEngine"}


# ------------------------------------------------------------------------------------------------ who holds what, when


class Ranks:
    """Stands for a trainer group of two ranks: at each of its calls it notes what both sides hold."""

    critic = None
    version = 3

    def __init__(self, config: RunConfig) -> None:
        self.config, self.places = config, PlacementGroups()
        self.held: set[Tag] = set(TAGS)
        self.engines: Any = None
        self.seen: list[tuple[str, list[Tag], list[EngineTag]]] = []
        self.before: dict[str, Callable[[], None]] = {}  # what happens once, by the name of a call

    def note(self, call: str) -> None:
        self.before.pop(call, lambda: None)()
        receivers = [] if self.engines is None else self.engines.receivers
        of_engines = ray.get([engine.holds.remote() for engine in receivers], timeout=PATIENCE_S)
        self.seen.append((call, sorted(self.held), sorted({tag for tags in of_engines for tag in tags})))

    def sleep(self, tags: Sequence[Tag] = TAGS) -> None:
        self.note(f"sleep {' '.join(tags)}")
        self.held -= set(tags)

    def wake_up(self, tags: Sequence[Tag] = TAGS) -> None:
        self.note(f"wake_up {' '.join(tags)}")
        self.held |= set(tags)

    def update_weights(self, receivers: list[Any], *, drop_failed: bool) -> SyncReport:
        self.held.add("parameters")
        self.note("update_weights")
        update = ObjectStoreUpdate(receivers, PATIENCE_S, drops=drop_failed)
        update.begin(self.version, {})
        update.commit(self.version)
        return SyncReport(self.version, 0, 0.0, tuple(update.failed))


@pytest.fixture
def launch(cluster: None, make_config: Any, tmp_path: Path) -> Iterator[Any]:
    """Makes a pool beside `Ranks`."""
    pools: list[Any] = []
    groups: list[Ranks] = []

    def launched(*, restarts: bool = False, **rollout: Any) -> tuple[Any, Ranks]:
        config = make_config(run={"dir": str(tmp_path)}, rollout={**OWN_ENGINE, "engines": 2, **rollout})
        ranks = Ranks(config)
        groups.append(ranks)
        ranks.engines = pool = EnginePool.launch(config, ranks, restarts=restarts)
        pools.append(pool)
        return pool, ranks

    yield launched
    for pool in pools:
        pool.shutdown()
    for ranks in groups:
        ranks.places.release()


def drawn(pool: EnginePool) -> list[list[int]]:
    version, samples = pool.generate(PROMPTS, samples_per_prompt=2, seed=(0,))
    assert version == Ranks.version
    return [sample.tokens for sample in samples]


WHOLE = [[*prompt, len(prompt), number] for prompt in PROMPTS for number in range(2)]


@pytest.mark.default_tier  # what it starts are processes without torch
def test_no_device_holds_more_of_either_side_than_the_moment_needs(launch: Any) -> None:
    pool, ranks = launch()
    assert not ranks.held, "engines start on free devices"
    for _ in range(2):
        ranks.seen.clear()
        seconds: dict[str, float] = {}
        pool.take_turn(seconds)
        assert ranks.seen == [
            ("sleep optimizer reference", sorted(ranks.held | {"optimizer", "parameters"} if _ else []), []),
            ("update_weights", ["parameters"], ["weights"]),
            ("sleep parameters", ["parameters"], ["weights"]),
        ]
        ranks.note("sampling")
        assert ranks.seen[-1] == ("sampling", [], sorted(ENGINE_TAGS))
        assert drawn(pool) == WHOLE
        pool.take_turn(seconds)
        assert len(ranks.seen) == 4, "they have it already"
        pool.end_turn(seconds, wakes_trainer=True)
        assert ranks.seen[-1] == ("wake_up parameters optimizer", [], [])
        assert seconds.keys() == {"sync", "turn"} and min(seconds.values()) > 0


def lose(pool: Any, index: int) -> None:
    end_actor(pool.receivers[index])


@pytest.mark.parametrize("lost_before", ["wake_up parameters optimizer", "sleep optimizer reference"])
def test_an_engine_that_is_lost_in_its_sleep_is_replaced_at_its_turn_on_a_free_device(
    launch: Any, lost_before: str
) -> None:
    pool, ranks = launch(restarts=True)
    ranks.engines = None  # which cannot be asked, once one is gone
    pool.take_turn({})
    ranks.before[lost_before] = lambda: lose(pool, 1)
    pool.end_turn({}, wakes_trainer=True)
    ranks.seen.clear()
    pool.take_turn({})
    calls = [call for call, _, _ in ranks.seen]
    assert calls[:3] == ["sleep optimizer reference", "sleep optimizer reference", "sleep parameters"], (
        "all sleep, first"
    )
    assert calls[3:] == ["update_weights", "sleep parameters"] and not ranks.held
    assert drawn(pool) == WHOLE


@pytest.mark.parametrize("restarts", [False, True])
def test_an_engine_that_is_lost_when_it_is_to_sleep_holds_nothing_any_more(launch: Any, restarts: bool) -> None:
    pool, ranks = launch(restarts=restarts)
    pool.take_turn({})
    ranks.engines = None
    lose(pool, 0)
    pool.end_turn({}, wakes_trainer=True)  # as a supervisor has it done, too: the loss is none of ranks
    if not restarts:
        with refused(SyncError, "update_weights", "engine 0"):
            pool.take_turn({})
        return
    pool.take_turn({})
    assert drawn(pool) == WHOLE


@pytest.mark.parametrize("lost_in", ["update_weights", "sleep parameters"])
def test_engines_that_had_to_sleep_for_new_ranks_are_sent_weights_again(launch: Any, lost_in: str) -> None:
    pool, ranks = launch()
    ranks.before[lost_in] = pool.sleep  # as a supervisor has it done before it starts other ranks
    pool.take_turn({})
    assert [call for call, _, _ in ranks.seen].count("update_weights") == 2 and not ranks.held
    assert drawn(pool) == WHOLE


def test_with_an_engine_lost_while_they_sample_and_ranks_while_its_successor_is_sent_weights_all_is_drawn(
    launch: Any, tmp_path: Path
) -> None:
    pool, ranks = launch(restarts=True)
    pool.take_turn({})
    (tmp_path / "ends_at_generate").write_text("engine 1\n")
    ranks.engines = None
    ranks.before["update_weights"] = pool.sleep
    assert drawn(pool) == WHOLE


def test_settings_and_group_must_fit_each_other(make_config: Any) -> None:
    colocated, own = make_config(rollout=OWN_ENGINE), make_config()
    for config, beside in ((colocated, None), (own, Ranks(own))):
        with refused(StateError, "beside", config.rollout.placement):
            EnginePool(config, beside)
    with refused(ConfigError, "rollout.engines", 2, 1):
        EnginePool(make_config(rollout={**OWN_ENGINE, "engines": 2}), Ranks(make_config(mesh={"dp": 1})))


def test_an_engine_that_cannot_sleep_shares_no_device(make_config: Any) -> None:
    config = make_config(rollout={**COLOCATED, "engine": "tests.support.own_engine:TellingEngine"})
    with refused(ConfigError, "rollout.engine", "TellingEngine", "sleep"):
        EnginePool(config, Ranks(config))


def test_an_engine_of_several_workers_has_no_place_beside_one_rank(launch: Any) -> None:
    with refused(EngineError, "rollout.placement", 2):
        launch(engine="tests.support.own_engine:TwoWorkers")


# -------------------------------------------------------------------------------------------------------- real devices


def held_by_engine(engine: Any) -> int:
    """Bytes of an embedded engine's weights, in its process."""
    return sum(parameter.untyped_storage().nbytes() for parameter in engine._policy.parameters())


def test_bytes_are_released_on_either_side_at_every_turn(cluster: None, make_config: Any, small_batch: Any) -> None:
    config = make_config(mesh={"dp": 1}, rollout=COLOCATED, loss={"kl_coefficient": 0.1})
    group = WorkerGroup.launch(config)
    try:
        pool = EnginePool.launch(config, group)
        (engine,) = pool.receivers

        def held() -> tuple[int, int, int, int]:
            (memory,) = group.memory()
            of_engine = ray.get(engine.__ray_call__.remote(held_by_engine), timeout=PATIENCE_S)
            return memory.parameters, memory.optimizer, memory.reference, of_engine

        assert held() == (0, 0, 0, 0)
        for _ in range(2):
            group.train_step(small_batch)
            parameters, optimizer, reference, of_engine = held()
            assert parameters > 0 and optimizer > 0 and (reference, of_engine) == (0, 0)
            pool.take_turn({})
            *of_trainer, of_engine = held()
            assert of_trainer == [0, 0, 0] and 0 < of_engine <= parameters
            pool.generate(["sort 31"], samples_per_prompt=2, seed=(1,))
            pool.end_turn({}, wakes_trainer=True)
            assert held() == (parameters, optimizer, 0, 0)
        pool.shutdown()
    finally:
        group.shutdown()


# --------------------------------------------------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def make_run(make_config: Any, example: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Settings of a small run; sections given are laid over them."""
    folder = tmp_path_factory.mktemp("colocated")
    (folder / "heldout.jsonl").write_text("\n".join((example / "heldout.jsonl").read_text().splitlines()[:4]))

    def make(name: str, rollout: dict[str, Any], run: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
        own = {"dir": str(folder / name), "steps": 4, "seed": 5, "export_dir": str(folder / name / "model")}
        small = {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 6, "engines": 1}
        of_ppo = {name: sections.pop(name) for name in ("algorithm", "critic") if name in sections}
        found: RunConfig = make_config(
            **{
                "run": {**own, **(run or {})},
                "mesh": {"dp": 1},
                "batch": {"samples_per_update": 8},
                "data": {"train": str(example / "train.jsonl"), "heldout": str(folder / "heldout.jsonl")},
                "rollout": {**small, "reward": "tests.support.runs:variety", "reward_workers": 0, **rollout},
                "evaluation": {"interval_steps": 2},
                "checkpoint": {"interval_steps": 2},
                **sections,
            }
        )
        return RunConfig.model_validate({**found.model_dump(exclude_unset=True), **of_ppo})

    return make


Record = tuple[list[dict[str, str]], dict[int, str], str]


def record_of(config: RunConfig) -> Record:
    """Metrics, batches and weights of a run, to the last bit."""
    assert config.run.dir is not None and config.run.export_dir is not None
    batches = RunFolder(config.run.dir).batches
    found = {step: batches.read(step) for step in range(config.run.steps or 0)}
    trained = {step: digest(batch[0].tokens, batch[0].rollout_log_probs) for step, batch in found.items() if batch}
    weights = hashlib.sha256((config.run.export_dir / "model.safetensors").read_bytes()).hexdigest()
    return [bits(row) for row in rows_of(config)], trained, weights


def digest(*arrays: Any) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


# of a table, whose log-probs are none of the trainer's model
SERVED = {"weight_transport": "broadcast", "engine_logprob_bound": 1e9}
RUNS: dict[str, dict[str, Any]] = {
    "data ranks with a reference": {
        "mesh": {"dp": 2}, "rollout": {"engines": 2}, "loss": {"kl_coefficient": 0.1}
    },
    "a critic": {"algorithm": "ppo", "critic": {"lr": 0.01}},
    "servers that speak as vLLM": {"rollout": {**SERVED, "engine": "tests.support.serving_engines:ServingVllm"}},
}  # fmt: skip


@pytest.mark.parametrize("case", RUNS)
def test_a_colocated_run_is_that_of_engines_with_devices_of_their_own(
    cluster: None, make_run: Any, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = dict(RUNS[case])
    rollout = sections.pop("rollout", {})
    records = []
    for placement in ("own", "colocated"):
        config = make_run(f"{case} {placement}", {**rollout, "placement": placement}, **sections)
        loop.train(config)
        records.append(record_of(config))
        assert all(("seconds/turn" in row) is (placement == "colocated") for row in rows_of(config)[1:])
    assert records[0] == records[1] and len(records[0][0]) == 5 and records[0][1]


STRUCK_STEPS = 7


@pytest.fixture(scope="module")
def straight(cluster: None, make_run: Any) -> Record:
    """A colocated run in which nothing is lost."""
    config = make_run("straight", COLOCATED, run={"steps": STRUCK_STEPS})
    loop.train(config)
    return record_of(config)


def of_ranks(thing: Any) -> list[int]:
    group = thing.group if isinstance(thing, ColocatedRanks) else thing._processes.colocated.group
    return [answer.pid for answer in group.health()]


def pid_of(self: Any) -> int:
    return os.getpid()


def of_engines(pool: Any) -> list[int]:
    return ray.get([engine.__ray_call__.remote(pid_of) for engine in pool.receivers], timeout=PATIENCE_S)


def nobody(thing: Any) -> list[int]:
    return []


# what dies in a step, before and after the first call of a method there
LOSSES: list[tuple[Any, str, Callable[[Any], list[int]], Callable[[Any], list[int]]]] = [
    (EnginePool, "end_turn", nobody, of_engines),  # an engine that sleeps
    (EnginePool, "take_turn", nobody, of_engines),  # an engine that is asked for samples
    (EnginePool, "take_turn", nobody, of_ranks),  # a rank that sleeps
    (EngineUpdates, "_sent", of_ranks, nobody),  # a rank that is to send
    (ColocatedRanks, "free_parameters", of_ranks, nobody),  # a rank that has sent
    (ColocatedRanks, "wake_up", of_ranks, nobody),  # a rank that is to wake
]


class Striking:
    """Has processes die in the steps of a run: in each step the loss of its number."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.step, self.struck = -1, [False] * len(LOSSES)
        step = loop.RolloutLoop.step

        def counted(run: Any, number: int) -> Any:
            self.step = number
            return step(run, number)

        patch.setattr(loop.RolloutLoop, "step", counted)
        for thing, method in {(loss[0], loss[1]): None for loss in LOSSES}:
            patch.setattr(thing, method, self.around(thing, method))

    def around(self, thing: Any, method: str) -> Any:
        original = getattr(thing, method)

        def called(this: Any, *args: Any, **options: Any) -> Any:
            at = self.step
            strikes = 0 <= at < len(LOSSES) and LOSSES[at][:2] == (thing, method) and not self.struck[at]
            if strikes:
                self.struck[at] = True
                kill(LOSSES[at][2](this))
            found = original(this, *args, **options)
            if strikes:
                kill(LOSSES[at][3](this))
            return found

        return called


def kill(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_a_run_that_loses_processes_at_every_turn_is_one_that_loses_none(
    straight: Record, make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    striking = Striking(monkeypatch)
    config = make_run("struck", COLOCATED, run={"steps": STRUCK_STEPS})
    loop.train(config)
    assert record_of(config) == straight and all(striking.struck)
    assert len((config.run.dir / "recoveries.jsonl").read_text().splitlines()) == 4, "of ranks"
