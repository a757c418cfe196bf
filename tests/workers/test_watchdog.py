"""Which process hangs, in what activity, and its stack: real processes that stop, hold their lock, loop or wait."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors.workers import watchdog, worker_group
from actors.workers.futures import CallFuture
from actors.workers.group_calls import RankRequest, submit
from actors.workers.train_worker import TrainWorker
from actors.workers.watchdog import Limits, Pulse, Waiting, Watchdog, Watched, write_stacks
from slimefsdp import heartbeat
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import WorkerHung
from slimefsdp.heartbeat import IDLE, LAUNCH, ProgressSnapshot
from tests.support.ray_fixtures import MakeConfig
from tests.support.refusals import names
from tests.support.waiting import PATIENCE_S, wait_until

LIMIT_S = 4.0  # without an answer, and without a tick
SEEN_S = 3.0  # in an activity before a fault: the watchdog asks once a second
LIMITS = Limits(ping_s=LIMIT_S, hang_s=LIMIT_S, sync_s=60.0)

# ---------------------------------------------------------------------- processes without torch


class FromElsewhere:
    """Ray, of which this process seems to be on a node of its own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(ray, name)

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "none of the cluster's")


def state_and_start(pid: int) -> tuple[str, int]:
    """The kernel's letter for what a process does, and when it started."""
    columns = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return columns[0], int(columns[19])


def guard_that_knows(*pulses: Pulse) -> Watchdog:
    """It has asked, and was answered so."""
    actors = [
        SimpleNamespace(progress=SimpleNamespace(remote=lambda pulse=pulse: ray.put(pulse)))  # type: ignore[misc]
        for pulse in pulses
    ]
    guard = Watchdog(actors, LIMITS)
    for _ in range(2):
        guard.look(Waiting(LAUNCH, range(len(actors)), time.monotonic()))
    return guard


