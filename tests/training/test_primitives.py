"""A loop of one's own: losses and optimiser settings by call, weights of tokens, log-probs of a pass, named saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slimefsdp.checkpoint.store import CheckpointStore
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import CheckpointError, ConfigError, SlimeError
from slimefsdp.results import ForwardBackward
from slimefsdp.rpc import UpdateSettings
from slimefsdp.trainer import Trainer
from tests.support.comparisons import largest_difference
from tests.support.float64 import KeepFloat64
from tests.support.plain_step import TEMPERATURE, make_batch, settings
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import plain_model
from tests.support.trainers import error_of, fingerprint

CPU = torch.device("cpu")
ALONE: dict[str, Any] = {"loss": {"kl_coefficient": 0.0, "entropy_coefficient": 0.0, "epochs": 1}}
UPDATES = (
    UpdateSettings(lr=0.02, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1, max_grad_norm=0.0),
    UpdateSettings(lr=0.01, max_grad_norm=0.5),
    UpdateSettings(betas=(0.0, 0.5), eps=1e-2),
)
CISPO = {"policy": "cispo", "clip_low": 0.3, "clip_high": 0.4}
MESHES = {
    "one rank": {"dp": 1},
    "dp 2": {"dp": 2},
    "two copies of two context ranks": {"dp": 1, "dp_replicate": 2, "cp": 2},
}


def signed_batch(folder: Path) -> RolloutBatch:
    batch = make_batch(folder)
    rng = np.random.default_rng(7)
    count = batch.num_response_tokens
    return batch.replace(
        loss_weights=rng.normal(size=count), advantages=rng.normal(size=count), rewards=None, group_ids=None
    )


def own_loop(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, Any]:
    """Three updates, each of a cross-entropy with signed weights and a CISPO loss, summed."""
    said, metrics = [], []
    with KeepFloat64():
        trainer = Trainer(config, device=CPU)
        for update in UPDATES:
            first = trainer.forward_backward(batch, "sft", denominator=1.0, with_log_probs=True)
            assert isinstance(first, ForwardBackward)
            trainer.forward_backward(batch, "policy", denominator=1.0, settings=CISPO)
            said.append(first.log_probs)
            metrics.append(trainer.optimizer_step(update))
        again = trainer.compute_log_probs(batch)
    weights = {name: p.full_tensor().detach().clone() for name, p in trainer.policy.named_weights()}
    return {"said": said, "metrics": metrics, "weights": weights, "again": again}


class PlainLoop:
    """The same updates of torch's AdamW on one process, each loss written from its formula."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self.model, self.config = plain_model(folder, torch.float64), config
        decayed = [p for name, p in self.model.named_parameters() if p.ndim > 1 and "embed" not in name]
        kept = [p for p in self.model.parameters() if not any(p is other for other in decayed)]
        optim = config.optim
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": kept, "weight_decay": 0.0}],
            lr=optim.lr, betas=optim.betas, eps=optim.eps,
        )  # fmt: skip

    def log_probs(self, batch: RolloutBatch) -> torch.Tensor:
        found = []
        for sample in batch.to_samples():
            tokens, response = torch.as_tensor(np.array(sample["tokens"])), sample["response_length"]
            logits = self.model(input_ids=tokens[None]).logits[0, :-1] / TEMPERATURE
            found.append(logits.log_softmax(-1)[-response:].gather(-1, tokens[-response:, None])[:, 0])
        return torch.cat(found)

    def update(self, batch: RolloutBatch, own: UpdateSettings) -> np.ndarray:
        assert batch.loss_weights is not None and batch.advantages is not None and batch.old_log_probs is not None
        weights = torch.from_numpy(np.where(batch.mask, batch.loss_weights, 0.0))
        log_probs = self.log_probs(batch)
        ratio = (log_probs - torch.tensor(batch.old_log_probs).double()).exp().detach()
        clipped = ratio.clamp(1 - CISPO["clip_low"], 1 + CISPO["clip_high"])  # type: ignore[operator]
        cispo = -clipped * torch.tensor(batch.advantages).double() * log_probs
        (weights * (cispo - log_probs)).sum().backward()
        most = self.config.optim.max_grad_norm if own.max_grad_norm is None else own.max_grad_norm
        if most:
            # torch's own adds 1e-6 to the norm
            norm = torch.stack([p.grad.square().sum() for p in self.model.parameters()]).sum().sqrt()
            for parameter in self.model.parameters():
                parameter.grad.mul_(min(1.0, most / norm.item()))
        optim = self.config.optim
        for index, group in enumerate(self.optimizer.param_groups):
            group["lr"] = optim.lr if own.lr is None else own.lr
            group["betas"] = own.betas or optim.betas
            group["eps"] = own.eps or optim.eps
            if index == 0:
                group["weight_decay"] = optim.weight_decay if own.weight_decay is None else own.weight_decay
        self.optimizer.step()
        self.optimizer.zero_grad()
        return np.where(batch.mask, log_probs.detach().numpy(), 0.0)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_loop_of_ones_own_equals_plain_torch_in_float64(folder: Path, ranks: RankPool, mesh: str) -> None:
    optim = {"name": "adamw", "lr": 0.03, "eps": 1e-4, "weight_decay": 0.2, "max_grad_norm": 0.3}
    config = settings(folder, mesh=MESHES[mesh], optim=optim, **ALONE)
    batch = signed_batch(folder)
    with KeepFloat64():
        plain = PlainLoop(folder, config)
        expected = [plain.update(batch, own) for own in UPDATES]
        after = plain.log_probs(batch).detach().numpy()
    end = {name: parameter.detach() for name, parameter in plain.model.named_parameters()}
    for found in ranks.run(config.ranks, own_loop, config, batch):
        assert largest_difference(found["weights"], end) <= 1e-12
        for ours, theirs in zip(found["said"], expected, strict=True):
            assert np.abs(ours.log_probs - theirs).max() <= 1e-6  # which are float32
            assert not ours.log_probs[~batch.mask].any() and (ours.entropy[batch.mask] > 0).all()
        assert [one["lr"] for one in found["metrics"]] == [0.02, 0.01, 0.03]
        assert found["metrics"][1]["grad_norm"] > 0.5  # or nothing was clipped
        assert np.abs(found["again"].log_probs - after).max() <= 1e-6


