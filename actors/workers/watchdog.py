"""Finds out which process hangs while a call waits for several processes, in which activity, and where in its code.

Every process is asked for its progress once a second, and answers in a separate thread, also while a call is stuck. A
process hangs if it does not answer (it is stopped, or something holds its interpreter lock), or if it makes no progress
for much longer than its activity usually takes. Ranks that wait in a collective for a stuck rank make no progress
either, but are not blamed. The end of a process is noticed by the call itself, in actors/workers/futures.py.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
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
SLOWER_BY = 10.0  # a process counts as hung after this multiple of its activity's usual time without progress
_HANG = 10.0  # but no process counts as hung before this multiple of cluster.ping_timeout_s
STACKS = "stacks"  # subfolder of run.dir
_ASK_AGAIN_S = 0.1  # shortest time between two questions to a process
_AWAY_S = 2.0  # after a longer time between two calls of `look`, this process itself was busy or stopped
_SILENT_S = 2.0  # a process whose answer takes longer counts as further behind than processes that answer
_DUMP_S = 1.0  # limit on the time in which a node's processes write their stacks, which usually takes milliseconds
_REMOTE_DUMP_S = 10.0  # the same limit for another node, with the task that has to be started there


@dataclass(frozen=True, slots=True)
class Pulse:
    """The answer of a watched process to the question for its progress."""

    progress: ProgressSnapshot
    pid: int
    started: int  # start time of the process, as in `_stat`, since pids are used again
    node: str  # Ray's id of the node
    stacks: str | None  # file to which the process writes its stacks on SIGUSR1, if it has one


class Watched:
    """The base class of the Ray actors that a `Watchdog` watches."""

    CONCURRENCY_GROUPS: ClassVar[dict[str, int]] = {"control": 1}  # name of the group -> its threads
    _stacks: TextIO | None = None

    def keep_stacks(self, run_dir: Path | None, name: str) -> None:
        """Has SIGUSR1 append the stacks of all threads to a file below `run_dir`, if the file can be written.

        The signal handler is written in C, so it also works while the interpreter lock is held.

        Args:
            name: the name of the process in the run, such as `actor_rank_0`.
        """
        if run_dir is None:
            return
        folder = (run_dir / STACKS).absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for earlier in folder.glob(f"{name}.*.txt"):
                if earlier.stat().st_size == 0:
                    earlier.unlink()  # the earlier process of this name did not hang
            self._stacks = (folder / f"{name}.{os.getpid()}.txt").open("a")
        except OSError:
            return
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)

    @ray.method(concurrency_group="control")
    def progress(self) -> Pulse:
        """Returns the progress of this process, also while a call is stuck."""
        stacks = None if self._stacks is None else self._stacks.name
        return Pulse(heartbeat.snapshot(), os.getpid(), _stat(os.getpid())[1], _own_node(), stacks)

    @ray.method(concurrency_group="control")
    def abort_collectives(self) -> None:
        """Ends the collectives in which a call waits for lost processes; this base class has no collectives."""


@functools.cache
def remote_class(kind: type[Watched]) -> Any:
    """Returns the Ray actor class of `kind`, with its concurrency groups; cached, as Ray never frees actor classes."""
    return ray.remote(concurrency_groups=kind.CONCURRENCY_GROUPS)(kind)  # type: ignore[call-overload]


@dataclass(slots=True)
class _Process:
    """Holds the state of a watched process; times are of `time.monotonic`."""

    question: Any = None  # reference to the answer to an open question, if any
    asked: float = 0.0  # time of the last question
    silent_since: float = 0.0  # `asked`, or later if the watching process itself was busy or stopped since
    ask_next: float = 0.0  # earliest time of the next question
    pulse: Pulse | None = None  # the last answer
    pulse_asked: float = 0.0  # time of the question that `pulse` answers, maybe long before the answer arrived

    def silent_s(self, now: float) -> float:
        """Returns the seconds for which the current question has had no answer."""
        return 0.0 if self.question is None else now - self.silent_since


@dataclass(frozen=True, slots=True)
class Limits:
    """Holds the time limits of a watchdog, in seconds."""

    ping_s: float  # for an answer
    hang_s: float  # between two ticks of the heartbeat
    sync_s: float  # for the receivers of a weight update

    @classmethod
    def of(cls, config: RunConfig) -> Limits:
        ping_s = config.cluster.ping_timeout_s
        return cls(ping_s, _HANG * ping_s, config.cluster.sync_timeout_s)


@dataclass(frozen=True, slots=True)
class Waiting:
    call: str
    ranks: Sequence[int]  # the processes without an answer
    began: float  # by `time.monotonic`


class Watchdog:
    """Watches the processes of one group; several threads may use one watchdog.

    Args:
        actors: actors of `Watched` classes, in rank order.
        kind: the word for an actor in errors.
    """

    def __init__(self, actors: Sequence[Any], limits: Limits, *, kind: str = "rank") -> None:
        self._actors = actors
        self._limits = limits
        self._kind = kind
        self._processes = [_Process() for _ in actors]
        self._lock = threading.Lock()
        self._looked = 0.0

    def look(self, waiting: Waiting) -> None:
        """Reads the answers that have arrived, and asks processes again if that is due, without waiting.

        Raises:
            WorkerHung: a process hangs; its stack was written if possible.
        """
        with self._lock:
            now = time.monotonic()
            self._take_answers(now)
            if now - self._looked > _AWAY_S:
                for process in self._processes:
                    process.silent_since = now  # it may have answered while the watching process was busy or stopped
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
        """Has processes write their stacks; returns the error of a call that exceeded `timeout_s` (of `setting`)."""
        with self._lock:
            now = time.monotonic()
            self._take_answers(now)
            rank = self._most_behind(waiting.ranks, now)
            problem = f"{waiting.call} did not finish within {timeout_s:g} s"
            if self._processes[rank].pulse is None and self._processes[rank].silent_s(now) > _SILENT_S:
                problem += f": {self._kind} {rank} has not answered since it was started"
            return self._hung(waiting, rank, timeout_s, problem, setting)

    def abort_collectives(self, lost: Collection[int]) -> None:
        """Has all processes except the lost ones abort their collectives, without waiting."""
        for rank, actor in enumerate(self._actors):
            if rank not in lost:
                actor.abort_collectives.remote()

    def kill_stopped(self) -> None:
        """Kills the stopped processes of this node, since Ray would wait 5 s for each to end."""
        if cluster_is_gone():
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

    def _take_answers(self, now: float) -> None:
        open_questions = {process.question: process for process in self._processes if process.question is not None}
        if not open_questions:
            return
        for answer in ray.wait(list(open_questions), num_returns=len(open_questions), timeout=0)[0]:
            process = open_questions[answer]
            process.question, process.ask_next = None, process.asked + ASK_EVERY_S
            try:
                process.pulse, process.pulse_asked = ray.get(answer, timeout=5), process.asked
            except RayError:
                continue  # the process ended, which the call itself reports
            deadline_s = self._deadline_s(process.pulse.progress)
            if deadline_s is not None:  # ask at the deadline, so that a hang is noticed at once
                left_s = deadline_s - process.pulse.progress.since_tick_s
                process.ask_next = min(process.ask_next, now + max(_ASK_AGAIN_S, left_s))

    # ------------------------------------------------------------------ judging

    def _silent(self, waiting: Waiting, now: float) -> list[int]:
        """Returns the processes that do not answer; none during a launch, when imports hold the interpreter lock."""
        limit_s = self._limits.ping_s
        if waiting.call == LAUNCH or now - waiting.began <= limit_s:
            return []
        return [rank for rank, process in enumerate(self._processes) if process.silent_s(now) > limit_s]

    def _still(self, waiting: Waiting) -> list[int]:
        """Returns the processes without progress, except those that wait in a collective.

        If all processes are without progress and wait in a collective, returns all of them.
        """
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
        """Returns the seconds without a tick after which a process hangs; None if only the call's timeout counts."""
        if progress.activity in (IDLE, LAUNCH) or progress.usual_gap_s is None:
            return None
        # not before cluster.sync_timeout_s, after which the receivers of weights are blamed instead of the sender
        hang_s = self._limits.hang_s
        least_s = max(hang_s, self._limits.sync_s if progress.activity == "update_weights" else 0.0)
        # bounded, since a single delayed activity may have made the usual gap long
        return max(least_s, min(SLOWER_BY * progress.usual_gap_s, progress.usual_gap_s + SLOWER_BY * hang_s))

    def _most_behind(self, ranks: Sequence[int], now: float) -> int:
        def order(rank: int) -> tuple[bool, bool, int, int, int]:
            process = self._processes[rank]
            answers = process.silent_s(now) <= _SILENT_S
            if process.pulse is None or not answers:
                return answers, False, 0, 0, rank
            progress = process.pulse.progress
            # With NCCL, `waits` does not show a wait. Ranks that wait for the device have equal ticks, but fewer
            # collectives if they are behind.
            return answers, progress.waits, progress.collectives, progress.ticks, rank

        return min(ranks, key=order)

    def _progress_of(self, rank: int) -> ProgressSnapshot:
        pulse = self._processes[rank].pulse
        assert pulse is not None
        return pulse.progress

    # ------------------------------------------------------------------ reporting

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
        error.others = tuple(self._state_of(other) for other in ranks if other != rank)
        return error

    def _state_of(self, rank: int) -> str:
        process = self._processes[rank]
        if process.pulse is None:
            return f"{self._kind} {rank} has not said yet how far it is"
        progress = process.pulse.progress
        waits = ", which waits for others" if progress.waits else ""
        return (
            f"{self._kind} {rank} in {progress.activity} since {progress.since_tick_s:.1f} s in {progress.place}{waits}"
        )

    def _write_stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Has processes on any node write their stacks; returns rank -> reason for processes that did not."""
        nodes: dict[str, list[tuple[int, Pulse]]] = {}
        for rank in ranks:
            pulse = self._processes[rank].pulse
            if pulse is not None:
                nodes.setdefault(pulse.node, []).append((rank, pulse))
        obstacles: dict[int, str] = {}
        for node, pulses in nodes.items():
            processes = [pulse for _, pulse in pulses]
            if node == _own_node():
                reasons = write_stacks(processes)
            else:
                on_node = NodeAffinitySchedulingStrategy(node, soft=False)
                task: Any = ray.remote(num_cpus=0, max_retries=0)(write_stacks).options(scheduling_strategy=on_node)
                try:
                    reasons = ray.get(task.remote(processes), timeout=_REMOTE_DUMP_S)
                except RayError:
                    reasons = ["its node does not answer"] * len(processes)
            obstacles |= {rank: reason for (rank, _), reason in zip(pulses, reasons, strict=True) if reason is not None}
        return obstacles


def write_stacks(processes: Sequence[Pulse]) -> list[str | None]:
    """Has processes of this node write their stacks; returns for each None, or why the process wrote no stack."""
    before = [_size(process.stacks) for process in processes]
    obstacles = [_signalled(process) for process in processes]
    deadline = time.monotonic() + _DUMP_S
    for index, process in enumerate(processes):
        while obstacles[index] is None and _size(process.stacks) == before[index]:
            if time.monotonic() > deadline:
                obstacles[index] = f"process {process.pid} did not write its stack (state {_state(process)})"
            time.sleep(0.02)
    return obstacles


def _signalled(process: Pulse) -> str | None:
    """Signals a process to write its stacks; returns the reason if the process cannot write them."""
    state = _state(process)
    if state in ("T", "t"):
        return f"process {process.pid} is stopped (state {state}): a signal or a debugger did that"
    if state in ("?", "Z"):
        return f"process {process.pid} has ended"
    if process.stacks is None:
        return f"process {process.pid} keeps no stack: run.dir is not set, or cannot be written"
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGUSR1)
    return None


def _size(file: str | None) -> int:
    try:
        return 0 if file is None else Path(file).stat().st_size
    except OSError:
        return 0


def _state(process: Pulse) -> str:
    """Returns the kernel's letter for the state of a process; `?` if it has ended."""
    state, started = _stat(process.pid)
    return state if started == process.started else "?"  # a new process may have the same pid


def _stat(pid: int) -> tuple[str, int]:
    """Returns the kernel's letter for the state of a pid, and its start time in clock ticks (proc_pid_stat(5))."""
    try:
        columns = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return "?", 0
    return columns[0].decode(), int(columns[19])


def _own_node() -> str:
    return str(ray.get_runtime_context().get_node_id())
