"""Which process hangs, in what phase, and its stack: real processes that are stopped, hold their lock, loop or wait."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from actors import watchdog, worker_group
from actors.calls import CallFuture
from actors.rollout.engine import EnginePool
from actors.train_worker import TrainWorker
from actors.watchdog import COST, Limits, Pulse, Waiting, Watchdog, Watched, write_stacks
from slimefsdp import progress
from slimefsdp.data.rollout import RolloutBatch
from slimefsdp.errors import WorkerHung
from slimefsdp.progress import IDLE, LAUNCH, Standing
from tests.ray_fixtures import MakeConfig

LIMIT_S = 2.5  # without an answer, and without a tick
LATE_S = 2.0  # a hang is reported no later than this after its limit
LIMITS = Limits(ping_s=LIMIT_S, hang_s=LIMIT_S, sync_s=60.0)

# ---------------------------------------------------------------------- processes without torch


@pytest.fixture(scope="module")
def processes(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """Two that keep stacks and do as they are told."""
    run_dir = tmp_path_factory.mktemp("run")

    class Process(Watched):  # defined here, so that it travels by value and the processes need not import this file
        def act(self, phase: str, pauses_s: list[float], fault: Callable[[], None] | None = None) -> int:
            with progress.during(phase):
                for pause_s in pauses_s:
                    time.sleep(pause_s)
                    progress.tick()
                if fault is not None:
                    fault()
            return os.getpid()

    actor = ray.remote(num_cpus=0, concurrency_groups={"control": 1})(Process)  # type: ignore[call-overload]
    started = [actor.remote() for _ in range(2)]
    ray.get([one.keep_stacks.remote(run_dir, f"rank_{i}") for i, one in enumerate(started)], timeout=60)
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


def end(future: CallFuture) -> None:
    """Waits until a fault is over and all have answered."""
    ray.get(future._refs, timeout=60)


def since(file: Path, now: float) -> float:
    """Seconds since a fault wrote its time into a file."""
    return now - float(file.read_text())


def test_a_stopped_process_is_named_with_its_phase_and_is_not_asked_for_a_stack(processes: list[Any]) -> None:
    pids = call(processes, ("warm", []), ("warm", [])).result()
    future = call(processes, ("spin", [0.2] * 30), ("spin", [0.2] * 30))
    stopped_at: list[float] = []

    def stop() -> None:
        stopped_at.append(time.time())
        os.kill(pids[1], signal.SIGSTOP)

    timer = threading.Timer(1.5, stop)
    timer.start()
    try:
        error, now = hang_of(future)
    finally:
        timer.join(timeout=20)
        os.kill(pids[1], signal.SIGCONT)
    late_s = now - stopped_at[0] - LIMIT_S
    assert (error.rank, error.phase, error.field) == (1, "spin", "cluster.ping_timeout_s")
    assert 0 <= late_s <= LATE_S, late_s
    assert f"process {pids[1]} is stopped (state T)" in error.message and error.stack is None
    assert error.seconds is not None and LIMIT_S < error.seconds < LIMIT_S + LATE_S
    assert future.result() == pids, "it goes on where it was"


def test_silence_counts_only_while_the_driver_listens(processes: list[Any]) -> None:
    pid = ray.get(processes[0].act.remote("warm", []), timeout=60)
    guard = Watchdog(processes, Limits(ping_s=1.0, hang_s=60.0, sync_s=60.0))
    ray.get([one.progress.remote() for one in processes], timeout=60)
    waiting = Waiting("act", [0], time.monotonic())
    os.kill(pid, signal.SIGSTOP)
    try:
        guard.look(waiting)  # asks
        time.sleep(2.5)  # stopped itself, or busy with something else
        guard.look(waiting)
        with pytest.raises(WorkerHung, match="rank 0 has not answered for") as hung:
            for _ in range(2):
                time.sleep(0.7)
                guard.look(waiting)
        assert hung.value.seconds is not None and hung.value.seconds < 2.5
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_process_whose_interpreter_lock_is_held_writes_its_stack_all_the_same(
    processes: list[Any], tmp_path: Path
) -> None:
    began = tmp_path / "began"

    def holds_the_lock() -> None:
        import ctypes
        import time

        began.write_text(str(time.time()))
        ctypes.PyDLL(None).sleep(6)

    future = call(processes, ("hold", [1.5], holds_the_lock), ("hold", [1.5]))
    error, now = hang_of(future)
    assert (error.rank, error.phase, error.field) == (0, "hold", "cluster.ping_timeout_s")
    assert LIMIT_S - 1 <= since(began, now) <= LIMIT_S + LATE_S
    assert error.stack is not None and "in holds_the_lock" in Path(error.stack).read_text()
    end(future)


def test_a_process_in_an_endless_loop_is_named_with_the_place(processes: list[Any], tmp_path: Path) -> None:
    began, released = tmp_path / "began", tmp_path / "released"

    def loops() -> None:
        import time

        began.write_text(str(time.time()))
        while not released.exists():
            pass

    call(processes, ("loop", [0.1]), ("loop", [0.1])).result()  # from now on it is known how long this takes
    future = call(processes, ("loop", [0.1]), ("loop", [0.1], loops))
    error, now = hang_of(future)
    released.touch()
    assert (error.rank, error.phase, error.field) == (1, "loop", "cluster.hang_timeout_s")
    assert LIMIT_S <= since(began, now) <= LIMIT_S + LATE_S
    assert error.stack is not None and "in loops" in Path(error.stack).read_text()
    assert error.stack in str(error), "the way out is to read it"
    end(future)


def test_what_is_slow_and_gets_on_is_not_reported(processes: list[Any]) -> None:
    patient = Watchdog(processes, Limits(ping_s=10.0, hang_s=1.0, sync_s=60.0))
    call(processes, ("whole", [2.0]), ("whole", []), guard=patient).result()  # whatever a phase takes at first
    call(processes, ("steps", [0.4]), ("steps", [0.4]), guard=patient).result()
    call(processes, ("steps", [0.4] * 5), ("steps", []), guard=patient).result()
    call(processes, ("whole", [2.5]), ("whole", []), guard=patient).result()  # 10 times that is allowed


def test_one_that_has_not_come_up_is_named_and_not_the_others(processes: list[Any]) -> None:
    class Stuck(Watched):
        def __init__(self) -> None:
            time.sleep(60)

    actor = ray.remote(num_cpus=0, concurrency_groups={"control": 1})(Stuck)  # type: ignore[call-overload]
    both = [processes[0], actor.remote()]
    refs = [processes[0].act.remote("wait", [6.0]), both[1].keep_stacks.remote(None, "")]
    future = CallFuture(
        refs, name="launch", timeout_s=4.0, first_only=False, watchdog=Watchdog(both, LIMITS), first_rank=0
    )
    error, _ = hang_of(future)
    ray.kill(both[1])
    assert (error.rank, error.phase) == (1, "launch")
    assert "launch did not finish within 4 s: rank 1 has not answered since it was started" in error.message
    assert len(error.others) == 1 and error.others[0].startswith("rank 0 in wait since ")


def test_a_short_call_asks_nobody_and_a_long_one_each_once_a_second(processes: list[Any]) -> None:
    before = COST.questions
    quick = call(processes, ("quick", []), ("quick", []))
    end(quick)
    assert len(quick.result()) == 2 and COST.questions == before
    began = time.monotonic()
    call(processes, ("long", [1.0] * 3), ("long", [])).result()
    seconds = time.monotonic() - began
    assert 2 * 2 <= COST.questions - before <= 2 * (seconds + 1)


def test_a_process_without_a_run_folder_says_why_it_has_no_stack(cluster: None) -> None:
    class Process(Watched):
        def act(self) -> None:
            with progress.during("act"):
                time.sleep(0.1)
            with progress.during("act"):
                time.sleep(30)

    one = ray.remote(num_cpus=0, concurrency_groups={"control": 1})(Process).remote()  # type: ignore[call-overload]
    quick = Watchdog([one], Limits(ping_s=10.0, hang_s=1.0, sync_s=60.0), kind="engine")
    error, _ = hang_of(CallFuture([one.act.remote()], name="act", timeout_s=20, first_only=True, watchdog=quick))
    ray.kill(one)
    assert "engine 0 has not got on for" in error.message and "run.dir is not set" in error.message
    assert error.stack is None


def test_stacks_are_written_on_another_node_by_a_task_there(
    processes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "_own_node", lambda: "none of the cluster's")
    error, _ = hang_of(call(processes, ("afar", [6.0]), ("afar", [6.0]), timeout_s=2.5))
    assert error.stack is not None and "in act" in Path(error.stack).read_text()
    assert "afar" in error.others[0]


def test_a_stopped_process_can_be_ended_at_once(cluster: None) -> None:
    actor = ray.remote(num_cpus=0, concurrency_groups={"control": 1})(Watched)  # type: ignore[call-overload]
    stopped, well = both = [actor.remote() for _ in range(2)]
    pulses = ray.get([one.progress.remote() for one in both], timeout=60)
    guard = Watchdog(both, LIMITS)
    for process, pulse in zip(guard._processes, pulses, strict=True):
        process.pulse = pulse
    os.kill(pulses[0].pid, signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while watchdog._state(pulses[0]) != "T" and time.monotonic() < deadline:
        time.sleep(0.02)
    guard._processes[0].pulse = replace(pulses[0], started=pulses[0].started - 1)  # an earlier one's with this pid
    guard.kill_stopped()
    assert watchdog._state(pulses[0]) == "T"
    guard._processes[0].pulse = pulses[0]
    guard.kill_stopped()
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(stopped.progress.remote(), timeout=20)
    assert ray.get(well.progress.remote(), timeout=20).pid == pulses[1].pid
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


def test_a_process_that_is_gone_is_not_signalled() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert write_stacks([pulse_of(child, 0)]) == [f"process {child} has ended"]


def test_a_process_with_the_pid_of_one_that_is_gone_is_not_signalled(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        started = watchdog._stat(other.pid)[1]
        told = write_stacks([replace(pulse_of(other.pid, started - 1), stacks=str(tmp_path / "stacks.txt"))])
        assert told == [f"process {other.pid} has ended"] and other.poll() is None
        assert watchdog._state(pulse_of(other.pid, started)) != "?"
        other.kill()


# ---------------------------------------------------------------------- judging, from answers made up


def pulse_of(pid: int, started: int) -> Pulse:
    return Pulse(at(0.0), pid, started, "node", None)


MADE_UP = Limits(ping_s=60.0, hang_s=10.0, sync_s=20.0)


def judged(*standings: Standing, waiting: list[int] | None = None) -> list[int]:
    """Which rank is blamed under MADE_UP limits."""
    guard = Watchdog([None] * len(standings), MADE_UP)
    for process, standing in zip(guard._processes, standings, strict=True):
        process.pulse, process.pulse_asked = Pulse(standing, 1, 1, "node", None), 100.0
    ranks = list(range(len(standings))) if waiting is None else waiting
    overdue = guard._still(Waiting("train_step", ranks, began=50.0))
    return [guard._most_behind(overdue, 100.0)] if overdue else []


def at(still_s: float, *, phase: str = "p", ticks: int = 5, longest_s: float | None = 0.1, waits: bool = False) -> Any:
    return Standing(phase, ticks, still_s, longest_s, "somewhere", waits)


def test_a_rank_that_waits_for_a_stuck_one_is_not_blamed_though_it_is_still_for_longer() -> None:
    assert judged(at(30, waits=True), at(11)) == [1]
    assert judged(at(30, waits=True), at(9)) == [], "the other one may yet get on"
    assert judged(at(30, waits=True), at(9, waits=True)) == []
    assert judged(at(30, ticks=6, waits=True), at(30, ticks=4, waits=True), at(12, waits=True)) == [1]
    assert judged(at(30, waits=True), at(0, phase=IDLE), waiting=[0]) == [0], "nobody else is in the call"


def test_phases_have_as_long_as_they_ever_took_and_ten_times_more() -> None:
    assert judged(at(11)) == [0]
    assert judged(at(9)) == []
    assert judged(at(99, longest_s=10)) == []
    assert judged(at(101, longest_s=10)) == [0]
    assert judged(at(1000, longest_s=None)) == [], "the call's own deadline holds"
    assert judged(at(1000, phase=IDLE)) == judged(at(1000, phase=LAUNCH)) == []
    assert judged(at(15, phase="update_weights")) == [], "receivers are blamed first"
    assert judged(at(25, phase="update_weights")) == [0]


def test_an_answer_from_before_the_call_says_nothing() -> None:
    guard = Watchdog([None], MADE_UP)
    guard._processes[0].pulse, guard._processes[0].pulse_asked = Pulse(at(30), 1, 1, "node", None), 40.0
    assert guard._still(Waiting("train_step", [0], began=50.0)) == []


def test_silence_is_no_hang_in_a_launch_nor_in_a_call_that_is_younger_than_the_limit() -> None:
    guard = Watchdog([None], MADE_UP)
    guard._processes[0].question, guard._processes[0].silent_since = "open", 10.0
    for answered in (None, pulse_of(1, 1)):
        guard._processes[0].pulse = answered
        assert guard._silent(Waiting("train_step", [0], began=10.0), 100.0) == [0]
        assert guard._silent(Waiting("train_step", [0], began=50.0), 100.0) == [], "the last one's may just have ended"
        assert guard._silent(Waiting(LAUNCH, [0], began=10.0), 100.0) == []


# ---------------------------------------------------------------------- a group of ranks, and an engine


@pytest.fixture(scope="module")
def faulty_group(cluster: None, make_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two ranks that can be given a fault before a micro-batch; every fault ends, and the group goes on."""

    class Faulty(TrainWorker):
        def inject(self, fault: Callable[[], None] | None) -> None:
            from slimefsdp import update

            original = getattr(update, "original", update.evaluate)

            def evaluate(*args: Any, **kwargs: Any) -> Any:
                if fault is not None:
                    fault()
                return original(*args, **kwargs)

            update.original, update.evaluate = original, evaluate  # type: ignore[attr-defined]
            gaps = progress._of_this_process._gaps  # as if earlier faults had not been
            gaps.update(dict.fromkeys(gaps, 0.0))

    config = make_config(
        run={"dir": str(tmp_path_factory.mktemp("run"))},
        rollout={"engines": 1},
        cluster={"ping_timeout_s": LIMIT_S, "hang_timeout_s": LIMIT_S},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_group, "TrainWorker", Faulty)
        group = worker_group.WorkerGroup.launch(config)
    yield group
    group.shutdown()


