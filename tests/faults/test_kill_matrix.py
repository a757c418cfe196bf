"""Whatever ends or stops a rank, wherever: it is noticed, replaced, and no bit of the job comes out otherwise.

Here each kind of fault strikes once, at moments apart; `benchmarks/faults.py` has every rank at every moment, and the
seconds that it takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.faulty_worker import HANGS, Fault, Fired, Supervised
from tests.support.process_resources import unnamed_files
from tests.support.recorded_job import MATRIX, TIMES, Outcome, job, recorded_batch
from tests.support.waiting import wait_until

# by the step at whose beginning each fault is armed; a checkpoint is made at the end of steps 2 and 4
CASES = {
    "stopped while it sleeps, then ended while it saves": {
        2: Fault(1, "sleep", "SIGSTOP"),
        4: Fault(1, "save middle", "exit"),
    },
    "holds the GIL while it sends weights, then a segmentation fault in the reference's forward": {
        3: Fault(0, "weight update", "GIL"),
        4: Fault(0, "reference log-probs", "SIGSEGV"),
    },
}


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


@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_is_lost_costs_time_and_not_one_bit(
    case: str, supervised: Supervised, undisturbed: dict[str, Outcome], receiver: Any, tmp_path: Path
) -> None:
    before = supervised.group.recoveries
    faults = {step: [fault] for step, fault in CASES[case].items()}
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


def test_batches_that_left_the_object_store_are_trained_on_again_to_the_same_bits(supervised: Supervised) -> None:
    group = supervised.group
    assert group.config.run.dir is not None

    def trained(at: int | None = None) -> list[dict[str, str]]:
        """The metrics of seven steps behind the checkpoint of step 0, and log-probs of the weights after them."""
        group.load(0)
        found = []
        for step in range(1, 8):
            if step == at:
                supervised.faults.arm(Fault(1, "after backward"))
            metrics = group.train_step(recorded_batch(step))
            found.append({name: value.hex() for name, value in metrics.items() if name not in TIMES})
        found.append({"log_probs": group.compute_log_probs(recorded_batch(0)).log_probs.tobytes().hex()})
        return found

    unkilled, before = trained(), len(group.recoveries)
    assert unnamed_files(group.config.run.dir), "some are on the disk alone"
    assert trained(at=7) == unkilled
    assert len(supervised.faults.fired()) == 1
    (recovery,) = group.recoveries[before:]
    assert recovery.calls_repeated > 6 and recovery.differences == ()
