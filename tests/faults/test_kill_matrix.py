"""Whatever ends or stops a rank, wherever: it is noticed, replaced, and no bit of the job comes out otherwise.

Here each kind of fault strikes once, at phases apart; `benchmarks/faults.py` has every rank at every phase, and the
seconds that it takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import MATRIX, Supervised
from tests.faults.faulty_worker import HANGS, Fault
from tests.faults.recorded_job import Outcome, job

# by what happens: at the beginning of which step it is armed (a checkpoint is made at the end of steps 2 and 4)
CASES = {
    "a segmentation fault in the reference's forward": (4, Fault(0, "reference log-probs", "SIGSEGV")),
    "ended while it saves": (4, Fault(1, "save middle", "exit")),
    "stopped while it sleeps": (2, Fault(1, "sleep", "SIGSTOP")),
    "holds the GIL while it sends weights": (3, Fault(0, "weight update", "GIL")),
}


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def job_with_faults(supervised: Supervised, receiver: Any, folder: Path, at: int, *faults: Fault) -> Outcome:
    """What a job leaves in which exactly these fire."""

    def arm(step: int) -> None:
        if step == at:
            supervised.faults.arm(*faults)

    outcome = job(supervised.group, receiver, folder, at_step=arm, **MATRIX)
    assert [fired.fault for fired in supervised.faults.fired()] == list(faults)
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_is_lost_costs_time_and_not_one_bit(
    case: str, supervised: Supervised, undisturbed: dict[str, Outcome], receiver: Any, tmp_path: Path
) -> None:
    at, fault = CASES[case]
    before = supervised.group.recoveries
    outcome = job_with_faults(supervised, receiver, tmp_path / "exported", at, fault)
    assert outcome == undisturbed["matrix"]
    (recovery,) = supervised.group.recoveries[len(before) :]
    code = "worker_hung" if fault.kind in HANGS else "worker_died"
    assert (recovery.code, recovery.rank, recovery.differences) == (code, fault.rank, ())
    assert recovery.calls_repeated > 0
    if fault.kind in HANGS:  # and not that the call took too long as a whole
        assert "has not answered for" in recovery.message
    (fired,) = supervised.faults.fired()
    assert wait_until(lambda: not Path(f"/proc/{fired.pid}").exists()), "nothing of what was lost stays behind"


@pytest.mark.slow
def test_a_rank_that_is_killed_while_another_is_replaced_is_replaced_too(
    supervised: Supervised, undisturbed: dict[str, Outcome], receiver: Any, tmp_path: Path
) -> None:
    before = supervised.group.recoveries
    first, second = Fault(0, "after optimiser step"), Fault(1, "init")
    outcome = job_with_faults(supervised, receiver, tmp_path / "exported", 4, first, second)
    assert outcome == undisturbed["matrix"]
    (recovery,) = supervised.group.recoveries[len(before) :]
    assert (recovery.rank, recovery.phase, recovery.differences) == (0, "train_step", ())
