"""What a WorkerGroup decides on the driver, before it asks Ray or any rank for something."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.cluster import ray_errors
from actors.workers.worker_group import WorkerGroup
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError, ConfigError, ResourceError, SlimeError, StateError
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.preparation.plan import plan_training
from tests.support.runs import Untouchable


@pytest.fixture(scope="module")
def group(make_config: Any, example: Path) -> Any:
    folder = read_model_folder(example / "model")
    watchdog: Any = Untouchable()
    return WorkerGroup(make_config(), "actor", [Untouchable()] * 2, folder.vocab_size, folder, watchdog=watchdog)


BAD_CALLS: dict[str, tuple[Callable[[Any, RolloutBatch], Any], type[SlimeError], str]] = {
    "a token id outside the vocabulary": (
        lambda group, batch: group.train_step(batch.replace(tokens=np.full(batch.num_tokens, 320))),
        BatchError,
        "tokens",
    ),
    "a sample over the token budget": (
        lambda group, _: group.compute_log_probs(
            RolloutBatch(tokens=np.arange(65), lengths=[65], response_lengths=[1])
        ),
        BatchError,
        "lengths",
    ),
    "another temperature": (
        lambda group, batch: group.forward_backward(batch.replace(temperature=0.7)),
        BatchError,
        "temperature",
    ),
    "no rewards, for a future": (
        lambda group, batch: group.train_step_async(batch.replace(rewards=None)),
        BatchError,
        "rewards",
    ),
    "a dictionary": (lambda group, batch: group.train_step({"tokens": batch.tokens}), BatchError, "batch"),
    "an unknown model": (lambda group, batch: group.compute_log_probs(batch, "critic"), ConfigError, "model"),
    "an unknown loss": (lambda group, batch: group.forward_backward(batch, loss="ppo"), ConfigError, "loss"),
    "another batch's plan": (
        lambda group, batch: group.train_step(batch.select([4, 5]), plan_training(group.config, batch)),
        BatchError,
        "plan",
    ),
    "a critic's call": (lambda group, batch: group.compute_values(batch), StateError, "compute_values"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_bad_call_is_refused_before_any_rank_sees_it(case: str, group: Any, batch: RolloutBatch) -> None:
    call, kind, field = BAD_CALLS[case]
    with pytest.raises(kind) as caught:
        call(group, batch)
    assert type(caught.value) is kind and caught.value.field == field and caught.value.hint
    assert caught.value.rank is None


def test_once_the_cluster_is_gone_no_call_reaches_a_rank(
    group: Any, batch: RolloutBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_errors, "cluster_is_gone", lambda: True)
    for call in (lambda: group.train_step(batch), lambda: group.update_weights([]), group.memory, group.update_ref):
        with pytest.raises(ResourceError):
            call()
