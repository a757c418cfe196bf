"""Under lora.rank a critic trains adapters of its own and its head, as one of peft on one plain process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForTokenClassification

from slimefsdp.config import RunConfig
from slimefsdp.convert.convert import checkpoint_to_hugging_face
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import CheckpointError, SlimeError
from slimefsdp.trainer import Trainer
from slimefsdp.training.plan import plan_training
from tests.support.classifiers import save_classifier, separate_values
from tests.support.comparisons import largest_difference
from tests.support.float64 import KeepFloat64
from tests.support.plain_critic import PlainCritic, critic_batch, critic_settings, plain_targets
from tests.support.plain_lora import adapters_of, base_of, fill_b
from tests.support.rank_pool import RankPool
from tests.support.refusals import refused
from tests.support.tiny_models import save_tiny_model
from tests.support.trainers import error_of

CPU = torch.device("cpu")
HEAD = {"score.weight", "score.bias"}
MESHES: dict[str, dict[str, Any]] = {
    "one rank": {"mesh": {"dp": 1}},
    "cp 2": {"mesh": {"cp": 2}},
    "two copies of two shards": {"mesh": {"dp_replicate": 2, "dp": 2}},
    "dp 2, recomputed, summed once": {
        "mesh": {"dp": 2},
        "fsdp": {"sharding": "optimizer"},
        "model": {"activation_checkpointing": "full"},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("critic"))


def lora_settings(path: Path, **sections: Any) -> RunConfig:
    sections["model"] = {"path": str(path), **sections.get("model", {})}
    sections["loss"] = {"epochs": 1, **sections.get("loss", {})}
    return critic_settings(path, lora={"rank": 3, "alpha": 7.0}, critic={"lr": 0.1}, **sections)


def critic_training(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, Any]:
    with KeepFloat64():
        trainer = Trainer(config, "critic", device=CPU)
        fill_b(trainer)
        start, frozen = adapters_of(trainer), base_of(trainer)
        values = trainer.compute_values(batch)
        trainer.forward_backward(batch, loss="value")
        gradients = {name: p.grad.full_tensor() for name, p in trainer.policy.trained_weights()}
        trainer.zero_grad()
        trainer.train_step(batch)
    moved = {name for name, weight in base_of(trainer).items() if not torch.equal(weight, frozen[name])}
    in_sync = trainer.check_sync().is_in_sync
    held = {"values": values, "gradients": gradients, "moved": moved, "in sync": in_sync}
    return {"start": start, "end": adapters_of(trainer), **held}


@pytest.mark.parametrize("spread", MESHES)
def test_a_critics_adapters_and_head_are_those_of_peft_on_any_mesh(folder: Path, ranks: RankPool, spread: str) -> None:
    config, batch = lora_settings(folder, **MESHES[spread]), critic_batch()
    found = ranks.run(config.ranks, critic_training, config, batch)
    start, targets = found[0]["start"], plain_targets(batch)
    plan = plan_training(config, batch, loss="value")
    assert len(plan.updates) >= 3
    with KeepFloat64():
        plain = PlainCritic(folder, config, start)
        assert start.keys() == plain.trained.keys() and start.keys() > HEAD
        expected = separate_values(plain.model, batch).detach()
        plain.backward(batch, targets, np.arange(batch.num_samples))
        gradients = plain.gradients()
        plain.optimizer.zero_grad()
        for update in range(len(plan.updates)):
            plain.backward(batch, targets, plan.samples_of(update))
            plain.step()
    assert largest_difference(plain.weights(), start) > 1e-2
    for ours in found:
        np.testing.assert_allclose(ours["values"], expected, rtol=0, atol=1e-12)
        assert largest_difference(ours["gradients"], gradients) <= 1e-12
        assert largest_difference(ours["end"], plain.weights()) <= 1e-12
        assert ours["moved"] == HEAD and ours["in sync"]


def save_and_export(rank: int, config: RunConfig, batch: RolloutBatch, folder: Path) -> dict[str, Any]:
    trainer = Trainer(config, "critic", device=CPU)
    first = trainer.compute_values(batch)
    trainer.train_step(batch)
    saved, values = trainer.save(1, {}), trainer.compute_values(batch)
    dtypes = {name: p.dtype for name, p in trainer.policy.all_parameters()}
    trainer.export_hf(folder)
    return {"first": first, "values": values, "saved": saved, "dtypes": dtypes}


def load(rank: int, config: RunConfig, batch: RolloutBatch) -> tuple[SlimeError | None, np.ndarray]:
    trainer = Trainer(config, "critic", device=CPU)
    return error_of(trainer.load), trainer.compute_values(batch)


def test_a_checkpoint_holds_adapters_and_head_alone_and_an_export_is_merged(ranks: RankPool, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    sections: dict[str, Any] = {"run": {"dir": str(tmp_path / "run")}, "precision": {"compute_dtype": "bfloat16"}}
    config, batch = lora_settings(model, mesh={"dp": 2}, **sections), critic_batch()
    (found, _) = ranks.run(2, save_and_export, config, batch, tmp_path / "exported")
    assert not found["first"].any() and found["values"].any()  # of a causal LM the head begins at 0
    # what is frozen is stored in what it computes in, the head and adapters are not
    wide = {name for name, dtype in found["dtypes"].items() if dtype == torch.float32}
    assert wide == {name for name in found["dtypes"] if "lora_" in name} | HEAD
    held = {name for file in found["saved"].glob("*.safetensors") for name in load_file(file)}
    assert {name for name in held if name.startswith("model.")} == {f"model.{name}" for name in wide}
    exported = AutoModelForTokenClassification.from_pretrained(tmp_path / "exported", num_labels=1).eval()
    with torch.no_grad():
        np.testing.assert_allclose(found["values"], separate_values(exported, batch), atol=0.05)
    ((error, again),) = ranks.run(1, load, lora_settings(model, mesh={"dp": 1}, **sections), batch)
    assert error is None
    np.testing.assert_allclose(again, found["values"], atol=0.02)
    for like in (None, model):  # a folder of peft's has no place for the head
        with refused(CheckpointError, "path", found["saved"]):
            checkpoint_to_hugging_face(found["saved"], tmp_path / "converted", like, dtype=None, note=print)
    other = save_tiny_model(tmp_path / "other", seed=1)
    elsewhere = config.model_copy(update={"critic": config.critic.model_copy(update={"path": other})})
    for error, _ in ranks.run(2, load, elsewhere, batch):
        assert isinstance(error, CheckpointError) and error.field == "critic.path"
