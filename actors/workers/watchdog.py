"""Looking after processes while a call waits for them: which one hangs, in what, and where in its code it is.

Each is asked once a second how far it is, on a thread of its own there, so that it answers while a call is stuck. A
process hangs when it does not answer (it is stopped, or something holds its interpreter lock), or when it answers that
it has not got on for longer than such an activity takes. Ranks that wait in a collective for a stuck one do not get on
either, and are not blamed. That a process has ended is noticed by the call itself: actors/workers/futures.py.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TextIO

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.cluster.ray_errors import cluster_is_gone
from slimefsdp import heartbeat
from slimefsdp.config import RunConfig
from slimefsdp.errors import WorkerHung
from slimefsdp.heartbeat import IDLE, LAUNCH, ProgressSnapshot

ASK_EVERY_S = 1.0
SLOWER_BY = 10.0  # than such an activity usually is: then it is no longer slow, it hangs
_HANG = 10.0  # times cluster.ping_timeout_s without progress; a single kernel or collective takes less
STACKS = "stacks"  # below run.dir
_ASK_AGAIN_S = 0.1  # at the soonest
_AWAY_S = 2.0  # between two looks: the driver waited for nothing meanwhile, or was stopped itself
_SILENT_S = 2.0  # without an answer for so long, a process counts as behind those that answer
_DUMP_S = 1.0  # for processes of one node to write their stacks; they take milliseconds
_REMOTE_DUMP_S = 10.0  # for another node to see to the same


@dataclass(slots=True)
class Cost:
    """Counts what watching costs this process."""

    seconds: float = 0.0
    questions: int = 0


COST = Cost()


@dataclass(frozen=True, slots=True)
class Pulse:
    """A watched process's answer."""

    progress: ProgressSnapshot
    pid: int
    started: int  # of that process, as in `_stat`: pids are used again
    node: str  # Ray's name of it
    stacks: str | None  # the file that SIGUSR1 has it write its stacks to; None: there is none


class Watched:
    """Base of Ray actors that a Watchdog looks after; one of their concurrency groups is called `control`."""

    CONCURRENCY_GROUPS: ClassVar[dict[str, int]] = {"control": 1}  # threads of each
    _stacks: TextIO | None = None

    def keep_stacks(self, run_dir: Path | None, name: str) -> None:
        """Has SIGUSR1 append the stacks of this process's threads to a file below `run_dir`.

        That is done in C, also while the interpreter lock is held. Where the file cannot be made there are no stacks.

        Args:
            name: of the process in the run, such as `actor_rank_0`.
        """
        if run_dir is None:
            return
        folder = (run_dir / STACKS).absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for earlier in folder.glob(f"{name}.*.txt"):
                if earlier.stat().st_size == 0:
                    earlier.unlink()  # of a process that did not hang
            self._stacks = (folder / f"{name}.{os.getpid()}.txt").open("a")
        except OSError:
            return
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)

    @ray.method(concurrency_group="control")
    def progress(self) -> Pulse:
        """Returns how far this process is; answers while a call is stuck."""
        stacks = None if self._stacks is None else self._stacks.name
        return Pulse(heartbeat.snapshot(), os.getpid(), _stat(os.getpid())[1], _own_node(), stacks)

    @ray.method(concurrency_group="control")
    def abort_collectives(self) -> None:
        """Others of this process's group are lost: ends what its call waits for them in; here it waits for nobody."""


@functools.cache
def remote_class(kind: type[Watched]) -> Any:
    """The class as Ray actors, with a thread that answers; made once, because Ray keeps each that is made for good."""
    return ray.remote(concurrency_groups=kind.CONCURRENCY_GROUPS)(kind)  # type: ignore[call-overload]


