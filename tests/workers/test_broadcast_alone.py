"""Whom a broadcast update blames and drops, by what the group and the engines say, with neither Ray nor sockets."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from ray.exceptions import ActorDiedError

from actors.engines.protocol import EngineInfo
from actors.workers import broadcast_update, futures, weight_update
from actors.workers.broadcast_update import BroadcastUpdate
from slimefsdp.errors import SyncError
from slimefsdp.weight_sync.broadcast import BroadcastError
from slimefsdp.weight_sync.send import BeginAgain
from tests.support.refusals import assert_refusal, refused
from tests.support.scripted_ray import NEVER, Actor, script_ray

TIMEOUT_S = 5.0  # of a clock that only waits move
CPU = torch.device("cpu")
BUCKET = [("weight", torch.arange(4.0))]
DIED, DEFECT = ActorDiedError(), KeyError("a defect")
ENGINES = 3


def of_group() -> SyncError:
    """What an engine raises that sees only that the group broke."""
    error = SyncError("the group broke", field="update_weights", hint="-")
    error.is_of_group = True
    return error


@dataclass
class Groups:
    """Stands for the groups of rank 0: how each attempt to form one ends, and each broadcast."""

    forms: list[Exception | None] = field(default_factory=list)
    broadcasts: list[Exception | None] = field(default_factory=list)
    made: list[Group] = field(default_factory=list)

    def of_kind(self, kind: str) -> Callable[..., Group]:
        def group(address: str, port: int, rank: int, world_size: int, *_: Any, listener: Any, **__: Any) -> Group:
            listener.close()
            ended = self.forms.pop(0) if self.forms else None
            if ended is not None:
                raise ended
            self.made.append(Group(self, kind, world_size))
            return self.made[-1]

        return group


@dataclass
class Group:
    groups: Groups
    kind: str
    world_size: int
    is_closed: bool = False

    def packed(self, bucket: Any) -> tuple[Any, torch.Tensor]:
        return "layout", bucket[0][1]

    def broadcast(self, flat: torch.Tensor) -> None:
        ended = self.groups.broadcasts.pop(0) if self.groups.broadcasts else None
        if ended is not None:
            raise ended

    def close(self) -> None:
        self.is_closed = True


def at_once(action: Callable[[], Any], name: str) -> Future[Any]:
    """In the place of a thread."""
    done: Future[Any] = Future()
    try:
        done.set_result(action())
    except BaseException as error:
        done.set_exception(error)
    return done


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Groups:
    sends = [weight_update, broadcast_update]
    script_ray(monkeypatch, [futures, *sends], clocks=sends)
    made = Groups()
    for name in ("BroadcastGroup", "TorchBroadcastGroup"):
        monkeypatch.setattr(broadcast_update, name, made.of_kind(name))
    for module in sends:
        monkeypatch.setattr(module, "in_thread", at_once)
    return made


def engine(processes: int = 1, group: Any = "slimefsdp", **script: Any) -> Actor:
    info = EngineInfo("engine", 9, "float32", None, ("broadcast",), processes, group)
    return Actor(**{"info": [info] * 9, **script})


def update_to(engines: list[Actor], **how: Any) -> BroadcastUpdate:
    return BroadcastUpdate(engines, TIMEOUT_S, address="127.0.0.1", device=CPU, **how)


def send(update: BroadcastUpdate) -> int:
    """Sends two buckets; returns how often the update was begun."""
    for begun in range(1, 9):
        try:
            update.begin(1, {"weight": (4,)})
            update.receive(BUCKET)
            update.receive(BUCKET)
            update.commit(1)
            return begun
        except BeginAgain:
            continue
    raise AssertionError("it begins again without an end")


TROUBLES: dict[str, tuple[Groups, dict[int, dict[str, list[Any]]], dict[int, str], int]] = {
    # how the group fares, what engines answer; who is dropped, with the field of its error, and how often it was begun
    "one raises while it joins": (
        Groups(forms=[BroadcastError("late", [2])]), {1: {"join": [DEFECT]}}, {1: "update_weights"}, 1
    ),
    "one dies while it joins": (
        Groups(forms=[BroadcastError("late", [2])]), {1: {"join": [DIED], "progress": [DIED]}},
        {1: "update_weights"}, 1,
    ),
    "one neither joins nor answers": (
        Groups(forms=[BroadcastError("late", [2])]), {1: {"join": [NEVER], "progress": [NEVER]}},
        {1: "cluster.sync_timeout_s"}, 1,
    ),
    "one that lives does not join": (
        Groups(forms=[BroadcastError("late", [3])]), {2: {"join": [NEVER]}}, {2: "cluster.sync_timeout_s"}, 1
    ),
    "the group does not form once": (Groups(forms=[BroadcastError("broke")]), {}, {}, 1),
    "one sees the group break twice": (
        Groups(), {1: {"receive_broadcast": [of_group(), of_group()]}}, {1: "update_weights"}, 3
    ),
    "a broadcast breaks once": (Groups(broadcasts=[BroadcastError("broke")]), {}, {}, 2),
    "one raises in a broadcast": (Groups(), {0: {"receive_broadcast": [None, DEFECT]}}, {0: "update_weights"}, 2),
    "one is lost when the update is announced": (
        Groups(), {2: {"begin": [DIED]}}, {2: "update_weights"}, 1
    ),
    "one cannot commit": (Groups(), {0: {"commit": [DEFECT]}}, {0: "update_weights"}, 1),
    "one does not say what it is": (Groups(), {0: {"info": [NEVER]}}, {0: "cluster.sync_timeout_s"}, 1),
}  # fmt: skip


@pytest.mark.parametrize("trouble", TROUBLES)
def test_who_is_at_fault_is_dropped_and_the_others_have_the_update(groups: Groups, trouble: str) -> None:
    script, answers, dropped, begun = TROUBLES[trouble]
    groups.forms, groups.broadcasts = list(script.forms), list(script.broadcasts)
    engines = [engine(**answers.get(index, {})) for index in range(ENGINES)]
    update = update_to(engines, drops=True)
    assert send(update) == begun
    assert {one.receiver: one.error.field for one in update.failed} == dropped
    for index, one in enumerate(engines):
        if index not in dropped:
            assert one.names()[-3:] == ["receive_broadcast", "receive_broadcast", "commit"]
    *earlier, last = groups.made
    assert all(group.is_closed for group in earlier) and groups.forms == [] == groups.broadcasts
    fails_at_the_end = trouble == "one cannot commit"
    assert last.is_closed == fails_at_the_end
    assert last.world_size == 1 + ENGINES - (0 if fails_at_the_end else len(dropped))


@pytest.mark.parametrize(
    ("forms", "answers", "field", "words"),
    [
        ([BroadcastError("broke")], {}, "update_weights", ["broadcast group broke", 5]),
        ([BroadcastError("broke")], {1: {"join": [of_group()]}}, "update_weights", ["the group broke"]),
        ([], {0: {"begin": [DEFECT]}}, "update_weights", ["begin failed at receiver 0", "a defect"]),
        ([], {0: {"commit": [NEVER]}}, "cluster.sync_timeout_s", ["receiver 0", "commit", 5]),
        ([], {1: {"receive_broadcast": [DIED]}}, "update_weights", ["receive_broadcast failed at receiver 1"]),
    ],
)
def test_where_no_engine_may_be_dropped_the_first_failure_is_the_error(
    groups: Groups, forms: list[Exception | None], answers: dict[int, Any], field: str, words: list[Any]
) -> None:
    groups.forms = forms
    update = update_to([engine(**answers.get(index, {})) for index in range(2)])
    with refused(SyncError, field, *words):
        send(update)
    assert update.failed == []


def test_a_group_that_never_forms_is_tried_once_more_and_costs_all_engines(groups: Groups) -> None:
    groups.forms = [BroadcastError("broke")] * 2
    update = update_to([engine(), engine()], drops=True)
    with pytest.raises(SyncError) as caught:
        send(update)
    assert_refusal(caught.value, SyncError, "update_weights", "broadcast group broke")
    assert [one.receiver for one in update.failed] == [0, 1] and len(caught.value.others) == 1
    assert groups.forms == []


def test_ranks_are_given_by_the_engines_processes_and_the_group_is_of_their_kind(groups: Groups) -> None:
    engines = [engine(2, "torch"), engine(3, "torch")]
    update = update_to(engines, checksums=True)
    assert send(update) == 1
    (group,) = groups.made
    assert (group.kind, group.world_size) == ("TorchBroadcastGroup", 6)
    joined = [next(args[0] for name, args in one.calls if name == "join") for one in engines]
    assert [(meeting.rank, meeting.world_size, meeting.backend) for meeting in joined] == [
        (1, 6, "gloo"),
        (3, 6, "gloo"),
    ]
    received = [args for name, args in engines[0].calls if name == "receive_broadcast"]
    assert len(received) == 2 and received[0][0] == "layout" and len(received[0]) == 2, "with its digest"


def test_the_group_is_used_again_for_the_same_engines_alone(groups: Groups) -> None:
    engines = [engine(), engine()]
    first = update_to(engines)
    send(first)
    second = update_to(engines, before=first)
    send(second)
    assert len(groups.made) == 1 and not groups.made[0].is_closed
    third = update_to(engines[:1], before=second)
    assert groups.made[0].is_closed
    send(third)
    assert groups.made[1].world_size == 2
    third.close()
    third.close()
    assert groups.made[1].is_closed


def test_an_address_that_is_not_this_machines_is_an_error_of_the_update(groups: Groups) -> None:
    update = BroadcastUpdate([engine()], TIMEOUT_S, address="203.0.113.1", device=CPU)
    with refused(SyncError, "update_weights", "203.0.113.1"):
        update.begin(1, {})
    assert groups.made == []
