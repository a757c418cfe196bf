"""Groups that outlive their program: one writes, others read, and whoever is killed costs no bit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from actors.fault_tolerance import group_host
from actors.fault_tolerance.group_host import GroupHost, launch_named
from actors.workers.group_calls import RankRequest, submit
from actors.workers.named_group import LEASE_S, NAMESPACE, Client, NamedGroup
from actors.workers.worker_group import WorkerGroup
from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError, ConfigError, ResourceError, StateError, WorkerDied
from slimefsdp.results import Health
from tests.support.module_script import found_by
from tests.support.refusals import refused
from tests.support.runs import bits
from tests.support.small_batches import settings
from tests.support.waiting import is_alive, wait_until

# ------------------------------------------------------------------ who may do what, told without ranks


class Calls:
    """A job whose calls end at once."""

    failure = None
    recoveries = ()
    roles = ("actor",)

    def __init__(self) -> None:
        self.started: list[str] = []

    def submit(self, role: str, request: Any) -> Any:
        self.started.append(request.name)
        return self

    def result(self) -> str:
        return "done"

    def health(self, role: str, timeout_s: float) -> list[Any]:
        return [Health(0, 17, 5)]

    def shutdown(self) -> None:
        self.started.append("shutdown")


class Clock:
    """Of the host, which a test moves on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    time = staticmethod(time.time)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(group_host, "time", found)
    return found


@pytest.fixture
def host(clock: Clock) -> GroupHost:
    found = GroupHost("policy", settings())
    found._job = Calls()  # type: ignore[assignment]
    return found


def request(name: str) -> RankRequest:
    return RankRequest(name, {"step": 0})


def test_one_program_writes_and_others_read(host: GroupHost) -> None:
    writer, other, reader = Client("a", "one:1", True), Client("b", "two:2", True), Client("c", "three:3", False)
    host.attach(writer)
    with refused(StateError, "write", "policy", "one:1"):
        host.attach(other)
    host.attach(reader)
    for name in (
        "train_step",
        "forward_backward",
        "optimizer_step",
        "zero_grad",
        "load",
        "save",
        "update_ref",
        "sleep",
    ):
        with refused(StateError, "write", name, "one:1"):
            host.begin("c", "actor", request(name))
    assert host._job.started == []  # type: ignore[union-attr]
    for client, name in (("c", "compute_log_probs"), ("a", "train_step"), ("c", "export_hf")):
        assert host.result(host.begin(client, "actor", request(name))) == "done"
    status = host.status()
    assert (status.state, status.writer, status.readers) == ("ready", "one:1", ("three:3",))
    host.detach("a")
    host.attach(other)
    with refused(StateError, "write", "two:2"):
        host.begin("a", "actor", request("train_step"))


def test_a_writer_that_is_silent_keeps_its_place_until_another_comes(host: GroupHost, clock: Clock) -> None:
    writer, other = Client("a", "one:1", True), Client("b", "two:2", True)
    host.attach(writer)
    clock.now += LEASE_S - 1
    with refused(StateError, "write", "one:1"):
        host.attach(other)
    host.renew(writer)
    clock.now += LEASE_S + 1
    host.begin("a", "actor", request("train_step"))  # it was away, and nobody came
    host.renew(writer)
    with refused(StateError, "write", "one:1"):
        host.attach(other)
    clock.now += LEASE_S + 1
    host.attach(other)
    host.renew(writer)
    with refused(StateError, "write", "two:2"):
        host.begin("a", "actor", request("train_step"))
    host.begin("b", "actor", request("train_step"))


def test_answers_of_a_program_that_is_gone_are_forgotten_and_its_calls_are_done(host: GroupHost, clock: Clock) -> None:
    writer = Client("a", "one:1", True)
    host.attach(writer)
    for _ in range(3):
        host.begin("a", "actor", request("train_step"))
    clock.now += LEASE_S + 1
    host.attach(Client("b", "two:2", True))
    assert len(host._open_calls) == 3  # it may come back
    clock.now += group_host._KEPT_S
    host.attach(Client("c", "three:3", False))
    assert not host._open_calls and host._job.started == ["train_step"] * 3  # type: ignore[union-attr]
    with refused(StateError, "name", "policy"):
        host.result(0)