OWN_LOSSES: dict[str, dict[str, Any]] = {
    "cispo": {"policy": "cispo", "clip_low": 0.02, "clip_high": 0.03},
    "gspo": {"policy": "gspo", "clip_high": 0.01},
    "sapo": {"policy": "sapo"},
    "importance_sampling": {"policy": "importance_sampling"},
    "dro": {"policy": "dro", "beta": 0.4},
    "ppo again": {"policy": "ppo", "dual_clip": 1.5},
    "bounds alone": {"clip_low": 0.9, "clip_high": 50.0},
    "reduction": {"reduction": "constant", "constant_length": 7},
    "entropy": {"entropy_coefficient": 0.5},
}


def gradients_by_call(rank: int, calls: list[tuple[RunConfig, Any]], batch: RolloutBatch) -> list[Any]:
    """Metrics and gradients of each call, of a trainer of its own."""
    found = []
    for config, given in calls:
        trainer = Trainer(config, device=CPU)
        metrics = trainer.forward_backward(batch, settings=given)
        found.append((metrics, {name: p.grad.full_tensor() for name, p in trainer.policy.named_weights()}))
    return found


@pytest.mark.parametrize("own", OWN_LOSSES)
def test_a_loss_of_one_call_is_that_loss_in_the_settings(folder: Path, ranks: RankPool, own: str) -> None:
    given, batch = OWN_LOSSES[own], make_batch(folder)
    if "policy" in given:
        base: dict[str, Any] = {"policy": "reinforce", "kl_coefficient": 0.3}
    else:
        base = {"clip_low": 0.1, "clip_high": 0.15}
    tree = settings(folder).model_dump(exclude_unset=True)
    by_call = RunConfig.model_validate({**tree, "loss": base})
    in_settings = RunConfig.model_validate({**tree, "loss": {**base, **given}})
    calls = [(by_call, given), (in_settings, None), (by_call, None)]
    (metrics, ours), (expected, theirs), (_, before) = ranks.run(1, gradients_by_call, calls, batch)[0]
    assert metrics == expected and largest_difference(ours, theirs) == 0
    assert largest_difference(ours, before) > 1e-6  # the settings are another loss


BAD_LOSSES: dict[str, tuple[Any, str]] = {
    "another name": ({"epochs": 2}, "epochs"),
    "no such policy": ({"policy": "nope"}, "nope"),
    "pairs": ({"policy": "dpo"}, "dpo"),
    "a list": ({"policy": ["ppo"]}, "ppo"),
    "out of range": ({"clip_low": 5}, "clip_low"),
    "of another policy": ({"policy": "reinforce", "clip_low": 0.1}, "reinforce"),
    "no mapping": (7, "7"),
}


def refusals(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, Any]:
    trainer = Trainer(config, device=CPU)
    trainer.forward_backward(batch)
    before = [p.grad.full_tensor().clone() for _, p in trainer.policy.named_weights()]
    found: dict[str, Any] = {
        name: error_of(lambda given=given: trainer.forward_backward(batch, settings=given))
        for name, (given, _) in BAD_LOSSES.items()
    }
    found["with_log_probs"] = error_of(lambda: trainer.forward_backward(batch, with_log_probs=1))  # type: ignore[arg-type]
    found["settings"] = error_of(lambda: trainer.optimizer_step({"lr": 1.0}))  # type: ignore[arg-type]
    found["eps"] = error_of(lambda: trainer.optimizer_step(UpdateSettings(eps=1e-3)))
    after = [p.grad.full_tensor() for _, p in trainer.policy.named_weights()]
    found["same"] = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    return found


