"""`slimefsdp train` ends when it is asked to, with a checkpoint to go on from, and leaves no process behind however it
ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from actors import signals as module
from actors.cluster.cleanup import running_processes
from actors.run_dir import RunFolder, settings_text
from actors.signals import ONE_REQUEST_S, Interrupts
from slimefsdp.config import config_from_dict
from slimefsdp.errors import Interrupted
from slimefsdp.monitoring.metrics_log import read_metrics
from tests.support.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]
Processes = set[tuple[int, int]]  # pids with start times
STEPS = 50  # too many to be done before a signal comes
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class Run:
    """`slimefsdp train` in a process group of its own."""

    def __init__(self, folder: Path, settings: Path, *overrides: str) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "actors.cli", "train", str(settings), f"run.dir={folder}", *overrides]
        path = os.pathsep.join(map(str, (settings.parent, ROOT)))
        self.process = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self.process.pid

    def processes(self) -> Processes:
        """The driver and all that descend from it, as they are now."""
        table = running_processes()
        found = {self.pid}
        while children := {pid for pid, (parent, _) in table.items() if parent in found} - found:
            found |= children
        return {(pid, table[pid][1]) for pid in found if pid in table}

    def with_rows(self, number: int) -> Processes:
        """All processes at a time when so many rows of metrics are there."""
        file = self.folder / "metrics.jsonl"
        wait_until(
            lambda: self.process.poll() is not None or (file.exists() and file.read_text().count("\n") >= number)
        )
        found = self.processes()
        # driver, cleanup process, three of Ray's and two agents at the very least, and a rank
        assert self.process.poll() is None and len(found) >= 8, self.output()
        return found

    def rank(self) -> int:
        """The process of the only rank."""
        title = b"ray::TrainWorker"
        (pid,) = [pid for pid, _ in self.processes() if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title)]
        return pid

    def output(self) -> str:
        """All that it printed; waits for its end."""
        return self.process.communicate(timeout=PATIENCE_S)[0]


def left(processes: Processes) -> Processes:
    table = running_processes()
    return {(pid, started) for pid, started in processes if pid in table and table[pid][1] == started}


@pytest.fixture(scope="module")
def settings(make_config: Any, example: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of settings of a supervised run on one rank, without checkpoints."""
    shared = make_config(mesh={"dp": 1}, batch={"samples_per_update": 8})
    tree = {
        **shared.model_dump(mode="json", exclude_unset=True, exclude={"rollout"}),
        "algorithm": "sft",
        "run": {"steps": 1000},
        "data": {"train": str(example / "sft.jsonl")},
    }
    file = tmp_path_factory.mktemp("settings") / "sft.yaml"
    file.write_text(settings_text(config_from_dict(tree)))
    return file


@pytest.fixture
def start(settings: Path, tmp_path: Path) -> Iterator[Any]:
    runs: list[Run] = []

    def started(name: str, *overrides: str) -> Run:
        runs.append(Run(tmp_path / name, settings, *overrides))
        return runs[-1]

    yield started
    for run in runs:
        for pid, _ in left(run.processes()) if run.process.poll() is None else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.process.communicate()


# --------------------------------------------------------------------------------- the command in processes of its own


@linux
def test_a_run_that_was_asked_to_end_leaves_a_checkpoint_and_no_process(start: Any, tmp_path: Path) -> None:
    steps, export = f"run.steps={STEPS}", f"run.export_dir={tmp_path / 'model'}"
    interrupted = start("interrupted", steps, export)
    began = interrupted.with_rows(3)
    for pid, _ in began:  # all processes of the job, as a scheduler does it; and again the group, as `timeout` does
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    os.killpg(interrupted.pid, signal.SIGINT)
    printed = interrupted.output()
    assert interrupted.process.returncode == Interrupted.exit_code == 75, printed
    # the kernel may hand the driver the later signal first
    assert re.search(r"SIG(TERM|INT): the run ends after step \d+", printed), printed
    assert "checkpoint.resume=true" in printed
    assert not left(began) and not (tmp_path / "model").exists()
    done = int(read_metrics(interrupted.folder)[-1]["step"] or 0)
    assert 3 <= done < STEPS and RunFolder(interrupted.folder).checkpoint_steps == [done]