def test_a_group_ends_by_its_writer_or_where_nobody_writes(host: GroupHost) -> None:
    host.attach(Client("a", "one:1", True))
    host.attach(Client("c", "three:3", False))
    for other, field in (("c", "write"), (None, "name")):
        with refused(StateError, field, "one:1"):
            host.stop(other)
    host.stop("a")
    assert host._job.started == ["shutdown"]  # type: ignore[union-attr]
    with refused(StateError, "name", "policy"):
        host.begin("a", "actor", request("train_step"))
    with refused(StateError, "name", "policy"):
        host.attach(Client("d", "four:4", False))


def test_a_group_that_is_not_there_yet_or_not_any_more_lets_nobody_in_and_says_why(
    host: GroupHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = GroupHost("policy", settings())
    assert new.status().state == "launching"
    with refused(StateError, "name", "policy"):
        new.attach(Client("a", "one:1", True))

    def fails(_: RunConfig) -> Any:
        raise ResourceError("too small", field="mesh.dp", hint="use fewer")

    monkeypatch.setattr(group_host, "Supervisor", fails)
    with refused(ResourceError, "mesh.dp"):
        new.launch()
    host._job.failure = WorkerDied("gone", hint="look")  # type: ignore[union-attr, misc]
    for ended, why in ((new, "too small"), (host, "gone")):
        assert ended.status().state.startswith("ended by") and why in ended.status().state
        with refused(StateError, "name", "policy", why):
            ended.attach(Client("a", "one:1", False))


def test_who_has_left_is_not_heard_of_again_and_its_calls_keep_their_answers(host: GroupHost) -> None:
    writer = Client("a", "one:1", True)
    host.attach(writer)
    ticket = host.begin("a", "actor", request("train_step"))
    host.detach("a")
    host.renew(writer)  # sent before, and late
    assert (host.status().writer, host.status().readers) == (None, ())
    assert host.result(ticket) == "done"


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a b", "-a", "x" * 101, 7, None])
def test_what_cannot_be_a_name_is_refused_before_a_cluster_is_looked_for(name: Any) -> None:
    for attempt in (lambda: WorkerGroup.attach(name), lambda: launch_named(settings(), name)):
        with refused(ConfigError, "name"):
            attempt()


# ------------------------------------------------------------------ with ranks


@pytest.fixture(scope="module")
def config(make_config: Any, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    tree = make_config(
        run={"dir": str(tmp_path_factory.mktemp("named"))},
        batch={"samples_per_update": 6},
        loss={"kl_coefficient": 0.2},
        reference={"dp": 1},
        advantage={"estimator": "gae"},
    ).model_dump(exclude_unset=True)
    return config_from_dict({**tree, "algorithm": "ppo"})


def launched(config: RunConfig, name: str) -> NamedGroup:
    """In a cluster that ends with the tests, as no program's may."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_host, "require_lasting_cluster", lambda: None)
        return launch_named(config, name)


@pytest.fixture(scope="module")
def named(cluster: None, config: RunConfig) -> Iterator[NamedGroup]:
    group = launched(config, "policy")
    yield group
    assert group.critic is not None
    group.critic.shutdown()  # which is the actor's
    assert group.status().state == "ready"
    group.shutdown()
    with refused(StateError, "name", "policy"):
        submit(group.memory)


def test_every_call_has_the_bits_that_it_has_on_a_group_of_ones_own(
    named: NamedGroup, config: RunConfig, batch: RolloutBatch, tmp_path: Path
) -> None:
    own = WorkerGroup.launch(config.model_copy(update={"run": config.run.model_copy(update={"dir": tmp_path})}))
    found: list[Any] = []
    for group in (own, named):
        critic, reference = group.critic, group.reference_group
        assert critic is not None and reference is not None
        futures = [submit(reference.compute_log_probs, batch, "ref"), submit(critic.compute_values, batch)]
        reference_log_probs, values = (future.result() for future in futures)
        work = batch.replace(values=values)
        steps = [submit(group.train_step, work), submit(critic.train_step, work), submit(group.train_step, work)]
        metrics = [bits(step.result()) for step in steps]
        saved = group.save(3, {"cursor": 1})
        after = group.compute_log_probs(batch).log_probs
        group.update_ref()
        updated = reference.compute_log_probs(batch, "ref").log_probs
        group.save(4)
        for step, expected in ((3, reference_log_probs.log_probs), (4, updated)):
            group.load(step)
            assert np.array_equal(reference.compute_log_probs(batch, "ref").log_probs, expected)
        assert not np.array_equal(updated, reference_log_probs.log_probs)
        memory = [one.rank for one in group.health()]
        found.append((reference_log_probs.log_probs, values, metrics, saved.name, after, memory, group.describe()))
    own.shutdown()
    for ours, theirs in zip(*found, strict=True):
        if isinstance(ours, np.ndarray):
            assert np.array_equal(ours, theirs)
        else:
            assert ours == theirs
    assert len(named.receivers) == 2 and named.config.ranks == 2
    assert named.status().saved_step == 4


def test_bad_input_is_refused_where_the_call_is_made(named: NamedGroup, batch: RolloutBatch) -> None:
    with refused(BatchError, "tokens"):
        submit(named.train_step, batch.replace(tokens=batch.tokens + 100_000))
    with refused(StateError, "name", "'nobody'", "policy"):
        WorkerGroup.attach("nobody")
    with refused(StateError, "name", "policy"):
        launched(named.config, "policy")
    with refused(ResourceError, "cluster.address"):
        launch_named(named.config, "other")
    with WorkerGroup.attach("policy") as reader:
        with refused(StateError, "write"):
            submit(reader.train_step, batch)
        with refused(StateError, "write"):
            reader.shutdown()
        assert reader.compute_log_probs(batch).log_probs.shape == (batch.num_response_tokens,)
    with refused(StateError, "name", "detach"):
        submit(reader.compute_log_probs, batch)


def test_when_its_process_is_killed_the_ranks_end_and_callers_are_told(
    cluster: None, make_config: Any, batch: RolloutBatch
) -> None:
    group = launched(make_config(), "doomed")
    pids = [one.pid for one in group.health()]  # type: ignore[union-attr]
    future = submit(group.train_step, batch)
    ray.kill(ray.get_actor("doomed", namespace=NAMESPACE))
    with pytest.raises(WorkerDied, match="doomed"):
        future.result()
        group.train_step(batch)
    assert wait_until(lambda: not any(map(is_alive, pids)))


def test_a_group_outlives_its_program_and_who_goes_on_has_the_same_bits(tmp_path: Path) -> None:
    found = found_by("tests.support.named_groups", str(tmp_path))
    assert found["launcher"] == -9
    assert found["taken over"] in ("write", "at once")
    assert found["updates"] == 4  # also those of the call that nobody waited for
    assert found["norms"] == [found["expected"][step] for step in (0, 2, 3)] and len(set(found["expected"])) == 4
    assert found["read"] == found["expected read"]
    status = found["status"]
    assert (status["state"], status["ranks"], status["updates"]) == ("ready", 2, 8)
    assert (status["saved_step"], status["recoveries"], status["calls"]) == (1, 1, [])
    assert status["writer"] is not None and len(status["readers"]) == 1
    assert "error [state]" in found["stopped while written"] and status["writer"] in found["stopped while written"]
    assert found["behind one that ended"] == "at once"
    assert found["stopped"] == "policy has ended\n" and found["ended"]