def test_what_a_call_cannot_choose_is_refused_and_gradients_stay(folder: Path, ranks: RankPool) -> None:
    config = settings(folder, optim={"name": "sgd", "lr": 0.1}, **ALONE)
    found = ranks.run(1, refusals, config, make_batch(folder))[0]
    for name, (_, word) in BAD_LOSSES.items():
        assert isinstance(found[name], ConfigError) and word in str(found[name]), name
    assert found["with_log_probs"].field == "with_log_probs" and found["settings"].field == "settings"
    assert isinstance(found["eps"], ConfigError) and found["eps"].field == "eps" and "sgd" in str(found["eps"])
    assert found["same"]


def saves_under_names(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, Any]:
    trainer = Trainer(config, device=CPU)
    trainer.train_step(batch)
    trainer.save(1, {"at": "one"}, name="before")
    at_one = fingerprint(trainer.policy)
    trainer.train_step(batch)
    taken = error_of(lambda: trainer.save(2, name="before"))
    folder = trainer.save(2, {"at": "two"}, name="after.2")
    numbered = error_of(trainer.load)
    trainer.save(2)
    trainer.save(3)
    trainer.save(4)
    found = {"folder": folder, "taken": taken, "numbered": numbered, "at_one": at_one}
    found["at_two"] = fingerprint(trainer.policy)
    found["loaded"] = [(trainer.load(name=name), fingerprint(trainer.policy)) for name in ("before", "after.2")]
    found["missing"] = error_of(lambda: trainer.load(name="never"))
    found["names"] = [
        error_of(lambda name=name: trainer.save(1, name=name)) for name in ("", "a/b", "..", ".x", "x" * 129, 7)
    ]
    trainer.load(name="before")
    trainer.save(5, {"at": "five"}, name="after.2", overwrite=True)
    found["overwritten"] = trainer.load(name="after.2"), fingerprint(trainer.policy)
    return found


@pytest.mark.parametrize("dp", [2])
def test_a_checkpoint_under_a_name_stays_beside_the_numbered_ones(
    folder: Path, ranks: RankPool, tmp_path: Path, dp: int
) -> None:
    config = settings(folder, run={"dir": str(tmp_path)}, mesh={"dp": dp}, checkpoint={"keep_last": 1}, **ALONE)
    for found in ranks.run(dp, saves_under_names, config, make_batch(folder)):
        assert found["folder"] == tmp_path / "checkpoints/named/after.2/step_00000002"
        assert isinstance(found["taken"], CheckpointError) and found["taken"].field == "name"
        assert isinstance(found["numbered"], CheckpointError) and isinstance(found["missing"], SlimeError)
        (first, at_one), (second, at_two) = found["loaded"]
        assert first == {"at": "one"} and at_one == found["at_one"]
        assert second == {"at": "two"} and at_two == found["at_two"] != at_one
        assert all(isinstance(error, CheckpointError) and error.field == "name" for error in found["names"])
        assert found["overwritten"] == ({"at": "five"}, at_one)
    store = CheckpointStore.of_run(tmp_path)
    assert store.steps() == [4] and store.named("before").steps() == [1] and store.named("after.2").steps() == [5]


def begins_anew(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, Any]:
    trainer = Trainer(config, device=CPU)
    for _ in range(2):
        trainer.train_step(batch)
    trainer.save(2, name="half")
    half = fingerprint(trainer.policy)
    after = {}
    for how in (False, True):
        trainer.load(name="half", weights_only=how)
        assert fingerprint(trainer.policy) == half
        taken = trainer.updater.updates_taken
        moments = sum(
            float(value.to_local().abs().sum()) if hasattr(value, "to_local") else float(value.abs().sum())
            for state in trainer.updater.optimizer.state.values()
            for value in state.values()
        )
        metrics = trainer.train_step(batch)
        after[how] = (taken, moments, metrics["lr"], fingerprint(trainer.policy))
    return after


@pytest.mark.parametrize("dp", [2])
def test_training_can_begin_anew_from_the_weights_of_a_checkpoint(
    folder: Path, ranks: RankPool, tmp_path: Path, dp: int
) -> None:
    optim = {"name": "adamw", "lr": 0.01, "schedule": "linear", "warmup_updates": 10}
    config = settings(folder, run={"dir": str(tmp_path)}, mesh={"dp": dp}, optim=optim, **ALONE)
    for found in ranks.run(dp, begins_anew, config, make_batch(folder)):
        (taken, moments, lr, weights), (anew, zero, first_lr, others) = found[False], found[True]
        assert taken > 0 and moments > 0 and (anew, zero) == (0, 0.0)
        assert first_lr < lr and others != weights