@pytest.fixture
def measured_group(faulty_group: Any, small_batch: RolloutBatch) -> Any:
    """With both ranks well, and each phase of a step known to be quick."""
    end(faulty_group.train_step_async(small_batch))
    ray.get([worker.inject.remote(None) for worker in faulty_group.receivers], timeout=60)
    return faulty_group


# faults of the first micro-batch, after a second in which the phase is seen; they last 6 s


def stop_and_continue(began: Path) -> Callable[[], None]:
    """By another process."""

    def fault() -> None:
        import os
        import subprocess
        import time

        if not began.exists():
            time.sleep(1.3)
            began.write_text(str(time.time()))
            subprocess.Popen(["sh", "-c", f"kill -STOP {os.getpid()}; sleep 6; kill -CONT {os.getpid()}"])
            time.sleep(0.5)

    return fault


def hold_the_lock(began: Path) -> Callable[[], None]:
    def fault() -> None:
        import ctypes
        import time

        if not began.exists():
            time.sleep(1.3)
            began.write_text(str(time.time()))
            ctypes.PyDLL(None).sleep(6)

    return fault


def loop(began: Path) -> Callable[[], None]:
    def fault() -> None:
        import time

        if not began.exists():
            began.write_text(str(time.time()))
            while time.time() < float(began.read_text()) + 6:
                pass

    return fault


