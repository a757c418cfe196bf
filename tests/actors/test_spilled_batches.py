"""Batches on the disk that a recovery may need: they come back to the bit, and leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given

from actors.spilled_batches import SpilledBatches
from slimefsdp.data.rollout import RolloutBatch
from slimefsdp.phase import batch_digest
from tests.support.process_resources import unnamed_files
from tests.support.rollouts import batches, three_samples


@given(batch=batches())
def test_a_batch_comes_back_to_the_bit_with_every_field(
    batch: RolloutBatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = SpilledBatches(tmp_path_factory.getbasetemp()).write(batch).read()
    assert found.same_as(batch) and batch_digest(found) == batch_digest(batch)


def test_a_file_is_gone_with_the_last_of_its_batches(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "of a new name"
    spilled = SpilledBatches(folder)
    kept = {number: spilled.write(RolloutBatch(**three_samples(rewards=[number] * 3))) for number in range(3)}
    spilled.begin_file()
    kept[3] = spilled.write(RolloutBatch(**three_samples()))
    assert [kept[number].read().rewards[0] for number in range(3)] == [0.0, 1.0, 2.0]
    assert len(unnamed_files(folder)) == 2 and not list(folder.iterdir())
    del kept[0], kept[1]
    assert len(unnamed_files(folder)) == 2
    del kept[2]
    assert len(unnamed_files(folder)) == 1
    assert kept[3].read().rewards is None
