"""What a KL decides: the coefficient that follows its target, and the end of a step."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from slimefsdp.algorithms.policy_losses import HORIZON, next_coefficient
from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import CheckpointError
from slimefsdp.trainer import Trainer
from slimefsdp.training.plan import plan_training
from tests.support.checkpoints import forge_info
from tests.support.plain_step import make_batch
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import save_pair
from tests.support.trainers import CPU, MESHES, error_of, fingerprint, fresh_batch, ranks_of, settings, step_and_updates


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_pair(tmp_path_factory.mktemp("models"))


# ---------------------------------------------------------------------- a coefficient that follows a target

TARGET = {"kl_coefficient": 0.2, "kl_target": 0.01}


def steered_and_restored(rank: int, config: RunConfig, fixed: dict[str, Any], batch: RolloutBatch) -> dict[str, Any]:
    """Three steps with a target; the third also from a checkpoint of the second, with a target and without."""
    trainer = Trainer(config, device=CPU)
    metrics = [trainer.train_step(batch) for _ in range(2)]
    trainer.save(2)
    metrics.append(trainer.train_step(batch))
    found: dict[str, Any] = {"metrics": metrics, "weights": fingerprint(trainer.policy)}
    found["in step"] = trainer.check_sync().is_in_sync
    loss = {**fixed, "kl_coefficient": metrics[2]["kl_coefficient"]}
    for name, section in (("with", config.loss.model_dump(exclude_unset=True)), ("without", loss)):
        again = Trainer(settings_like(config, section), device=CPU)
        again.load(2)
        found[name] = again.train_step(batch), fingerprint(again.policy)
    return found


def settings_like(config: RunConfig, loss: dict[str, Any]) -> RunConfig:
    tree = config.model_dump(mode="json", exclude_unset=True)
    return config_from_dict({**tree, "loss": loss})


@pytest.mark.parametrize(
    "mesh, how",
    [
        pytest.param("one rank", {}, id="in the loss"),
        pytest.param("two data ranks", {"kl_estimator": "full"}, id="exact"),
        pytest.param("two context ranks", {"kl_in": "reward", "kl_estimator": "k1"}, id="in the reward"),
    ],
)
def test_the_coefficient_follows_its_target_is_used_and_comes_back_with_a_checkpoint(
    pair: tuple[Path, Path], ranks: RankPool, tmp_path: Path, mesh: str, how: dict[str, Any]
) -> None:
    config = settings(
        pair[0],
        mesh=MESHES[mesh],
        loss={**TARGET, **how},
        reference={"path": str(pair[1])},
        run={"dir": str(tmp_path)},
    )
    batch = fresh_batch()
    for found in ranks.run(ranks_of(MESHES[mesh]), steered_and_restored, config, how, batch):
        steps = found["metrics"]
        coefficient = 0.2
        for step in steps:
            assert step["kl_coefficient"] == coefficient
            coefficient = next_coefficient(coefficient, step["kl_ref"], 0.01, batch.num_samples)
        assert len({step["kl_coefficient"] for step in steps}) == 3
        assert found["in step"]
        metrics, weights = found["with"]
        assert metrics["kl_coefficient"] == steps[2]["kl_coefficient"] and weights == found["weights"]
        metrics, weights = found["without"]
        assert "kl_coefficient" not in metrics and weights == found["weights"]


def loaded_coefficients(rank: int, config: RunConfig, batch: RolloutBatch, saved: list[Any]) -> list[Any]:
    """The coefficient of the step after loading a checkpoint that has this one, or the error of the load."""
    trainer = Trainer(config, device=CPU)
    trainer.train_step(batch)
    folder, found = trainer.save(1), []
    for value in saved:
        if value != "its own":
            forge_info(folder, "kl_coefficient", value)
        again = Trainer(config, device=CPU)
        error = error_of(again.load)
        found.append(error or again.train_step(batch)["kl_coefficient"])
    return found


def test_a_checkpoint_with_its_coefficient_loads_and_one_of_a_wrong_kind_does_not(
    pair: tuple[Path, Path], ranks: RankPool, tmp_path: Path
) -> None:
    config = settings(pair[0], loss=TARGET, reference={"path": str(pair[1])}, run={"dir": str(tmp_path)})
    moved, *errors = ranks.run(1, loaded_coefficients, config, fresh_batch(), ["its own", None, "0.2", -1.0])[0]
    assert moved == pytest.approx(0.2 * (1 + 0.2 * 8 / HORIZON))
    for error in errors:
        assert isinstance(error, CheckpointError) and error.field == "kl_coefficient"


# ---------------------------------------------------------------------- the end of a step by its KL


def early_stop(folder: Path, mesh: dict[str, int], max_kl: float | None) -> RunConfig:
    loss = {"epochs": 2} if max_kl is None else {"epochs": 2, "max_kl": max_kl}
    return settings(folder, mesh=mesh, loss=loss, batch={"samples_per_update": 3}, optim={"name": "sgd", "lr": 0.05})


def whole_step(rank: int, config: RunConfig, batch: RolloutBatch) -> tuple[list[float], dict[str, float]]:
    trainer = Trainer(config, device=CPU)
    metrics, recorded = step_and_updates(trainer, batch)
    return [update["kl_old"] for update in recorded], metrics


def stopped_and_shorter(rank: int, config: RunConfig, batch: RolloutBatch, updates: int) -> dict[str, Any]:
    """A step that ends early, and one of so many updates; what optimiser steps after each make of equal gradients."""
    found = {}
    plan = plan_training(config, batch)
    shorter = dataclasses.replace(
        plan, updates=plan.updates[:updates], num_first_epoch_updates=min(updates, plan.num_first_epoch_updates)
    )
    for name in ("stopped", "shorter"):
        trainer = Trainer(config, device=CPU)
        metrics = trainer.train_step(batch, plan=plan if name == "stopped" else shorter)
        weights = [fingerprint(trainer.policy)]
        trainer.train_step(batch, plan=dataclasses.replace(shorter, updates=shorter.updates[:1]))
        found[name] = metrics, [*weights, fingerprint(trainer.policy)], trainer.updates_taken
    return found


@pytest.mark.parametrize("mesh, taken", [("one rank", 1), *((mesh, 3) for mesh in MESHES)])
def test_a_step_ends_before_the_first_update_beyond_max_kl_as_if_it_had_been_planned_so(
    pair: tuple[Path, Path], ranks: RankPool, mesh: str, taken: int
) -> None:
    world, batch = ranks_of(MESHES[mesh]), fresh_batch()
    kls, metrics = ranks.run(world, whole_step, early_stop(pair[0], MESHES[mesh], None), batch)[0]
    assert metrics["early_stopped_updates"] == 0 and metrics["updates"] == len(kls) > taken + 1
    assert kls[0] == 0.0 and kls[taken] > 1.001 * max(kls[:taken])
    config = early_stop(pair[0], MESHES[mesh], 0.5 * (max(kls[:taken]) + kls[taken]))
    for found in ranks.run(world, stopped_and_shorter, config, batch, taken):
        (stopped, weights, counted), (shorter, expected_weights, expected_count) = found["stopped"], found["shorter"]
        assert stopped["early_stopped_updates"] == len(kls) - taken and shorter["early_stopped_updates"] == 0
        assert weights == expected_weights and len(set(weights)) == 2
        assert counted == expected_count == taken + 1
        same = ("loss", "kl_old", "grad_norm", "lr")
        assert {name: stopped[name] for name in same} == {name: shorter[name] for name in same}


def test_old_log_probs_beyond_max_kl_leave_the_policy_as_it_was(pair: tuple[Path, Path], ranks: RankPool) -> None:
    config = early_stop(pair[0], {"dp": 2}, 0.01)
    for stopped, moved in ranks.run(2, step_of_stale_samples, config, make_batch(Path())):
        assert stopped["early_stopped_updates"] > 1 and stopped["updates"] == 0 and "loss" not in stopped
        assert stopped["kl_old_stopped"] > 0.01
        assert not moved


def step_of_stale_samples(rank: int, config: RunConfig, batch: RolloutBatch) -> tuple[dict[str, float], bool]:
    trainer = Trainer(config, device=CPU)
    before = fingerprint(trainer.policy)
    trainer.train_step(batch)  # leaves no gradients, or the next one were an error
    return trainer.train_step(batch), fingerprint(trainer.policy) != before
