"""Batches on the disk that a recovery may need: they come back to the bit, and leave nothing behind."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from actors.fault_tolerance.call_log import SpilledBatches
from slimefsdp.batching.prefix_tree import find_prefixes
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.training.prepare import PreparedBatch, batch_digest
from tests.support.plans import plan_of
from tests.support.process_resources import unnamed_files
from tests.support.rollouts import batches, three_samples


def prepared(batch: RolloutBatch | dict[str, Any]) -> PreparedBatch:
    found = batch if isinstance(batch, RolloutBatch) else RolloutBatch(**batch)
    plan = plan_of(
        found.lengths, dp=2, max_pack_tokens=int(found.lengths.max()), samples_per_update=2, epochs=2, seed=1,
        counts=np.ones(found.num_samples, dtype=bool), shared=find_prefixes(found.tokens, found.lengths),
        min_gain=-math.inf,
    )  # fmt: skip
    return PreparedBatch(found, plan)


@given(batch=batches())
def test_a_batch_comes_back_to_the_bit_with_every_field(
    batch: RolloutBatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    options: dict[str, Any] = {"loss": "value", "gae_lambda": 0.1 + 0.2, "denominator": 3}
    work = replace(prepared(batch), advantages=np.linspace(-1, 1, batch.num_response_tokens), **options)
    found = SpilledBatches(tmp_path_factory.getbasetemp()).write(work).read()
    assert found.batch.same_as(batch) and batch_digest(found.batch) == batch_digest(batch)
    assert found.plan.digest() == work.plan.digest()
    np.testing.assert_array_equal(found.advantages, work.advantages)
    assert (found.loss, found.gae_lambda, found.kl_coefficient, found.denominator) == ("value", 0.1 + 0.2, None, 3)
    for one, other in zip(found.plan.updates, work.plan.updates, strict=True):  # digests look at numbers alone
        assert [[pack.tolist() for pack in of_rank] for of_rank in one] == [
            [pack.tolist() for pack in of_rank] for of_rank in other
        ]


def test_a_file_is_gone_with_the_last_of_its_batches(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "of a new name"
    spilled = SpilledBatches(folder)
    kept = {number: spilled.write(prepared(three_samples(rewards=[number] * 3))) for number in range(3)}
    spilled.begin_file()
    kept[3] = spilled.write(prepared(three_samples()))
    assert [kept[number].read().batch.rewards[0] for number in range(3)] == [0.0, 1.0, 2.0]
    assert len(unnamed_files(folder)) == 2 and not list(folder.iterdir())
    del kept[0], kept[1]
    assert len(unnamed_files(folder)) == 2
    del kept[2]
    assert len(unnamed_files(folder)) == 1
    assert kept[3].read().batch.rewards is None
