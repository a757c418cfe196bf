"""`slimefsdp groups` lists the groups that answer, says what became of the others, and ends the one it is told."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError

from actors.cli.main import main
from actors.cluster import connect
from actors.workers import named_group
from actors.workers.named_group import NAMESPACE, GroupStatus, ask, host_of
from slimefsdp.errors import ResourceError, StateError, WorkerDied
from tests.support.refusals import refused
from tests.support.scripted_ray import NEVER, Actor, ScriptedRay, script_ray

STATE = StateError.exit_code
READY = GroupStatus("policy", "ready", "/models/a", 1, 0.0, None)
BUSY = GroupStatus(
    "other",
    "launching",
    "/models/b",
    8,
    0.0,
    "/runs/b",
    7,
    3,
    2,
    ("train_step", "save"),
    "host:1",
    ("host:2", "host:3"),
)


class Cluster(ScriptedRay):
    """The named groups of a cluster; `joined` has the addresses that were joined and whether each was left again."""

    def __init__(self) -> None:
        super().__init__()
        self.joined: list[list[Any]] = []

    def join(self, address: str, *, allow_without_token: bool) -> None:
        self.joined.append([address, allow_without_token, "joined"])

    def disconnect(self) -> None:
        self.joined[-1][-1] = "left"

    def has(self, name: str, **script: Any) -> Actor:
        self.actors[NAMESPACE, name] = Actor(**script)
        return self.actors[NAMESPACE, name]


@pytest.fixture
def cluster_of(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    script_ray(monkeypatch, [named_group], clocks=[named_group], scripted=made)
    for name in ("join", "disconnect"):
        monkeypatch.setattr(connect, name, getattr(made, name))
    monkeypatch.setattr(ray, "kill", made.kill)
    return made


def run(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> tuple[str, str]:
    assert main(["groups", *words]) == status
    found = capsys.readouterr()
    return found.out, found.err


def test_groups_that_do_not_answer_are_listed_beside_those_that_do(
    cluster_of: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "list")[0] == "no named groups in this cluster\n"
    launched = time.time() - 90 * 60
    ready, busy = (GroupStatus(**{**asdict(one), "launched": launched}) for one in (READY, BUSY))
    cluster_of.has("policy", status=[ready] * 2)
    cluster_of.has("other", status=[busy] * 2)
    cluster_of.has("gone", status=[ActorDiedError()] * 2)
    cluster_of.has("silent", status=[NEVER] * 2)
    cluster_of.actors["another namespace", "elsewhere"] = Actor()
    text, _ = run(capsys, "list", "--address", "10.0.0.1:6379", "--allow-without-token")
    assert cluster_of.joined[-1] == ["10.0.0.1:6379", True, "left"]
    gone, other, *more = text.splitlines()
    assert gone.startswith("gone: the process of the group gone has ended") and "elsewhere" not in text
    assert other == "other: launching, 8 ranks for 90 min, 2 recoveries"
    assert [line.split(maxsplit=1) for line in more[:6]] == [
        ["model", "/models/b"], ["updates", "7; last checkpoint: step 3"], ["run.dir", "/runs/b"],
        ["calls", "train_step, save"], ["writer", "host:1"], ["readers", "host:2, host:3"],
    ]  # fmt: skip
    assert [line.split(maxsplit=1)[1] for line in more[8:13]] == [
        "no answer of rank 0; last checkpoint: none since the launch",
        *["none"] * 4,
    ]
    assert more[13].startswith("silent: ") and "has not answered status for 30 s" in more[13]
    found = json.loads(run(capsys, "list", "--json")[0])
    assert found["policy"] == {**asdict(ready), "calls": [], "readers": []}
    assert list(found) == ["gone", "other", "policy", "silent"] and list(found["gone"]) == ["error"]


@pytest.mark.parametrize("words", [("list", "policy"), ("stop", "policy"), ("stop", "policy", "--force")])
def test_a_group_that_is_named_and_not_there_is_an_error_and_the_cluster_is_left(
    words: tuple[str, ...], cluster_of: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster_of.has("b")
    cluster_of.has("a")
    _, error = run(capsys, *words, status=STATE)
    assert "there is no group 'policy' in this cluster; its groups: a, b" in error
    assert cluster_of.joined == [["auto", False, "left"]] and cluster_of.killed == []


@pytest.mark.parametrize("words", [("list", "a/b"), ("stop", "a/b")])
def test_what_is_no_name_is_refused_before_a_cluster_is_joined(
    words: tuple[str, ...], cluster_of: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "'a/b'" in run(capsys, *words, status=2)[1] and cluster_of.joined == []


def test_one_group_that_is_named_is_listed_alone_and_its_error_is_the_commands(
    cluster_of: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster_of.has("other")
    cluster_of.has("policy", status=[READY, StateError("it is being launched", field="name", hint="wait")])
    assert run(capsys, "list", "policy")[0].startswith("policy: ready, 1 ranks")
    assert "it is being launched" in run(capsys, "list", "policy", status=STATE)[1]
    assert [one[-1] for one in cluster_of.joined] == ["left", "left"]


def test_a_group_is_stopped_in_order_or_at_once(cluster_of: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    writer = StateError("host:1 writes to it", field="write", hint="--force")
    host = cluster_of.has("policy", stop=[writer, None])
    assert "host:1 writes to it" in run(capsys, "stop", "policy", status=STATE)[1] and cluster_of.killed == []
    assert run(capsys, "stop", "policy")[0] == "policy has ended\n"
    assert cluster_of.killed == [host] and host.calls == [("stop", (None,))] * 2
    host = cluster_of.has("policy", stop=[ActorDiedError()])
    assert run(capsys, "stop", "policy")[0] == "policy has ended\n"
    assert host not in cluster_of.killed, "it had ended by itself"
    assert run(capsys, "stop", "policy", "--force")[0] == "policy has ended\n"
    assert cluster_of.killed[-1] is host and host.names() == ["stop"]
    assert {one[-1] for one in cluster_of.joined} == {"left"}


def test_what_a_host_answers_is_an_answer_or_a_typed_error_that_names_the_group(cluster_of: Cluster) -> None:
    full = ResourceError("the disk is full", field="run.dir", hint="make room")
    answers = [3, full, KeyError("a defect"), ActorUnavailableError("the network", b"0" * 16), ActorDiedError(), NEVER]
    cluster_of.has("policy", save=answers)
    host = host_of("policy")
    assert ask(host, "policy", "save", 1) == 3 and host.calls == [("save", (1,))]
    with refused(ResourceError, "run.dir", "the disk is full"):
        ask(host, "policy", "save")
    with pytest.raises(ray.exceptions.RayTaskError, match="a defect"):
        ask(host, "policy", "save")
    with refused(StateError, "name", "policy", "whether it did save is not known"):
        ask(host, "policy", "save")
    with refused(WorkerDied, None, "the process of the group policy has ended") as ended:
        ask(host, "policy", "save")
    assert ended.value.call == "save"
    with refused(StateError, "name", "has not answered save", 7) as silent:
        ask(host, "policy", "save", within_s=7.0)
    assert "stop policy --force" in str(silent.value.hint)
