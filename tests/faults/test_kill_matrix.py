"""Whatever ends or stops a rank, wherever: it is noticed, replaced, and no bit of the job comes out otherwise.

Here a rank hangs, ranks end, and one ends while another is replaced; `benchmarks/faults.py` has every kind of fault at
every rank and moment, and the seconds that it takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.faulty_worker import HANGS, Fault, Fired, Supervised
from tests.support.recorded_job import MATRIX, Outcome, job
from tests.support.waiting import wait_until

# by the step at whose beginning each fault is armed; a checkpoint is made at the end of steps 2 and 4
FAULTS = {2: Fault(1, "sleep", "SIGSTOP"), 4: Fault(1, "save middle", "exit")}


def job_with_faults(
    supervised: Supervised, receiver: Any, folder: Path, faults: Mapping[int, Sequence[Fault]]
) -> tuple[Outcome, list[Fired]]:
    """What a job leaves in which exactly these fire, armed at the beginning of these steps."""
    fired: list[Fired] = []

    def arm(step: int) -> None:
        if step in faults:
            fired.extend(supervised.faults.fired())  # which the next ones take the place of
            supervised.faults.arm(*faults[step])

    supervised.faults.arm()
    outcome = job(supervised.group, receiver, folder, at_step=arm, **MATRIX)
    fired += supervised.faults.fired()
    assert [one.fault for one in fired] == [fault for armed in faults.values() for fault in armed]
    return outcome, fired


def test_ranks_that_hang_or_end_cost_time_and_not_one_bit(
    supervised: Supervised, undisturbed: dict[str, Outcome], receiver: Any, tmp_path: Path
) -> None:
    before = supervised.group.recoveries
    faults = {step: [fault] for step, fault in FAULTS.items()}
    outcome, all_fired = job_with_faults(supervised, receiver, tmp_path / "exported", faults)
    assert outcome == undisturbed["matrix"]
    for recovery, fired in zip(supervised.group.recoveries[len(before) :], all_fired, strict=True):
        fault = fired.fault
        code = "worker_hung" if fault.kind in HANGS else "worker_died"
        assert (recovery.code, recovery.rank, recovery.differences) == (code, fault.rank, ())
        assert recovery.calls_repeated > 0
        if fault.kind in HANGS:  # and not that the call took too long as a whole
            assert "has not answered for" in recovery.message
    lost = [Path(f"/proc/{fired.pid}") for fired in all_fired]
    assert wait_until(lambda: not any(map(Path.exists, lost))), "nothing of what was lost stays behind"


def test_a_rank_that_is_killed_while_another_is_replaced_is_replaced_too(
    supervised: Supervised, undisturbed: dict[str, Outcome], receiver: Any, tmp_path: Path
) -> None:
    before = supervised.group.recoveries
    first, second = Fault(0, "after optimiser step"), Fault(1, "init")
    outcome, _ = job_with_faults(supervised, receiver, tmp_path / "exported", {4: [first, second]})
    assert outcome == undisturbed["matrix"]
    (recovery,) = supervised.group.recoveries[len(before) :]
    assert (recovery.rank, recovery.call, recovery.differences) == (0, "train_step", ())
