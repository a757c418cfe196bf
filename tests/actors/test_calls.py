"""Waiting for several actors: one deadline, and of several failures the one that caused the others.

And of the source: nothing in it waits without a deadline.
"""

from __future__ import annotations

import ast
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.calls import GRACE_S, CallFuture
from actors.train_worker import EXIT_AFTER_S
from slimefsdp.errors import BatchError, PeerFailed, WorkerDied, WorkerHung


@pytest.fixture
def rank_pair(cluster: None) -> Iterator[list[Any]]:
    """Two processes without torch that do as they are told."""

    class Rank:  # defined here, so that it travels by value and the processes need not import this file
        def act(self, seconds: float = 0.0, error: Exception | None = None, dies: bool = False) -> float:
            import os
            import time

            time.sleep(seconds)
            if dies:
                os._exit(1)
            if error is not None:
                raise error
            return seconds

    actors = [ray.remote(Rank).options(num_cpus=0).remote() for _ in range(2)]
    ray.get([actor.act.remote() for actor in actors], timeout=60)
    yield actors
    for actor in actors:
        ray.kill(actor)


def call(actors: list[Any], *actions: dict[str, Any], timeout_s: float = 30.0, **options: Any) -> CallFuture:
    refs = [actor.act.remote(**action) for actor, action in zip(actors, actions, strict=True)]
    return CallFuture(refs, name="act", timeout_s=timeout_s, **{"first_only": False, **options})


def test_results_come_in_rank_order_whoever_is_first(rank_pair: list[Any]) -> None:
    assert call(rank_pair, {"seconds": 0.3}, {}).result() == [0.3, 0.0]
    assert call(rank_pair, {"seconds": 0.3}, {}, first_only=True).result() == 0.3


def test_one_deadline_holds_for_all_and_the_late_rank_is_named(rank_pair: list[Any]) -> None:
    started = time.monotonic()
    with pytest.raises(WorkerHung, match=r"act did not finish within 0\.5 s") as hung:
        call(rank_pair, {}, {"seconds": 5.0}, timeout_s=0.5).result()
    assert time.monotonic() - started < 3
    assert (hung.value.rank, hung.value.phase, hung.value.field) == (1, "act", "cluster.call_timeout_s")
    with pytest.raises(WorkerHung) as renumbered:
        call(rank_pair[1:], {"seconds": 5.0}, timeout_s=0.5, first_rank=7).result()
    assert renumbered.value.rank == 7


def test_a_timeout_that_began_earlier_ends_earlier(rank_pair: list[Any]) -> None:
    before = time.monotonic()
    with pytest.raises(WorkerHung, match="did not finish within 20 s"):
        call(rank_pair, {}, {"seconds": 5.0}, timeout_s=20.0, began=before - 19.5).result()
    assert time.monotonic() - before < 4


def test_a_failure_does_not_wait_for_ranks_that_hang(rank_pair: list[Any]) -> None:
    started = time.monotonic()
    with pytest.raises(BatchError, match="bad tokens") as failed:
        call(rank_pair, {"seconds": 20.0}, {"error": BatchError("bad tokens", field="tokens", hint="drop it")}).result()
    assert time.monotonic() - started < GRACE_S + 3
    assert GRACE_S >= EXIT_AFTER_S + 2, "a failed rank's peers are heard after its end"
    assert (type(failed.value), failed.value.field, failed.value.hint) == (BatchError, "tokens", "drop it")


LOST = PeerFailed("another rank is gone: [gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (LOST, ValueError("the cause")),
        (LOST, BatchError("the cause")),
        (LOST, ConnectionResetError("the cause, a judge: Connection reset by peer")),
        (KeyError("a"), BatchError("the cause")),
    ],
    ids=["lost peer, untyped", "lost peer, typed", "lost peer, a user's lost connection", "untyped, typed"],
)
def test_the_cause_is_reported_though_its_consequence_arrives_first(
    rank_pair: list[Any], first: Exception, second: Exception
) -> None:
    with pytest.raises(type(second), match="the cause"):
        call(rank_pair, {"error": first}, {"seconds": 0.5, "error": second}).result()


def test_a_death_explains_everything_else(rank_pair: list[Any]) -> None:
    with pytest.raises(WorkerDied, match="rank 1 ended during act") as died:
        call(rank_pair, {"error": BatchError("odd")}, {"seconds": 0.5, "dies": True}).result()
    assert (died.value.rank, died.value.phase) == (1, "act")
    assert died.value.others == ("rank 0: BatchError: odd",)
    with pytest.raises(WorkerDied) as still:
        call(rank_pair, {}, {}).result()
    assert still.value.rank == 1