@pytest.fixture(scope="module")
def processes(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """Two that keep stacks and do as they are told."""
    run_dir = tmp_path_factory.mktemp("run")

    class Process(Watched):  # defined here, so that it travels by value and the processes need not import this file
        def act(self, activity: str, pauses_s: list[float], fault: Callable[[], None] | None = None) -> int:
            with heartbeat.during(activity):
                for pause_s in pauses_s:
                    time.sleep(pause_s)
                    heartbeat.tick()
                if fault is not None:
                    fault()
            return os.getpid()

    actor = ray.remote(num_cpus=0, concurrency_groups={"control": 1})(Process)  # type: ignore[call-overload]
    started = [actor.remote() for _ in range(2)]
    ray.get([one.keep_stacks.remote(run_dir, f"rank_{i}") for i, one in enumerate(started)], timeout=PATIENCE_S)
    yield started
    for one in started:
        ray.kill(one)


def call(
    processes: list[Any], *actions: tuple[Any, ...], timeout_s: float = 60.0, guard: Watchdog | None = None
) -> CallFuture:
    refs = [process.act.remote(*action) for process, action in zip(processes, actions, strict=True)]
    guard = guard or Watchdog(processes, LIMITS)
    return CallFuture(refs, name="act", timeout_s=timeout_s, first_only=False, watchdog=guard)


def hang_of(future: CallFuture) -> tuple[WorkerHung, float]:
    """How a call hangs, and the time of it."""
    with pytest.raises(WorkerHung) as hung:
        future.result()
    return hung.value, time.time()


def end(processes: list[Any]) -> None:
    """Waits until faults are over and calls have ended: each process takes them in their order."""
    ray.get([process.act.remote("end", []) for process in processes], timeout=PATIENCE_S)


def since(file: Path, now: float) -> float:
    """Seconds since a fault wrote its time into a file."""
    return now - float(file.read_text())


def test_a_process_whose_interpreter_lock_is_held_writes_its_stack_all_the_same(
    processes: list[Any], tmp_path: Path
) -> None:
    began = tmp_path / "began"

    def holds_the_lock() -> None:
        import ctypes
        import time

        began.write_text(str(time.time()))
        ctypes.PyDLL(None).sleep(10)

    future = call(processes, ("hold", [SEEN_S], holds_the_lock), ("hold", [SEEN_S]))
    error, now = hang_of(future)
    assert (error.rank, error.call, error.field) == (0, "hold", "cluster.ping_timeout_s")
    assert since(began, now) >= LIMIT_S - 1
    assert error.stack is not None and "in holds_the_lock" in Path(error.stack).read_text()
    end(processes)


def test_one_that_has_not_come_up_is_named_and_not_the_others(processes: list[Any]) -> None:
    class Stuck(Watched):
        def __init__(self) -> None:
            time.sleep(60)

    actor = ray.remote(num_cpus=0, concurrency_groups={"control": 1})(Stuck)  # type: ignore[call-overload]
    both = [processes[0], actor.remote()]
    refs = [processes[0].act.remote("wait", [8.0]), both[1].keep_stacks.remote(None, "")]
    future = CallFuture(
        refs, name="launch", timeout_s=4.0, first_only=False, watchdog=Watchdog(both, LIMITS), first_rank=0,
        setting="cluster.launch_timeout_s",
    )  # fmt: skip
    error, _ = hang_of(future)
    ray.kill(both[1])
    assert (error.rank, error.call) == (1, "launch")
    assert error.field == "cluster.launch_timeout_s" and names(error.message, 4) and "rank 1" in error.message
    (other,) = error.others
    assert "rank 0" in other and "wait" in other


def test_a_short_call_asks_nobody_and_a_long_one_each_once_a_second(processes: list[Any]) -> None:
    questions: list[int] = []

    def counting(index: int, process: Any) -> Any:
        """A handle on a process that notes each question to it."""

        def remote() -> Any:
            questions.append(index)
            return process.progress.remote()

        return SimpleNamespace(progress=SimpleNamespace(remote=remote))

    guard = Watchdog([counting(*entry) for entry in enumerate(processes)], LIMITS)
    refs = [process.act.remote("quick", []) for process in processes]
    ray.wait(refs, num_returns=2, timeout=60)  # a busy machine makes no call long here
    quick = CallFuture(refs, name="act", timeout_s=60.0, first_only=False, watchdog=guard)
    assert len(quick.result()) == 2 and questions == []
    began = time.monotonic()
    call(processes, ("long", [1.0] * 3), ("long", []), guard=guard).result()
    seconds = time.monotonic() - began
    assert 2 * 2 <= len(questions) <= 2 * (seconds + 1)


def test_stacks_are_written_on_another_node_by_a_task_there(
    processes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "ray", FromElsewhere())
    error, _ = hang_of(call(processes, ("afar", [6.0]), ("afar", [6.0]), timeout_s=2.5))
    assert error.stack is not None and "in act" in Path(error.stack).read_text()
    assert "afar" in error.others[0]


def test_a_stopped_process_can_be_ended_at_once(cluster: None) -> None:
    actor = ray.remote(num_cpus=0, concurrency_groups={"control": 1})(Watched)  # type: ignore[call-overload]
    stopped, well = both = [actor.remote() for _ in range(2)]
    pulses = ray.get([one.progress.remote() for one in both], timeout=PATIENCE_S)
    os.kill(pulses[0].pid, signal.SIGSTOP)
    assert wait_until(lambda: state_and_start(pulses[0].pid)[0] == "T")
    earlier = replace(pulses[0], started=pulses[0].started - 1)  # another process with this pid
    guard_that_knows(earlier, pulses[1]).kill_stopped()
    assert state_and_start(pulses[0].pid)[0] == "T"
    guard_that_knows(*pulses).kill_stopped()
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(stopped.progress.remote(), timeout=PATIENCE_S)
    assert ray.get(well.progress.remote(), timeout=PATIENCE_S).pid == pulses[1].pid
    ray.kill(well)


def test_files_of_processes_that_did_not_hang_make_way(tmp_path: Path) -> None:
    folder = tmp_path / "stacks"
    folder.mkdir()
    for name in ("actor_rank_0.1.txt", "actor_rank_0.2.txt", "actor_rank_1.1.txt"):
        (folder / name).touch()
    (folder / "actor_rank_0.2.txt").write_text("Thread")
    Watched().keep_stacks(tmp_path, "actor_rank_0")
    kept = {file.name for file in folder.iterdir()}
    assert kept == {"actor_rank_0.2.txt", "actor_rank_1.1.txt", f"actor_rank_0.{os.getpid()}.txt"}
    os.kill(os.getpid(), signal.SIGUSR1)
    assert "in test_files_of_processes" in (folder / f"actor_rank_0.{os.getpid()}.txt").read_text()


def test_a_process_with_the_pid_of_one_that_is_gone_is_not_signalled(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        _, started = state_and_start(other.pid)
        (told,) = write_stacks([replace(pulse_of(other.pid, started - 1), stacks=str(tmp_path / "stacks.txt"))])
        assert told is not None and names(told, other.pid) and other.poll() is None
        # the control: the one that is meant gets the signal, which ends it
        write_stacks([replace(pulse_of(other.pid, started), stacks=str(tmp_path / "stacks.txt"))])
        assert other.wait(timeout=PATIENCE_S) == -signal.SIGUSR1


# ---------------------------------------------------------------------- judging, from answers made up


def pulse_of(pid: int, started: int) -> Pulse:
    return Pulse(at(0.0), pid, started, "node", None)


MADE_UP = Limits(ping_s=60.0, hang_s=10.0, sync_s=20.0)
NOBODY = 2**22 + 1  # a pid that Linux gives no process
Judge = Callable[..., list[int | None]]


class MadeUpRay:
    """What a Watchdog asks of Ray and of the clock, where time passes only when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(watchdog, "ray", self)
        monkeypatch.setattr(watchdog, "time", self)

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def wait(self, refs: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return [ref for ref in refs if ref.answer is not None], [ref for ref in refs if ref.answer is None]

    def get(self, ref: Any, *, timeout: float) -> Pulse:
        return ref.answer

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "node")


class Question:
    """A reference to an answer; one that never comes is None."""

    def __init__(self, answer: Pulse | None) -> None:
        self.answer = answer


def actor_that_answers(*answers: Pulse | None) -> Any:
    """Gives these answers, one after the other, and then the last one for good."""
    left = list(answers)
    return SimpleNamespace(progress=SimpleNamespace(remote=lambda: Question(left.pop(0) if left[1:] else left[0])))


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> MadeUpRay:
    return MadeUpRay(monkeypatch)


def blamed(guard: Watchdog, made_up: MadeUpRay, waiting: Waiting, *, until: float) -> list[int | None]:
    """Which rank is blamed while a call is waited for, with a look every half a second."""
    try:
        while made_up.now <= until:
            guard.look(waiting)
            made_up.now += 0.5
    except WorkerHung as error:
        return [error.rank]
    return []


@pytest.fixture
def judged(made_up: MadeUpRay) -> Judge:
    """`judged(*snapshots)` is which rank is blamed under MADE_UP limits when all answer a question of the call."""

    def judge(*snapshots: ProgressSnapshot, waiting: list[int] | None = None) -> list[int | None]:
        made_up.now = 100.0
        guard = Watchdog([actor_that_answers(Pulse(one, NOBODY, 1, "node", None)) for one in snapshots], MADE_UP)
        ranks = list(range(len(snapshots))) if waiting is None else waiting
        return blamed(guard, made_up, Waiting("train_step", ranks, began=50.0), until=101.0)

    return judge


def at(
    since_tick_s: float,
    *,
    activity: str = "p",
    ticks: int = 5,
    usual_gap_s: float | None = 0.1,
    waits: bool = False,
    collectives: int = 0,
) -> Any:
    return ProgressSnapshot(activity, ticks, since_tick_s, usual_gap_s, "somewhere", waits, collectives)


def test_a_rank_that_waits_for_a_stuck_one_is_not_blamed_though_it_is_still_for_longer(judged: Judge) -> None:
    assert judged(at(30, waits=True), at(11)) == [1]
    assert judged(at(30, waits=True), at(9)) == [], "the other one may yet get on"
    assert judged(at(30, waits=True), at(9, waits=True)) == []
    assert judged(at(30, ticks=6, waits=True), at(30, ticks=4, waits=True), at(12, waits=True)) == [1]
    assert judged(at(30, waits=True), at(0, activity=IDLE), waiting=[0]) == [0], "nobody else is in the call"


def test_where_no_frame_says_who_waits_the_rank_that_has_begun_fewest_collectives_is_blamed(judged: Judge) -> None:
    # as on NCCL: the host waits for the device, somewhere in the code of the step
    assert judged(at(30, collectives=7), at(12, collectives=7), at(30, collectives=6, ticks=9)) == [2]
    assert judged(at(30, collectives=7), at(30, collectives=7, ticks=4)) == [1]
    assert judged(at(30, collectives=6, waits=True), at(30, collectives=7)) == [1], "its frame says that it waits"


def test_activities_have_ten_times_as_long_as_they_usually_take_up_to_a_bound(judged: Judge) -> None:
    assert judged(at(11)) == [0]
    assert judged(at(9)) == []
    assert judged(at(99, usual_gap_s=10)) == []
    assert judged(at(101, usual_gap_s=10)) == [0]
    assert judged(at(699, usual_gap_s=600)) == [], "10 times that would be for too long"
    assert judged(at(701, usual_gap_s=600)) == [0]
    assert judged(at(1000, usual_gap_s=None)) == [], "the call's own deadline holds"
    assert judged(at(1000, activity=IDLE)) == judged(at(1000, activity=LAUNCH)) == []
    assert judged(at(15, activity="update_weights")) == [], "receivers are blamed first"
    assert judged(at(25, activity="update_weights")) == [0]


@pytest.mark.parametrize(("began", "expected"), [(40.0, [0]), (50.0, [])])
def test_an_answer_to_a_question_from_before_the_call_says_nothing(
    made_up: MadeUpRay, began: float, expected: list[int]
) -> None:
    made_up.now = 40.0
    guard = Watchdog([actor_that_answers(Pulse(at(30), NOBODY, 1, "node", None), None)], MADE_UP)
    assert blamed(guard, made_up, Waiting("train_step", [0], began=40.0), until=40.0) == [], "it is only asked"
    made_up.now = 50.0
    assert blamed(guard, made_up, Waiting("train_step", [0], began=began), until=51.0) == expected


@pytest.mark.parametrize(
    "answers", [[None], [Pulse(ProgressSnapshot(IDLE, 0, 0.0, None, "", False), 1, 1, "node", None), None]]
)
def test_silence_is_no_hang_in_a_launch_nor_in_a_call_that_is_younger_than_the_limit(
    made_up: MadeUpRay, answers: list[Pulse | None]
) -> None:
    def silent(call: str, began: float) -> list[int | None]:
        made_up.now = 10.0
        guard = Watchdog([actor_that_answers(*answers)], MADE_UP)
        return blamed(guard, made_up, Waiting(call, [0], began), until=100.0)

    assert silent("train_step", 10.0) == [0]
    assert silent("train_step", 50.0) == [], "the last one's may just have ended"
    assert silent(LAUNCH, 10.0) == []


def test_silence_counts_only_while_the_driver_listens(made_up: MadeUpRay) -> None:
    guard, waiting = Watchdog([actor_that_answers(None)], MADE_UP), Waiting("train_step", [0], began=0.0)
    assert blamed(guard, made_up, waiting, until=50.0) == []
    made_up.now += 500.0  # stopped itself, or busy with something else
    began = made_up.now
    with pytest.raises(WorkerHung) as hung:
        while True:
            guard.look(waiting)
            made_up.now += 0.5
    assert (hung.value.rank, hung.value.field) == (0, "cluster.ping_timeout_s")
    assert hung.value.seconds == made_up.now - began and 60.0 < hung.value.seconds <= 61.0


# ---------------------------------------------------------------------- a group of ranks, and an engine


@pytest.fixture(scope="module")
def faulty_group(cluster: None, make_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two ranks that can be given a fault before a micro-batch; every fault ends, and the group goes on."""

    class Faulty(TrainWorker):
        def inject(self, fault: Callable[[], None] | None) -> None:
            from slimefsdp.training import packs

            original = getattr(packs, "original", packs.evaluate)

            def evaluate(*args: Any, **kwargs: Any) -> Any:
                if fault is not None:
                    fault()
                return original(*args, **kwargs)

            packs.original, packs.evaluate = original, evaluate  # type: ignore[attr-defined]

    config = make_config(
        run={"dir": str(tmp_path_factory.mktemp("run"))},
        rollout={"engines": 1},
        cluster={"ping_timeout_s": LIMIT_S},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watchdog, "_HANG", 1.0)
        patch.setattr(worker_group, "TrainWorker", Faulty)
        group = worker_group.WorkerGroup.launch(config)
    yield group
    group.shutdown()


def well(group: Any) -> None:
    """Waits until calls have ended on both ranks, which take them in their order, and there is no fault."""
    ray.get([worker.inject.remote(None) for worker in group.receivers], timeout=PATIENCE_S)


@pytest.fixture
def measured_group(faulty_group: Any, small_batch: RolloutBatch) -> Any:
    """With both ranks well, and each activity of a step known to be quick."""
    step = submit(faulty_group.train_step, small_batch)
    while True:
        try:
            step.result()
            break
        except WorkerHung:  # on a busy machine; it goes on, and so does who waits for it
            pass
    well(faulty_group)
    return faulty_group


# faults of the first micro-batch, after some seconds in which the activity is seen; until a file is there


def stop_and_continue(began: Path, released: Path) -> Callable[[], None]:
    """By another process."""

    def fault() -> None:
        import os
        import subprocess
        import time

        if not began.exists():
            time.sleep(SEEN_S)
            began.write_text(str(time.time()))
            waiting = f"while [ ! -e {released} ]; do sleep 0.1; done"
            subprocess.Popen(["sh", "-c", f"kill -STOP {os.getpid()}; {waiting}; kill -CONT {os.getpid()}"])
            time.sleep(0.5)

    return fault


def loop(began: Path, released: Path) -> Callable[[], None]:
    def fault() -> None:
        import time

        if not began.exists():
            began.write_text(str(time.time()))
            while not released.exists():
                pass

    return fault


@pytest.mark.parametrize(("make_fault", "rank"), [(stop_and_continue, 1), (loop, 1)])
def test_the_rank_that_hangs_in_a_step_is_named_and_not_the_one_that_waits_for_it(
    measured_group: Any, small_batch: RolloutBatch, tmp_path: Path, make_fault: Any, rank: int
) -> None:
    began, released = tmp_path / "began", tmp_path / "released"
    ray.get(measured_group.receivers[rank].inject.remote(make_fault(began, released)), timeout=PATIENCE_S)
    future = submit(measured_group.train_step, small_batch)
    error, now = hang_of(future)
    with pytest.raises(WorkerHung) as next_call:
        measured_group.memory()
    assert (next_call.value.rank, next_call.value.call) == (rank, "forward_backward")
    released.touch()
    assert (error.rank, error.call) == (rank, "forward_backward"), error
    assert since(began, now) >= LIMIT_S - 1
    (other,) = error.others
    assert f"rank {1 - rank}" in other and "forward_backward" in other
    if make_fault is stop_and_continue:
        assert "state T" in error.message and error.stack is None
    else:
        assert error.stack is not None and "in fault" in Path(error.stack).read_text()
    well(measured_group)
    assert future.result()["updates"] == 1, "whoever does not end it gets the result after all"
    assert len(measured_group.memory()) == 2


def test_a_rank_in_a_collective_that_no_other_joins_is_named_with_the_collective(
    measured_group: Any, small_batch: RolloutBatch
) -> None:
    request = RankRequest("train_step", {"batch": small_batch})
    request = measured_group.prepared(request, measured_group.check(request))
    first, second = measured_group.receivers
    guard = Watchdog([first, second], Limits.of(measured_group.config))
    alone = CallFuture(
        [first.call.remote(request)], name=request.name, timeout_s=PATIENCE_S, first_only=True, watchdog=guard
    )
    error, _ = hang_of(alone)
    assert (error.rank, error.call, error.field) == (0, "train_step", "cluster.ping_timeout_s")
    assert error.stack is not None and "all_reduce" in Path(error.stack).read_text()
    assert "torch/distributed" in Path(error.stack).read_text() and "distributed_c10d.py" in error.message
    ray.get(second.call.remote(request), timeout=PATIENCE_S)  # it joins
    assert alone.result()["updates"] == 1