@pytest.mark.parametrize(("make_fault", "rank"), [(stop_and_continue, 1), (hold_the_lock, 0), (loop, 1)])
def test_the_rank_that_hangs_in_a_step_is_named_and_not_the_one_that_waits_for_it(
    measured_group: Any, small_batch: RolloutBatch, tmp_path: Path, make_fault: Any, rank: int
) -> None:
    began = tmp_path / "began"
    ray.get(measured_group.receivers[rank].inject.remote(make_fault(began)), timeout=60)
    future = measured_group.train_step_async(small_batch)
    error, now = hang_of(future)
    assert (error.rank, error.phase) == (rank, "forward_backward"), error
    assert since(began, now) <= LIMIT_S + LATE_S
    (other,) = error.others
    assert other.startswith(f"rank {1 - rank} in forward_backward") and other.endswith(", which waits for others")
    if make_fault is stop_and_continue:
        assert "is stopped" in error.message and error.stack is None
    else:
        assert error.stack is not None and "in fault" in Path(error.stack).read_text()
    end(future)
    assert future.result()["updates"] == 1, "whoever does not end it gets the result after all"


def test_a_rank_in_a_collective_that_no_other_joins_is_named_with_the_collective(
    measured_group: Any, small_batch: RolloutBatch
) -> None:
    name, (args, kwargs) = "train_step", measured_group.prepare("train_step", (small_batch,), {})
    first, second = measured_group.receivers
    guard = Watchdog([first, second], Limits.of(measured_group.config))
    alone = CallFuture(
        [first.call.remote(name, args, kwargs)], name=name, timeout_s=60, first_only=True, watchdog=guard
    )
    error, _ = hang_of(alone)
    assert (error.rank, error.phase, error.field) == (0, "train_step", "cluster.hang_timeout_s")
    assert error.stack is not None and "all_gather_object" in Path(error.stack).read_text()
    assert "torch/distributed" in Path(error.stack).read_text() and "distributed_c10d.py" in error.message
    ray.get(second.call.remote(name, args, kwargs), timeout=60)  # it joins
    assert alone.result()["updates"] == 1


def test_a_rank_that_is_slower_than_the_limit_in_all_is_not_reported(
    measured_group: Any, small_batch: RolloutBatch
) -> None:
    ray.get(measured_group.receivers[1].inject.remote(lambda: time.sleep(1.5)), timeout=60)
    began = time.monotonic()
    for _ in range(3):
        assert measured_group.train_step(small_batch)["updates"] == 1
    assert time.monotonic() - began > LIMIT_S


def test_an_engine_that_hangs_is_named(measured_group: Any) -> None:
    pool = EnginePool.launch(measured_group.config)
    try:
        measured_group.update_weights(pool.receivers)
        (engine,) = pool.receivers
        pulse = ray.get(engine.progress.remote(), timeout=20)
        assert pulse.standing.phase == IDLE
        assert pool.are_alive()  # whose questions were answered
        os.kill(pulse.pid, signal.SIGSTOP)
        with pytest.raises(WorkerHung, match="engine 0 has not answered") as hung:
            pool.generate(["a"], samples_per_prompt=1, seed=[1])
        assert (hung.value.rank, hung.value.phase) == (0, "generate")
    finally:
        pool.shutdown()