def test_a_death_is_reported_at_once_though_others_hang(rank_pair: list[Any]) -> None:
    future = call(rank_pair, {"seconds": 20.0}, {"seconds": 1.0, "dies": True})
    started = time.monotonic()
    with pytest.raises(WorkerDied, match="rank 1 ended during act"):
        future.result()
    assert 0.5 < time.monotonic() - started < 1.0 + 1.0


def test_what_other_ranks_said_goes_along_once_unless_it_is_the_same(rank_pair: list[Any]) -> None:
    with pytest.raises(BatchError) as alike:
        call(rank_pair, {"error": BatchError("odd")}, {"error": BatchError("odd")}).result()
    assert alike.value.others == ()
    with pytest.raises(BatchError) as lost:
        call(rank_pair, {"error": PeerFailed("rank 1 is gone")}, {"seconds": 0.5, "error": BatchError("odd")}).result()
    assert lost.value.others == ("rank 0: PeerFailed: rank 1 is gone",)
    assert "\n  also rank 0: PeerFailed" in str(lost.value)


def test_signals_are_handled_while_a_call_is_waited_for(rank_pair: list[Any]) -> None:
    future = call(rank_pair, {"seconds": 4.0}, {"seconds": 4.0})
    handled: list[float] = []
    before = signal.signal(signal.SIGALRM, lambda *_: handled.append(time.monotonic()))
    began = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        assert future.result() == [4.0, 4.0]
    finally:
        signal.signal(signal.SIGALRM, before)
    assert 0.5 <= handled[0] - began < 2.0


# ---------------------------------------------------------------------- the source

ROOT = Path(__file__).parents[2]
# calls that wait -> how many arguments they have when the last of them says for how long; None: only by its name
WAITS = {
    **dict.fromkeys(("ray.get", "ray.wait", "communicate", "check_output", "check_call", "subprocess.run"), None),
    **dict.fromkeys(("create_connection", "init_process_group", "new_group", "TCPStore", "urlopen"), None),
    **dict.fromkeys(("wait", "join", "get", "result", "acquire"), 1),
    "select.select": 4,
}
SAYS_HOW_LONG = {"timeout", "timeout_s", "timeout_seconds", "blocking"}
WAITS_WITHOUT = {
    "actors/calibrate_command.py: found.get()": "all who could put something there have ended",
    "slimefsdp/attention/all_gather.py: wire.exchange(outgoing, arriving).wait()": "as wire.py",
    "slimefsdp/attention/all_gather.py: wire.exchange([sent] * wire.size, fetched).wait()": "as wire.py",
    "slimefsdp/attention/ring.py: returning.wait()": "as wire.py",
    "slimefsdp/attention/ring.py: transfer.wait()": "as wire.py",
    "slimefsdp/attention/wire.py: request.wait()": "the process group has a timeout",
    "slimefsdp/checkpoint/background.py: running.result()": "its thread waits for its process group alone",
    "slimefsdp/checkpoint/background.py: self._is_copied.wait()": "as the other one",
}
"""And why that is no wait without an end."""


def unbounded_waits(source: str) -> Iterator[str]:
    """Calls in a source that may wait forever, as far as one can read that."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        last = name.rpartition(".")[2]
        known = next((waits for waits in (name, last) if waits in WAITS), None)
        if known is None or {keyword.arg for keyword in node.keywords} & SAYS_HOW_LONG:
            continue
        enough = WAITS[known]
        if enough is None or len(node.args) < enough:
            yield ast.unparse(node)


def test_a_wait_without_a_deadline_is_found() -> None:
    for waits in ("ray.get(x)", "event.wait()", "queue.get()", "thread.join()", "lock.acquire()", "f(ray.wait(refs))"):
        assert list(unbounded_waits(waits)), waits
    for source in (
        "ray.get(x, timeout=5)",
        "event.wait(3)",
        "names.get(key)",
        "', '.join(names)",
        "lock.acquire(0)",
    ):
        assert not list(unbounded_waits(source)), source


def test_nothing_waits_without_a_deadline() -> None:
    files = sorted(file for package in ("actors", "slimefsdp") for file in (ROOT / package).rglob("*.py"))
    found = {
        f"{file.relative_to(ROOT)}: {wait}"
        for file in files
        for wait in unbounded_waits(file.read_text())
        # those of actors/ are of CallFuture, which has a deadline; the locks of folders do not wait
        if not (file.is_relative_to(ROOT / "actors") and wait.endswith(".result()"))
        and not wait.startswith("FolderLock(")
    }
    assert sorted(found - WAITS_WITHOUT.keys()) == []
    assert sorted(WAITS_WITHOUT.keys() - found) == [], "these are gone, or have a deadline now"