@dataclass(slots=True)
class _Process:
    """Holds the state of a watched process; times are of `time.monotonic`."""

    question: Any = None  # that has no answer yet; one at a time, since one thread answers
    asked: float = 0.0
    silent_since: float = 0.0  # as `asked`, unless this process was away meanwhile
    ask_next: float = 0.0
    pulse: Pulse | None = None  # the last answer
    pulse_asked: float = 0.0  # it may have been given long before it is taken in

    def silent_s(self, now: float) -> float:
        """Returns for how many seconds a question has been unanswered."""
        return 0.0 if self.question is None else now - self.silent_since


@dataclass(frozen=True, slots=True)
class Limits:
    """Holds how long processes may take, in seconds."""

    ping_s: float  # to answer
    hang_s: float  # from tick to tick
    sync_s: float  # for receivers of weights

    @classmethod
    def of(cls, config: RunConfig) -> Limits:
        """Returns the limits that the settings give."""
        ping_s = config.cluster.ping_timeout_s
        return cls(ping_s, _HANG * ping_s, config.cluster.sync_timeout_s)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A call, as long as some have not answered it."""

    call: str
    ranks: Sequence[int]  # that have not
    began: float  # of `time.monotonic`


class Watchdog:
    """Looks after the processes of one group; calls of several threads may share it.

    Args:
        actors: `Watched` ones, by rank.
        kind: what they are, in errors.
    """

    def __init__(self, actors: Sequence[Any], limits: Limits, *, kind: str = "rank") -> None:
        self._actors = actors
        self._limits = limits
        self._kind = kind
        self._processes = [_Process() for _ in actors]
        self._lock = threading.Lock()
        self._looked = 0.0

    def look(self, waiting: Waiting) -> None:
        """Takes in what was answered and asks again where it is time; waits for nobody.

        Raises:
            WorkerHung: one hangs, and its stack was written, where that is possible.
        """
        with _counted(), self._lock:
            now = time.monotonic()
            self._take_answers(now)
            if now - self._looked > _AWAY_S:
                for process in self._processes:
                    process.silent_since = now  # answers may be here and not taken in yet
            self._looked = now
            silent = self._silent(waiting, now)
            still = self._still(waiting)
            self._ask(now)
            if silent:
                rank = self._most_behind(silent, now)
                seconds = self._processes[rank].silent_s(now)
                problem = f"{self._kind} {rank} has not answered for {seconds:.1f} s"
                raise self._hung(waiting, rank, seconds, problem, "cluster.ping_timeout_s")
            if still:
                rank = self._most_behind(still, now)
                progress = self._progress_of(rank)
                problem = f"{self._kind} {rank} has not got on for {progress.since_tick_s:.1f} s, in {progress.place}"
                raise self._hung(waiting, rank, progress.since_tick_s, problem, "cluster.ping_timeout_s")

    def overdue(self, waiting: Waiting, timeout_s: float, setting: str = "cluster.call_timeout_s") -> WorkerHung:
        """The error of a call that has taken too long as a whole, after the stacks were written.

        Args:
            setting: that the timeout is from.
        """
        with _counted(), self._lock:
            now = time.monotonic()
            self._take_answers(now)
            rank = self._most_behind(waiting.ranks, now)
            problem = f"{waiting.call} did not finish within {timeout_s:g} s"
            if self._processes[rank].pulse is None and self._processes[rank].silent_s(now) > _SILENT_S:
                problem += f": {self._kind} {rank} has not answered since it was started"
            return self._hung(waiting, rank, timeout_s, problem, setting)

    def abort_collectives(self, lost: Collection[int]) -> None:
        """Has all but those that are lost abort the collectives that they wait for them in; waits for no answer."""
        for rank, actor in enumerate(self._actors):
            if rank not in lost:
                actor.abort_collectives.remote()

    def kill_stopped(self) -> None:
        """Ends processes of this node that are stopped: of one, Ray waits 5 s for it to end itself."""
        if cluster_is_gone():  # and they with it
            return
        for process in self._processes:
            pulse = process.pulse
            if pulse is not None and pulse.node == _own_node() and _state(pulse) == "T":
                with suppress(ProcessLookupError):
                    os.kill(pulse.pid, signal.SIGKILL)

    # ------------------------------------------------------------------ asking

    def _ask(self, now: float) -> None:
        for process, actor in zip(self._processes, self._actors, strict=True):
            if process.question is None and now >= process.ask_next:
                process.question, process.asked, process.silent_since = actor.progress.remote(), now, now
                COST.questions += 1

    def _take_answers(self, now: float) -> None:
        asked = {process.question: process for process in self._processes if process.question is not None}
        if not asked:
            return
        for answer in ray.wait(list(asked), num_returns=len(asked), timeout=0)[0]:
            process = asked[answer]
            process.question, process.ask_next = None, process.asked + ASK_EVERY_S
            try:
                process.pulse, process.pulse_asked = ray.get(answer, timeout=5), process.asked
            except RayError:
                continue  # it ended, which the call itself reports
            deadline_s = self._deadline_s(process.pulse.progress)
            if deadline_s is not None:  # asked when it is reached, it is known at once
                left_s = deadline_s - process.pulse.progress.since_tick_s
                process.ask_next = min(process.ask_next, now + max(_ASK_AGAIN_S, left_s))

    # ------------------------------------------------------------------ judging

    def _silent(self, waiting: Waiting, now: float) -> list[int]:
        """Returns the processes that do not answer in this call; during a launch an import may be the cause."""
        limit_s = self._limits.ping_s
        if waiting.call == LAUNCH or now - waiting.began <= limit_s:
            return []
        return [rank for rank, one in enumerate(self._processes) if one.silent_s(now) > limit_s]

    def _still(self, waiting: Waiting) -> list[int]:
        """Returns the processes without progress that do not just wait for others; all of them if everybody waits."""
        overdue = []
        for rank in waiting.ranks:
            process = self._processes[rank]
            if process.pulse is None or process.pulse_asked < waiting.began:
                continue
            deadline_s = self._deadline_s(process.pulse.progress)
            if deadline_s is not None and process.pulse.progress.since_tick_s > deadline_s:
                overdue.append(rank)
        alone = [rank for rank in overdue if not self._progress_of(rank).waits]
        return alone or (overdue if len(overdue) == len(waiting.ranks) else [])

    def _deadline_s(self, progress: ProgressSnapshot) -> float | None:
        """Returns the seconds without a tick after which a process hangs; None while only the call's deadline holds."""
        if progress.activity in (IDLE, LAUNCH) or progress.usual_gap_s is None:
            return None
        # receivers of weights have their own limit, and are blamed after it
        hang_s = self._limits.hang_s
        least_s = max(hang_s, self._limits.sync_s if progress.activity == "update_weights" else 0.0)
        # an activity that is known from one time alone may have been held up then: what is added has a bound
        return max(least_s, min(SLOWER_BY * progress.usual_gap_s, progress.usual_gap_s + SLOWER_BY * hang_s))

    def _most_behind(self, ranks: Sequence[int], now: float) -> int:
        def order(rank: int) -> tuple[bool, bool, int, int, int]:
            process = self._processes[rank]
            answers = process.silent_s(now) <= _SILENT_S
            if process.pulse is None or not answers:
                return answers, False, 0, 0, rank
            progress = process.pulse.progress
            # on NCCL no frame tells that a rank waits, and ticks are as many on those that wait for the device
            return answers, progress.waits, progress.collectives, progress.ticks, rank

        return min(ranks, key=order)

    def _progress_of(self, rank: int) -> ProgressSnapshot:
        pulse = self._processes[rank].pulse
        assert pulse is not None
        return pulse.progress

    # ------------------------------------------------------------------ telling

    def _hung(self, waiting: Waiting, rank: int, seconds: float, problem: str, field: str) -> WorkerHung:
        ranks = sorted({rank, *waiting.ranks})
        obstacles = self._write_stacks(ranks)
        process = self._processes[rank]
        call, stack = waiting.call, None
        if process.pulse is not None:
            if process.pulse_asked >= waiting.began and process.pulse.progress.activity not in (IDLE, LAUNCH):
                call = process.pulse.progress.activity
            if rank not in obstacles:
                stack = process.pulse.stacks
        error = WorkerHung(
            problem + (f"; {obstacles[rank]}" if rank in obstacles else ""),
            field=field,
            hint="look at the rank's log, or raise the timeout" if stack is None else f"see its stack in {stack}",
            rank=rank,
            call=call,
        )
        error.seconds, error.stack = seconds, stack
        error.others = tuple(self._told(other) for other in ranks if other != rank)
        return error

    def _told(self, rank: int) -> str:
        process = self._processes[rank]
        if process.pulse is None:
            return f"{self._kind} {rank} has not said yet how far it is"
        progress = process.pulse.progress
        waits = ", which waits for others" if progress.waits else ""
        return (
            f"{self._kind} {rank} in {progress.activity} since {progress.since_tick_s:.1f} s in {progress.place}{waits}"
        )

    def _write_stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Has these processes write their stacks, wherever they run; by rank, what kept them from it."""
        nodes: dict[str, list[tuple[int, Pulse]]] = {}
        for rank in ranks:
            pulse = self._processes[rank].pulse
            if pulse is not None:
                nodes.setdefault(pulse.node, []).append((rank, pulse))
        obstacles: dict[int, str] = {}
        for node, pulses in nodes.items():
            processes = [pulse for _, pulse in pulses]
            if node == _own_node():
                found = write_stacks(processes)
            else:
                place = NodeAffinitySchedulingStrategy(node, soft=False)
                task: Any = ray.remote(num_cpus=0, max_retries=0)(write_stacks).options(scheduling_strategy=place)
                try:
                    found = ray.get(task.remote(processes), timeout=_REMOTE_DUMP_S)
                except RayError:
                    found = ["its node does not answer"] * len(processes)
            obstacles |= {rank: why for (rank, _), why in zip(pulses, found, strict=True) if why is not None}
        return obstacles


def write_stacks(processes: Sequence[Pulse]) -> list[str | None]:
    """Has processes of this node write their stacks; of each, what kept it from it, None where nothing did."""
    before = [_size(one.stacks) for one in processes]
    obstacles = [_signalled(one) for one in processes]
    deadline = time.monotonic() + _DUMP_S
    for index, one in enumerate(processes):
        while obstacles[index] is None and _size(one.stacks) == before[index]:
            if time.monotonic() > deadline:
                obstacles[index] = f"process {one.pid} did not write its stack (state {_state(one)})"
            time.sleep(0.02)
    return obstacles


def _signalled(one: Pulse) -> str | None:
    """Sends the signal that has a process write its stacks; says so where that is of no use."""
    state = _state(one)
    if state in ("T", "t"):
        return f"process {one.pid} is stopped (state {state}): a signal or a debugger did that"
    if state in ("?", "Z"):
        return f"process {one.pid} has ended"
    if one.stacks is None:
        return f"process {one.pid} keeps no stack: run.dir is not set, or cannot be written"
    with suppress(ProcessLookupError):
        os.kill(one.pid, signal.SIGUSR1)
    return None


def _size(file: str | None) -> int:
    """Bytes; 0 where there is no such file."""
    try:
        return 0 if file is None else Path(file).stat().st_size
    except OSError:
        return 0


def _state(one: Pulse) -> str:
    """The kernel's letter for what a process does; `?` where it is gone, also when another one has its pid."""
    state, started = _stat(one.pid)
    return state if started == one.started else "?"


def _stat(pid: int) -> tuple[str, int]:
    """The kernel's letter for what the process of a pid does, and when it started, in ticks since the machine did."""
    try:
        columns = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()  # as in proc_pid_stat(5)
    except OSError:
        return "?", 0
    return columns[0].decode(), int(columns[19])


def _own_node() -> str:
    return str(ray.get_runtime_context().get_node_id())


@contextmanager
def _counted() -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        COST.seconds += time.perf_counter() - start
