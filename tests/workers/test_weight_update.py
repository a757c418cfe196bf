"""Receivers that fail in an update, by either transport: the others have it whole, and the failed one is named."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from actors.workers.broadcast_update import BroadcastUpdate
from actors.workers.disk_update import DiskUpdate
from actors.workers.transports import IpcUpdate
from actors.workers.watchdog import remote_class
from actors.workers.weight_update import ObjectStoreUpdate, WeightUpdate
from slimefsdp.errors import SyncError
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.weight_sync.send import BeginAgain
from tests.support.troubled_taker import TroubledTaker
from tests.support.waiting import PATIENCE_S

LATE_S = 8.0  # long enough for the others on a busy machine
LARGE = 8 * 2**20  # bytes of a bucket: no socket holds them for a process that does not read
BUCKETS = 3
TRANSPORTS = ["object_store", "broadcast"]  # in one of which a lost receiver is in the others' way
CPU = torch.device("cpu")
Launch = Callable[[int], list[Any]]


@pytest.fixture(scope="module")
def pool(cluster: None) -> Iterator[dict[int, Any]]:
    """Takers by pid, for one test after another."""
    takers: dict[int, Any] = {}
    yield takers
    for pid, taker in takers.items():
        end(pid, taker)


@pytest.fixture
def launch(pool: dict[int, Any]) -> Iterator[Launch]:
    """Takers as they are when they begin; those that met trouble are ended after the test."""

    def launched(count: int) -> list[Any]:
        new = [remote_class(TroubledTaker).options(num_cpus=0).remote() for _ in range(count - len(pool))]
        pool.update(zip(ray.get([taker.pid.remote() for taker in new], timeout=PATIENCE_S), new, strict=True))
        takers = list(pool.values())[:count]
        ray.get([taker.forget.remote() for taker in takers], timeout=PATIENCE_S)
        return takers

    yield launched
    for pid, taker in list(pool.items()):
        try:
            is_well = not is_stopped(pid) and not ray.get(taker.met_trouble.remote(), timeout=PATIENCE_S)
        except ray.exceptions.RayError:
            is_well = False
        if not is_well:
            end(pid, pool.pop(pid))


def end(pid: int, taker: Any) -> None:
    ray.kill(taker)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # one that is stopped


def is_stopped(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tT" in status.read_text()


def update_to(actors: list[Any], transport: str, timeout_s: float = PATIENCE_S, **how: Any) -> WeightUpdate:
    if transport == "object_store":
        how.pop("before", None)
        return ObjectStoreUpdate(actors, timeout_s, **how)
    if transport == "ipc":
        return IpcUpdate(actors, timeout_s, device=CPU, **how)
    return BroadcastUpdate(actors, timeout_s, address="127.0.0.1", device=CPU, **how)


def buckets(version: int) -> list[list[tuple[str, torch.Tensor]]]:
    return [[(f"tensor {place}", torch.full((LARGE // 4,), 10.0 * version + place))] for place in range(BUCKETS)]


def send(update: WeightUpdate, version: int) -> None:
    sent = buckets(version)
    manifest = {name: tuple(tensor.shape) for bucket in sent for name, tensor in bucket}
    while True:
        try:
            update.begin(version, manifest)
            for bucket in sent:
                update.receive(bucket)
            update.commit(version)
            return
        except BeginAgain:
            continue


def require_whole(actors: list[Any], version: int) -> None:
    wanted = {name: tensor for bucket in buckets(version) for name, tensor in bucket}
    for found, tensors in ray.get([actor.holds.remote() for actor in actors], timeout=PATIENCE_S):
        assert found == version and tensors.keys() == wanted.keys()
        assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("trouble", "call", "after"),
    [("is killed", "receive", 1), ("raises", "commit", 0)],
)
def test_the_others_have_the_update_whole_and_the_next_one_too(
    launch: Launch, transport: str, trouble: str, call: str, after: int
) -> None:
    actors = launch(3)
    ray.get(actors[1].plan.remote(call, after, trouble), timeout=PATIENCE_S)
    update = update_to(actors, transport, drops=True)
    send(update, 1)
    ((receiver, error),) = [(one.receiver, one.error) for one in update.failed]
    assert receiver == 1 and isinstance(error, SyncError) and error.field == "update_weights"
    left = [actors[0], actors[2]]
    require_whole(left, 1)
    following = update_to(left, transport, before=update, drops=True)
    send(following, 2)
    assert not following.failed
    require_whole(left, 2)


@pytest.mark.parametrize(
    ("trouble", "call", "after", "transport"),
    [
        ("is late", "begin", 0, "object_store"),
        ("is stopped", "receive", 1, "broadcast"),
    ],
)
def test_one_that_is_late_costs_the_others_time_alone(
    launch: Launch, trouble: str, call: str, after: int, transport: str
) -> None:
    actors = launch(3)
    ray.get(actors[1].plan.remote(call, after, trouble), timeout=PATIENCE_S)
    update = update_to(actors, transport, LATE_S, drops=True)
    send(update, 1)
    assert [one.receiver for one in update.failed] == [1]
    assert update.failed[0].error.field == "cluster.sync_timeout_s"
    require_whole([actors[0], actors[2]], 1)


def test_an_engine_that_is_killed_while_the_group_forms_is_dropped(launch: Launch) -> None:
    actors = launch(3)
    ray.get(actors[0].plan.remote("join", 0, "is killed"), timeout=PATIENCE_S)
    update = update_to(actors, "broadcast", drops=True)
    send(update, 1)
    assert [one.receiver for one in update.failed] == [0]
    require_whole(actors[1:], 1)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_where_all_fail_it_is_an_error_that_tells_of_all(launch: Launch, transport: str) -> None:
    actors = launch(2)
    ray.get([actor.plan.remote("receive", 0, how) for actor, how in zip(actors, ["raises", "is killed"], strict=True)])
    with pytest.raises(SyncError) as failed:
        send(update_to(actors, transport, drops=True), 1)
    assert "as planned for receive" in str(failed.value) and len(failed.value.others) == 1
    assert ray.get(actors[0].holds.remote(), timeout=PATIENCE_S)[0] is None


@pytest.mark.default_tier  # of all transports one, with two processes
def test_memory_that_is_shared_is_taken_over_by_the_next_update(launch: Launch) -> None:
    actors = launch(2)
    first = update_to(actors, "ipc", drops=True, checksums=True)
    send(first, 1)
    require_whole(actors, 1)
    following = update_to(actors, "ipc", before=first, drops=True, checksums=True)
    before = shared_memory()
    send(following, 2)
    require_whole(actors, 2)
    assert before and shared_memory() == before


def shared_memory() -> list[str]:
    """What this process has open of the kind that engines open by a handle."""
    links = []
    for one in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it was closed meanwhile
            links.append(str(one.readlink()))
    return sorted(link for link in links if "memfd:slimefsdp_" in link)


@pytest.mark.parametrize("call", ["commit"])
def test_of_folders_only_the_last_one_is_left_whoever_failed(
    launch: Launch, make_config: Any, tmp_path: Path, call: str
) -> None:
    actors, source = launch(2), read_model_folder(make_config().model.path)

    def update(**how: Any) -> DiskUpdate:
        return DiskUpdate(actors, PATIENCE_S, folder=tmp_path, source=source, dtype=torch.float32, **how)

    send(update(drops=True), 1)
    require_whole(actors, 1)
    (before,) = tmp_path.iterdir()
    ray.get(actors[1].plan.remote(call, 0, "raises"), timeout=PATIENCE_S)
    with pytest.raises(SyncError, match="as planned"):
        send(update(), 2)
    assert list(tmp_path.iterdir()) == [before], "what was not committed is gone"
    ray.get(actors[1].plan.remote(call, 0, "is killed"), timeout=PATIENCE_S)
    third = update(drops=True)
    send(third, 3)
    assert [one.receiver for one in third.failed] == [1]
    require_whole(actors[:1], 3)
    (left,) = tmp_path.iterdir()
    assert left != before


def test_what_was_altered_in_a_broadcast_costs_whoever_got_it_alone(
    launch: Launch,
) -> None:
    actors = launch(2)
    ray.get(actors[1].plan.remote("receive", 1, "flips a bit"), timeout=PATIENCE_S)
    update = update_to(actors, "broadcast", drops=True, checksums=True)
    send(update, 1)
    ((receiver, error),) = [(one.receiver, one.error) for one in update.failed]
    assert receiver == 1 and "altered on the way" in str(error)
    require_whole(actors[:1], 1)
