"""Waiting for several actors: one deadline, and of several failures the one that caused the others.

And of the source: nothing in it waits without a deadline.
"""

from __future__ import annotations

import ast
import signal
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from actors.cluster import ray_errors
from actors.workers import futures as workers_futures
from actors.workers.futures import GRACE_S, CallFuture, CallQueue, Dispatcher
from actors.workers.train_worker import EXIT_AFTER_S
from slimefsdp.errors import BatchError, PeerFailed, ResourceError, WorkerDied, WorkerHung
from tests.support.refusals import refused
from tests.support.waiting import PATIENCE_S, wait_until

HOUR = 3600.0  # longer than any test may take


@pytest.fixture
def rank_pair(cluster: None) -> Iterator[list[Any]]:
    """Two processes without torch that do as they are told."""

    class Rank:  # defined here, so that it travels by value and the processes need not import this file
        def act(
            self, seconds: float = 0.0, error: Exception | None = None, dies: bool = False, until: str | None = None
        ) -> float:
            import os
            import time
            from pathlib import Path

            while until is not None and not Path(until).exists():
                time.sleep(0.02)
            time.sleep(seconds)
            if dies:
                os._exit(1)
            if error is not None:
                raise error
            return seconds

    actors = [ray.remote(Rank).options(num_cpus=0).remote() for _ in range(2)]
    ray.get([actor.act.remote() for actor in actors], timeout=PATIENCE_S)
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
    # the first rank has the whole deadline to answer, on a busy machine too
    with refused(WorkerHung, "cluster.call_timeout_s", "act", 4) as hung:
        call(rank_pair, {}, {"seconds": HOUR}, timeout_s=4.0).result()
    assert (hung.value.rank, hung.value.call) == (1, "act")
    with pytest.raises(WorkerHung) as renumbered:
        call(rank_pair[1:], {"seconds": HOUR}, timeout_s=0.5, first_rank=7).result()
    assert renumbered.value.rank == 7


def test_a_failure_does_not_wait_for_ranks_that_hang(rank_pair: list[Any]) -> None:
    error = BatchError("bad tokens", field="tokens", hint="drop it")
    hangs, fails = rank_pair[0].act.remote(seconds=HOUR), rank_pair[1].act.remote(error=error)
    with pytest.raises(BatchError, match="bad tokens") as failed:
        CallFuture([hangs, fails], name="act", timeout_s=HOUR, first_only=False).result()
    assert ray.wait([hangs], timeout=0) == ([], [hangs])
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
    with pytest.raises(WorkerDied) as died:
        call(rank_pair, {"error": BatchError("odd")}, {"seconds": 0.5, "dies": True}).result()
    assert (died.value.rank, died.value.call) == (1, "act")
    (other,) = died.value.others
    assert all(part in other for part in ("rank 0", "BatchError", "odd"))
    with pytest.raises(WorkerDied) as still:
        call(rank_pair, {}, {}).result()
    assert still.value.rank == 1


