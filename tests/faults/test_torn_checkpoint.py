"""A save that was cut off, or a checkpoint that was damaged when it is needed, costs more repeated calls and no bit.

What the store itself promises is in tests/checkpoint; here it is the supervisor that has to choose where to go on from.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.faulty_worker import Fault, Supervised
from tests.support.recorded_job import SAVES, Outcome, job

# by the step whose save is cut off there: the new checkpoint is the latest, while the call that made it was never
# answered
CUT_OFF = {2: "after replace .latest.tmp"}


def test_a_save_that_is_cut_off_is_made_again(
    supervised: Supervised, undisturbed: dict[str, Outcome], receiver: Any, tmp_path: Path
) -> None:
    recovered, fired = len(supervised.group.recoveries), []

    def arm(step: int) -> None:
        fired.extend(supervised.faults.fired())
        supervised.faults.arm(*([Fault(0, CUT_OFF[step])] if step in CUT_OFF else []))

    outcome = job(supervised.group, receiver, tmp_path / "exported", at_step=arm, **SAVES)
    assert outcome == undisturbed["saves"]
    assert [each.fault.moment for each in fired] == list(CUT_OFF.values())
    recoveries = supervised.group.recoveries[recovered:]
    assert [(recovery.call, recovery.checkpoint_step) for recovery in recoveries] == [
        ("save", step - 1) for step in CUT_OFF
    ], "the caller never had the later one, so the call log does not begin there"
    assert not any(recovery.differences for recovery in recoveries)


def truncate(checkpoint: Path) -> None:
    file = largest_file(checkpoint)
    file.write_bytes(file.read_bytes()[:-1])


def largest_file(checkpoint: Path) -> Path:
    return max(checkpoint.iterdir(), key=lambda file: file.stat().st_size)


# at the beginning of a step: what is done to which checkpoints, and to which the supervisor goes back
DAMAGES: dict[int, tuple[dict[int, Callable[[Path], object]], int]] = {
    5: ({4: truncate, 3: lambda checkpoint: largest_file(checkpoint).unlink()}, 2),
}


def test_checkpoints_that_were_damaged_are_passed_over_for_the_one_before(
    supervised: Supervised, undisturbed: dict[str, Outcome], receiver: Any, tmp_path: Path
) -> None:
    run_dir = supervised.group.config.run.dir
    assert run_dir is not None
    recovered, fired = len(supervised.group.recoveries), 0

    def damage_and_arm(step: int) -> None:
        nonlocal fired
        fired += len(supervised.faults.fired())
        supervised.faults.arm()
        if step in DAMAGES:
            for damaged, damage in DAMAGES[step][0].items():
                damage(run_dir / "checkpoints" / f"step_{damaged:08d}")
            supervised.faults.arm(Fault(1, "before forward"))

    outcome = job(supervised.group, receiver, tmp_path / "exported", at_step=damage_and_arm, **SAVES)
    assert outcome == undisturbed["saves"]
    assert fired == len(DAMAGES)
    recoveries = supervised.group.recoveries[recovered:]
    assert [recovery.checkpoint_step for recovery in recoveries] == [gone_back for _, gone_back in DAMAGES.values()]
    assert not any(recovery.differences for recovery in recoveries)
