"""A second thread's call is refused at once, says which call is running, and leaves that one unharmed."""

from __future__ import annotations

import threading
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import StateError
from slimefsdp.rpc import CALLS
from slimefsdp.trainer import Trainer
from slimefsdp.training import step
from tests.support.rank_pool import RankPool
from tests.support.refusals import assert_refusal
from tests.support.tiny_models import save_tiny_model
from tests.support.trainers import CPU, error_of, fingerprint, fresh_batch, settings, steps_then_weights

EXCLUSIVE = {name for name, call in CALLS.items() if call.is_exclusive}


def a_step_disturbed(rank: int, config: RunConfig, batches: list[RolloutBatch]) -> dict[str, Any]:
    """Another thread calls everything in the middle of a train step."""
    trainer = Trainer(config, device=CPU)
    found: dict[str, Any] = {}
    forward_backward = step.forward_backward

    def disturb() -> None:
        for name in sorted(EXCLUSIVE):
            method = getattr(trainer, name)
            needed = [p for p in signature(method).parameters.values() if p.default is p.empty]
            found[name] = error_of(lambda method=method, needed=needed: method(*needed))  # refused before they are read
        found["answers"] = trainer.health().updates_taken, trainer.memory().asleep, trainer.gradient_health()

    def disturbed(*args: Any) -> dict[str, float]:
        metrics = forward_backward(*args)
        thread = threading.Thread(target=disturb)
        thread.start()
        thread.join()
        return metrics

    losses = [trainer.train_step(batches[0])["loss"]]
    step.forward_backward = disturbed
    try:
        losses += [trainer.train_step(batch)["loss"] for batch in batches[1:]]
    finally:
        step.forward_backward = forward_backward
    return {"errors": found, "losses": losses, "weights": fingerprint(trainer.policy)}


def test_a_train_step_is_unharmed_by_calls_from_another_thread(ranks: RankPool, tmp_path: Path) -> None:
    config = settings(save_tiny_model(tmp_path / "model"), mesh={"dp": 2}, run={"dir": str(tmp_path)})
    batches = [fresh_batch(seed) for seed in range(2)]
    metrics, weights = ranks.run(2, steps_then_weights, config, batches)[0]
    for result in ranks.run(2, a_step_disturbed, config, batches):
        updates, asleep, health = result["errors"].pop("answers")
        assert (updates, asleep) == (1, ()) and np.isfinite(health.norm)
        assert set(result["errors"]) == EXCLUSIVE and len(EXCLUSIVE) == len(CALLS) - 3
        for name, error in result["errors"].items():
            assert_refusal(error, StateError, name, f"{name}()", "train_step()")
        assert result["losses"] == [values["loss"] for values in metrics] and result["weights"] == weights
