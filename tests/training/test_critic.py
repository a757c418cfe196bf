"""The critic's Trainer: values and gradients of a plain model on any mesh, its own rate, its own checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForTokenClassification

from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError, ConfigError, ModelError, SlimeError, StateError
from slimefsdp.trainer import Trainer
from slimefsdp.training import step
from slimefsdp.training.plan import plan_everything, plan_training
from slimefsdp.training.prepare import PreparedBatch
from tests.support.classifiers import save_classifier, separate_values
from tests.support.comparisons import largest_difference
from tests.support.float64 import KeepFloat64
from tests.support.plain_critic import PlainCritic, critic_batch, critic_settings, plain_targets
from tests.support.rank_pool import RankPool
from tests.support.refusals import refused
from tests.support.tiny_models import TinyFolder, save_tiny_model

CPU = torch.device("cpu")
MESHES = pytest.mark.parametrize("mesh", [{"dp": 1}, {"dp": 2}, {"cp": 2}], ids=["1", "2 dp", "2 cp"])


def of_critic(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, Any]:
    """Values, one call's gradients, and after that a whole step."""
    with KeepFloat64():
        trainer = Trainer(config, "critic", device=CPU)
        values = trainer.compute_values(batch)
        metrics = trainer.forward_backward(batch, loss="value")
        gradients = {name: p.grad.full_tensor() for name, p in trainer.policy.named_weights()}
        trainer.zero_grad()
        trained = trainer.train_step(batch)
    weights = {name: p.full_tensor().detach() for name, p in trainer.policy.named_weights()}
    return {"values": values, "metrics": metrics, "gradients": gradients, "trained": trained, "weights": weights}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("critic"))