@linux
def test_a_killed_driver_and_one_that_is_asked_while_it_launches_leave_nothing_behind(start: Any) -> None:
    run, launching = start("killed"), start("launching")
    wait_until(lambda: len(launching.processes()) >= 5 or launching.process.poll() is not None)
    began = launching.processes()
    assert len(began) >= 5, launching.output()
    os.kill(launching.pid, signal.SIGTERM)
    launching.process.wait(timeout=PATIENCE_S)
    printed = launching.output()
    assert launching.process.returncode == 75 and "before the first step" in printed, printed
    assert wait_until(lambda: not left(began))

    began = run.with_rows(2)
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid, _ in began)
    shared_memory = set(re.findall(r"/dev/shm/\S+", maps))
    assert shared_memory, "the object store has mapped some"
    run.process.kill()
    assert wait_until(lambda: not left(began)), left(began)
    assert not [path for path in shared_memory if Path(path).exists()]


# ------------------------------------------------------------------------------------------------------ in this process


@pytest.fixture(autouse=True)
def signals_as_in_a_terminal() -> Iterator[None]:
    """Whoever runs the tests in the background has SIGINT ignored, and may have a SIGTERM of their own."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit statuses with which this process would have ended."""
    statuses: list[int] = []
    monkeypatch.setattr(module.os, "_exit", statuses.append)  # type: ignore[attr-defined]
    return statuses


def test_signals_within_a_second_are_one_request_and_a_later_one_ends_at_once(ends: list[int]) -> None:
    interrupts = Interrupts()
    assert not interrupts.requested
    with interrupts.listening(grace_s=60):
        interrupts.steps_begin(1, 1)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert wait_until(lambda: interrupts.requested)
        time.sleep(ONE_REQUEST_S)
        assert not ends
        os.kill(os.getpid(), signal.SIGINT)
        assert wait_until(lambda: bool(ends)) and ends == [130]


def test_the_grace_period_ends_a_run_that_goes_on_and_not_one_that_has_ended(ends: list[int]) -> None:
    for is_over in (False, True):
        with Interrupts().listening(grace_s=1.5) as interrupts:
            interrupts.steps_begin(1, 1)
            os.kill(os.getpid(), signal.SIGTERM)
            assert wait_until(lambda: interrupts.requested)
            assert is_over or wait_until(lambda: bool(ends))
    time.sleep(2.0)
    assert ends == [75]


def test_a_request_ends_the_run_after_the_step_that_it_is_in(
    ends: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    with Interrupts().listening(grace_s=60) as interrupts:
        interrupts.steps_begin(5, 8)
        assert not interrupts.step_done(5)
        os.kill(os.getpid(), signal.SIGTERM)  # while step 5 is saved, say
        assert wait_until(lambda: interrupts.requested)
        assert interrupts.step_done(6)
    told = capfd.readouterr().err
    assert re.findall(r"step (\d+)", told) == ["6"] and not ends


@pytest.mark.parametrize("asked_first", [True, False])
def test_once_all_is_saved_the_grace_period_ends_nothing_and_a_second_signal_still_does(
    ends: list[int], asked_first: bool
) -> None:
    with Interrupts().listening(grace_s=0.5) as interrupts:
        interrupts.steps_begin(1, 1)
        for happens in ("asked", "done") if asked_first else ("done", "asked"):
            if happens == "done":
                interrupts.done()
            else:
                os.kill(os.getpid(), signal.SIGTERM)
                assert wait_until(lambda: interrupts.requested)
        time.sleep(ONE_REQUEST_S + 0.5)
        assert not ends
        os.kill(os.getpid(), signal.SIGINT)
        assert wait_until(lambda: bool(ends)) and ends == [130]


def test_signals_mean_what_they_did_once_nobody_listens_and_never_in_a_forked_child() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads = threading.active_count()
    with Interrupts().listening(grace_s=60) as interrupts:
        interrupts.steps_begin(1, 1)
        child = os.fork()
        if child == 0:
            try:
                time.sleep(20)
            finally:  # whatever a signal raises here: the rest of the tests is the parent's
                os._exit(0)
        os.kill(child, signal.SIGTERM)  # as multiprocessing ends a pool
        assert os.waitpid(child, 0)[1] == signal.SIGTERM
        assert not wait_until(lambda: interrupts.requested, 0.3)
    assert {number: signal.getsignal(number) for number in before} == before
    assert wait_until(lambda: threading.active_count() <= threads)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)


def test_an_ignored_signal_stays_ignored(ends: list[int]) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does it to what runs in its background
    try:
        with Interrupts().listening(grace_s=60) as interrupts:
            interrupts.steps_begin(1, 1)
            os.kill(os.getpid(), signal.SIGINT)
            assert not wait_until(lambda: interrupts.requested, 0.3)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not ends