def test_a_death_is_reported_at_once_though_others_hang(rank_pair: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.workers.futures.GRACE_S", HOUR)  # nobody else's words are waited for
    hangs, dies = rank_pair[0].act.remote(seconds=HOUR), rank_pair[1].act.remote(seconds=0.5, dies=True)
    with pytest.raises(WorkerDied) as died:
        CallFuture([hangs, dies], name="act", timeout_s=HOUR, first_only=False).result()
    assert (died.value.rank, died.value.call) == (1, "act")
    assert ray.wait([hangs], timeout=0) == ([], [hangs])


def test_signals_are_handled_while_a_call_is_waited_for(rank_pair: list[Any], tmp_path: Path) -> None:
    handled = tmp_path / "handled"
    future = call(rank_pair, {"until": str(handled)}, {"until": str(handled)}, timeout_s=120.0)
    before = signal.signal(signal.SIGALRM, lambda *_: handled.touch())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        assert future.result() == [0.0, 0.0], "the ranks wait for what the handler does"
    finally:
        signal.signal(signal.SIGALRM, before)


# ---------------------------------------------------------------------- many ranks and long times, made up


class Ref:
    """An answer that is there from some time on; counts how often one is compared with another."""

    comparisons = 0

    def __init__(self, due: float, value: Any = None) -> None:
        self.due, self.value = due, value

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        Ref.comparisons += 1
        return self is other


class MadeUpRay:
    """What CallFuture asks of Ray and of the clock, where waiting takes no time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.looked_at = 0  # references, in all waits
        self.withheld: dict[int, int] = {}  # by reference, how often Ray does not hand it over
        monkeypatch.setattr(workers_futures, "ray", self)
        monkeypatch.setattr(workers_futures, "time", self)
        monkeypatch.setattr(workers_futures, "require_cluster", lambda: None)

    def monotonic(self) -> float:
        return self.now

    def wait(
        self, refs: list[Ref], *, num_returns: int, timeout: float, fetch_local: bool = True
    ) -> tuple[list[Ref], list[Ref]]:
        self.looked_at += len(refs)
        enough = sorted(ref.due for ref in refs)[num_returns - 1]
        self.now = max(self.now, min(enough, self.now + timeout))
        done = [ref for ref in refs if ref.due <= self.now][:num_returns]
        taken = {id(ref) for ref in done}
        return done, [ref for ref in refs if id(ref) not in taken]

    def get(self, ref: Ref, *, timeout: float) -> Any:
        assert ref.due <= self.now
        if self.withheld.get(id(ref), 0) > 0:
            self.withheld[id(ref)] -= 1
            self.now += timeout
            raise GetTimeoutError("made up")
        if isinstance(ref.value, Exception):
            raise ref.value
        return ref.value


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> MadeUpRay:
    return MadeUpRay(monkeypatch)


def queued(queue: CallQueue, name: str, *refs: Ref, **how: Any) -> CallFuture:
    return queue.begin(lambda: refs, name=name, timeout_s=HOUR, first_only=False, **how)


def test_waiting_for_a_thousand_ranks_takes_a_thousand_times_as_much_and_not_a_million(made_up: MadeUpRay) -> None:
    count, Ref.comparisons = 1024, 0
    refs = [Ref(made_up.now + 0.001 * ((7 * rank) % count), rank) for rank in range(count)]
    assert CallFuture(refs, name="act", timeout_s=HOUR, first_only=False).result() == list(range(count))
    assert made_up.looked_at <= 10 * count
    assert Ref.comparisons <= 10 * count


def test_the_time_that_a_call_waits_for_the_ones_before_it_is_not_its_own(made_up: MadeUpRay) -> None:
    queue, step_s = CallQueue(), 2400.0
    began = made_up.now
    futures = [queued(queue, "train_step", Ref(began + (n + 1) * step_s, n)) for n in range(4)]
    assert futures[3].result() == [3]
    assert [future.result() for future in futures] == [[0], [1], [2], [3]]


def test_a_call_that_hangs_behind_others_is_reported_after_its_own_time(made_up: MadeUpRay) -> None:
    queue, began = CallQueue(), made_up.now
    queued(queue, "train_step", Ref(began + 3000))
    behind = queued(queue, "save", Ref(began + 1e9))
    with pytest.raises(WorkerHung) as hung:
        behind.result()
    assert hung.value.call == "save"
    assert 3000 + HOUR <= made_up.now - began <= 3000 + HOUR + 1


def test_behind_a_call_that_hung_every_other_is_refused_at_once_until_that_one_ends(made_up: MadeUpRay) -> None:
    queue, began = CallQueue(), made_up.now
    hangs = queued(queue, "train_step", Ref(began, "well"), Ref(began + 5 * HOUR, "late"))
    behind = queued(queue, "save", Ref(began + 5 * HOUR), Ref(began + 5 * HOUR))
    with pytest.raises(WorkerHung) as first:
        behind.result()
    assert (first.value.call, first.value.rank, made_up.now - began) == ("train_step", 1, HOUR)
    started: list[str] = []
    for call_behind in (
        hangs.result,
        behind.result,
        lambda: queue.require_moving("memory"),
        lambda: queue.begin(lambda: started.append("memory") or [], name="memory", timeout_s=HOUR, first_only=True),
    ):
        with pytest.raises(WorkerHung) as again:
            call_behind()
        assert (again.value.call, again.value.rank) == ("train_step", 1)
        assert again.value.hint
    assert made_up.now - began == HOUR and not started, "nobody waits another time"
    made_up.now = began + 5 * HOUR
    queue.require_moving("memory")
    assert hangs.result() == ["well", "late"]
    assert queued(queue, "memory", Ref(made_up.now, 1)).result() == [1]


def test_an_answer_that_is_slow_to_be_handed_over_is_no_death(made_up: MadeUpRay) -> None:
    refs = [Ref(made_up.now, "a"), Ref(made_up.now, "b")]
    made_up.withheld[id(refs[1])] = 3
    assert CallFuture(refs, name="act", timeout_s=HOUR, first_only=False).result() == ["a", "b"]
    made_up.withheld[id(refs[1])] = 10**9
    began = made_up.now
    with pytest.raises(WorkerHung) as hung:
        CallFuture(refs, name="act", timeout_s=HOUR, first_only=False).result()
    assert (hung.value.rank, hung.value.call) == (1, "act") and hung.value.others
    assert made_up.now - began >= HOUR


def test_a_rank_that_waits_in_vain_for_what_it_is_to_take_is_no_death(made_up: MadeUpRay) -> None:
    cause = GetTimeoutError("no batch")
    failed = Ref(made_up.now, RayTaskError("act", "", cause).as_instanceof_cause())
    with pytest.raises(WorkerHung) as hung:
        CallFuture([Ref(made_up.now, 1), failed], name="act", timeout_s=HOUR, first_only=False).result()
    assert (hung.value.rank, hung.value.call) == (1, "act") and "no batch" in hung.value.message


def raised(error: Exception) -> RayTaskError:
    """As Ray hands over what a rank raised."""
    found: RayTaskError = RayTaskError("act", "", error).as_instanceof_cause()
    return found


def no_memory(*, ends_rank: bool) -> ResourceError:
    error = ResourceError("out of memory")
    error.ends_rank = ends_rank
    return error


@pytest.mark.parametrize(
    ("error", "kind", "ends_rank"),
    [
        (ray.exceptions.ActorDiedError(), WorkerDied, True),
        (raised(KeyError("a bug")), KeyError, True),
        (raised(no_memory(ends_rank=True)), ResourceError, True),
        (raised(GetTimeoutError("no batch")), WorkerHung, True),
        (raised(no_memory(ends_rank=False)), ResourceError, False),
        (raised(BatchError("odd")), BatchError, False),
        (raised(PeerFailed("rank 0 is gone")), PeerFailed, False),
        (ray.exceptions.OutOfDiskError("for the answer"), ResourceError, False),
    ],
    ids=["died", "a bug", "no memory", "no batch", "no memory, as all agreed", "bad input", "a lost peer", "no room"],
)
def test_peers_of_a_rank_that_ends_and_no_others_abort_their_collectives(
    made_up: MadeUpRay, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception], ends_rank: bool
) -> None:
    monkeypatch.setattr(ray_errors, "cluster_is_gone", lambda: False)
    lost: list[list[int]] = []
    watchdog: Any = SimpleNamespace(look=lambda waiting: None, abort_collectives=lambda ranks: lost.append(list(ranks)))
    began, others = made_up.now, [Ref(made_up.now + HOUR) for _ in range(2)]
    refs = [others[0], Ref(began + 1.0, error), others[1]]
    with pytest.raises(kind):
        CallFuture(refs, name="act", timeout_s=HOUR, first_only=False, watchdog=watchdog).result()
    assert lost == [[1]] * ends_rank
    assert made_up.now - began <= 1.0 + GRACE_S


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
    "slimefsdp/estimate/calibrate.py: results.get()": "all who could put something there have ended",
    "actors/engines/child_server.py: started.wait()": "it has nothing to do but to leave",
    "actors/engines/child_server.py: server.wait()": "it was killed",
    "actors/rollout/collect.py: self._allowed.acquire()": "for a step, or the end of the run",
    "actors/rollout/collect.py: self._ready.get()": "for a thread that puts its batch there, or its error",
    "actors/engines/sampling_thread.py: self._thread.join()": "it ends after the token that it draws",
    "actors/engines/served_sampling.py: self._changed.wait()": "in a timeout",
    "actors/service/app.py: result.fetched.wait()": "in a timeout",
    "actors/service/runs.py: run.join()": "as training_run.py",
    "actors/service/samplers.py: self._idle.wait()": "for a sample in the engine, which ends at max_tokens",
    "actors/service/training_run.py: self._changed.wait()": "of a thread that has nothing else to do",
    "actors/service/training_run.py: self._thread.join()": "it is at a call of the group, which has a deadline",
    "actors/side_process.py: process.wait()": "it was killed",
    "slimefsdp/weight_sync/send.py: copy.result()": "for the device's own copy of a bucket",
    "slimefsdp/weight_sync/broadcast.py: work.wait()": "gloo's group has a timeout; NCCL's work is complete",
    "slimefsdp/attention/all_gather.py: comm.exchange(outgoing, arriving).wait()": "as comm.py",
    "slimefsdp/attention/all_gather.py: comm.exchange([sent] * comm.size, fetched).wait()": "as comm.py",
    "slimefsdp/attention/varlen.py: returning.wait()": "as comm.py",
    "slimefsdp/attention/varlen.py: transfer.wait()": "as comm.py",
    "slimefsdp/attention/cp_comm.py: request.wait()": "the process group has a timeout",
    "slimefsdp/checkpoint/save_load.py: running.result()": "its thread waits for its process group alone",
    "slimefsdp/checkpoint/save_load.py: self._is_copied.wait()": "as the other one",
}
"""And why that is no wait without an end."""


class Held:
    """A call that has begun, and ends when it is told to."""

    def __init__(self) -> None:
        self.is_over = False

    def has_ended(self) -> bool:
        return self.is_over


def test_lanes_take_turns_also_one_that_comes_later_and_each_keeps_its_order() -> None:
    dispatcher, begun = Dispatcher(), deque[tuple[str, Held]]()

    def begin(name: str) -> Held:
        held = Held()
        begun.append((name, held))
        return held

    for number in range(5):
        dispatcher.submit(lambda number=number: begin(f"a{number}"), "a")  # type: ignore[misc]
    wait_until(lambda: len(begun) == 2)  # more are not begun while none has ended
    for number in range(3):
        dispatcher.submit(lambda number=number: begin(f"b{number}"), "b")  # type: ignore[misc]
    last = dispatcher.submit(lambda: begin("c0"), "c")
    while len(begun) < 9:
        before = len(begun)
        next(held for _, held in begun if not held.is_over).is_over = True
        wait_until(lambda: len(begun) > before)  # noqa: B023
    assert [name for name, _ in begun] == ["a0", "a1", "a2", "b0", "c0", "a3", "b1", "a4", "b2"]
    assert last._started.result() is begun[4][1]


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