@MESHES
def test_values_gradients_and_a_step_equal_a_plain_critics_in_float64(
    folder: Path, ranks: RankPool, mesh: dict[str, int]
) -> None:
    config = critic_settings(
        folder,
        mesh=mesh,
        batch={"max_tokens_per_rank": 24 if "cp" in mesh else 48, "samples_per_update": 7},
        loss={"epochs": 1},
        critic={"lr": 0.1},
    )
    batch = critic_batch()
    targets = plain_targets(batch)
    plan = plan_training(config, batch, loss="value")
    assert [len(plan.samples_of(update)) for update in range(2)] == [7, 1] and plan.num_dropped == 0
    # of two data ranks one has nothing in the last update, and joins it all the same
    assert any(not len(pack) for update in plan.updates for packs in update for pack in packs) == (mesh == {"dp": 2})
    with KeepFloat64():
        plain = PlainCritic(folder, config)
        expected = separate_values(plain.model, batch).detach()
        loss = plain.backward(batch, targets, np.arange(batch.num_samples))
        gradients = plain.gradients()
        plain.optimizer.zero_grad()
        start, losses = plain.weights(), []
        for update in range(len(plan.updates)):
            losses.append(plain.backward(batch, targets, plan.samples_of(update)))
            plain.step()
    assert largest_difference(plain.weights(), start) > 1e-2
    for found in ranks.run(2 if max(mesh.values()) == 2 else 1, of_critic, config, batch):
        np.testing.assert_allclose(found["values"], expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(found["metrics"]["loss"], loss, rtol=1e-12)
        assert largest_difference(found["gradients"], gradients) <= 1e-12
        np.testing.assert_allclose(found["trained"]["loss"], np.mean(losses), rtol=1e-12)
        assert found["trained"]["lr"] == 0.1
        assert largest_difference(found["weights"], plain.weights()) <= 1e-12


def inputs_of_critic(rank: int, config: RunConfig, batch: RolloutBatch, options: dict[str, float]) -> np.ndarray:
    trainer = Trainer(config, "critic", device=CPU)
    plan = plan_everything(config, batch, data_ranks=1)
    found, _ = step.token_inputs(trainer._state, PreparedBatch(batch, plan, "value", **options))
    assert found.returns is not None
    return found.returns.numpy()


def test_targets_take_the_kl_off_and_another_lambda_where_they_are_asked_to(folder: Path, ranks: RankPool) -> None:
    batch = critic_batch()
    assert batch.old_log_probs is not None and batch.ref_log_probs is not None
    log_ratio = batch.old_log_probs.astype(np.float64) - batch.ref_log_probs.astype(np.float64)
    loss = {"kl_coefficient": 0.3, "kl_in": "reward", "kl_estimator": "k1"}
    for config, options, expected in (
        (critic_settings(folder), {}, plain_targets(batch)),
        (critic_settings(folder), {"gae_lambda": 1.0}, plain_targets(batch, 1.0)),
        (critic_settings(folder, loss=loss), {}, plain_targets(batch, kl=0.3 * log_ratio)),
        (
            critic_settings(folder, loss=loss), {"gae_lambda": 1.0, "kl_coefficient": 0.1},
            plain_targets(batch, 1.0, kl=0.1 * log_ratio),
        ),
    ):  # fmt: skip
        (found,) = ranks.run(1, inputs_of_critic, config, batch, options)
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    given = batch.replace(returns=np.arange(batch.num_response_tokens, dtype=np.float32))
    (found,) = ranks.run(1, inputs_of_critic, critic_settings(folder), given, {})
    np.testing.assert_array_equal(found, given.returns)


def one_step_from_zero(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, float]:
    trainer = Trainer(config, "critic", device=CPU)
    values = trainer.compute_values(batch)
    assert values.dtype == np.float32 and not values.any()
    metrics = trainer.train_step(batch.replace(values=values))
    assert trainer.compute_values(batch).any() and trainer.check_sync().is_in_sync
    return metrics


def test_metrics_are_those_of_all_ranks_tokens(tiny_folder: TinyFolder, ranks: RankPool) -> None:
    config = critic_settings(tiny_folder(), mesh={"dp": 2}, batch={"samples_per_update": None}, loss={"epochs": 1})
    batch = critic_batch()
    returns = plain_targets(batch.replace(values=np.zeros(batch.num_response_tokens)))[batch.mask]
    for metrics in ranks.run(2, one_step_from_zero, config, batch):
        np.testing.assert_allclose(metrics["return"], returns.mean(), rtol=1e-9)
        np.testing.assert_allclose(metrics["loss"], 0.5 * (returns**2).mean(), rtol=1e-9)
        assert metrics["value"] == metrics["clip_fraction"] == 0.0 and metrics["updates"] == 1.0
        assert abs(metrics["explained_variance"]) < 1e-9  # zeros explain nothing


def errors_of_roles(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, Any]:
    critic, actor = (Trainer(config, role, device=CPU) for role in ("critic", "actor"))
    bare = batch.replace(values=None)
    calls: dict[str, Any] = {
        "compute_log_probs": lambda: critic.compute_log_probs(batch),
        "update_weights": lambda: critic.update_weights([]),
        "update_ref": lambda: critic.update_ref(),
        "compute_values": lambda: actor.compute_values(batch),
        "loss": lambda: critic.forward_backward(batch),
        "actor's loss": lambda: actor.forward_backward(batch, loss="value"),
        "values": lambda: critic.train_step(bare),
        "actor's values": lambda: actor.train_step(bare),
        "gae_lambda": lambda: actor.train_step(batch, gae_lambda=1.0),
    }
    found: dict[str, Any] = {}
    for name, call in calls.items():
        with pytest.raises(SlimeError) as caught:
            call()
        found[name] = (type(caught.value), caught.value.field, bool(caught.value.hint))
    before = critic.compute_values(batch)
    critic.sleep()
    assert critic.memory().asleep and (critic.compute_values(batch) == before).all()
    return found


def test_calls_that_make_no_sense_on_a_role_are_refused(tiny_folder: TinyFolder, ranks: RankPool) -> None:
    config = critic_settings(tiny_folder())
    (found,) = ranks.run(1, errors_of_roles, config, critic_batch())
    assert found == {
        **{name: (StateError, name, True) for name in ("compute_log_probs", "update_weights", "update_ref")},
        "compute_values": (StateError, "compute_values", True),
        "loss": (ConfigError, "loss", True),
        "actor's loss": (ConfigError, "loss", True),
        "values": (BatchError, "values", True),
        "actor's values": (BatchError, "values", True),
        "gae_lambda": (ConfigError, "gae_lambda", True),
    }


def save_and_export(rank: int, config: RunConfig, batch: RolloutBatch, folder: Path) -> Any:
    trainer = Trainer(config, "critic", device=CPU)
    trainer.train_step(batch)
    for number in (1, 2, 3):
        path = trainer.save(number, {"cursor": number})
    values = trainer.compute_values(batch)
    trainer.export_hf(folder)
    trainer.train_step(batch)
    assert (trainer.compute_values(batch) != values).any()
    assert trainer.load(2) == {"cursor": 2}
    np.testing.assert_array_equal(trainer.compute_values(batch), values)
    return path, values


def load_and_continue(rank: int, config: RunConfig, batch: RolloutBatch) -> np.ndarray:
    trainer = Trainer(config, "critic", device=CPU)
    trainer.load("latest")
    return trainer.compute_values(batch)


def test_checkpoints_are_in_a_folder_of_their_own_and_an_export_opens_as_a_classifier(
    tmp_path: Path, ranks: RankPool
) -> None:
    run, export = tmp_path / "run", tmp_path / "exported"
    config = critic_settings(
        save_tiny_model(tmp_path / "model", tie_word_embeddings=True), run={"dir": str(run)}, mesh={"dp": 2},
        precision={"compute_dtype": "float32"}, checkpoint={"keep_last": 2},
    )  # fmt: skip
    batch = critic_batch()
    path, values = ranks.run(2, save_and_export, config, batch, export)[0]
    assert path.parent == run / "critic" / "checkpoints" and not (run / "checkpoints").exists()
    assert sum(child.is_dir() for child in path.parent.iterdir()) == 2
    model = AutoModelForTokenClassification.from_pretrained(export, num_labels=1, attn_implementation="eager").eval()
    with torch.no_grad():
        np.testing.assert_allclose(values, separate_values(model, batch), atol=1e-5)
    # on another mesh, and from the export as the folder of a critic
    alone = config.model_copy(update={"mesh": config.mesh.model_copy(update={"dp": 1})})
    np.testing.assert_allclose(ranks.run(1, load_and_continue, alone, batch)[0], values, atol=1e-5)
    again = alone.model_copy(update={"critic": config.critic.model_copy(update={"path": export})})
    np.testing.assert_allclose(ranks.run(1, values_of, again, batch)[0], values, atol=1e-5)


def values_of(rank: int, config: RunConfig, batch: RolloutBatch) -> np.ndarray:
    return Trainer(config, "critic", device=CPU).compute_values(batch)


def test_a_critic_that_cannot_be_loaded_names_its_setting(tmp_path: Path, ranks: RankPool) -> None:
    two = save_classifier(tmp_path / "two", labels=2)
    config = critic_settings(save_tiny_model(tmp_path / "model"), critic={"path": str(two)})
    with refused(ModelError, "critic.path", two, 2):
        ranks.run(1, values_of, config, critic_batch())
