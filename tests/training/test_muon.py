"""Training with Muon: weights of plain updates on whole matrices, however a model is spread, stored and interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.rpc import UpdateSettings
from slimefsdp.trainer import Trainer
from slimefsdp.training.plan import plan_training
from tests.support.classifiers import save_classifier
from tests.support.comparisons import largest_difference
from tests.support.float64 import KeepFloat64
from tests.support.plain_critic import PlainCritic, critic_batch, critic_settings, plain_targets
from tests.support.plain_lora import ALL, PeftStep, adapters_of, fill_b
from tests.support.plain_muon import PlainMuon
from tests.support.plain_step import PlainStep, make_batch, settings
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import TinyFolder

CPU = torch.device("cpu")
DEFAULT_CASES = 1  # of each test on ranks in the default tier; --all has every case
MUON: dict[str, Any] = {"name": "muon", "lr": 0.01, "adamw_lr": 0.002, "eps": 1e-3, "weight_decay": 0.1}
SPREADS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "cp 2": {"mesh": {"cp": 2}},
    "two copies of two shards": {"mesh": {"dp_replicate": 2, "dp": 2}},
    "parameters kept, clipped": {
        "mesh": {"dp": 2},
        "fsdp": {"sharding": "keep_parameters"},
        "optim": {"max_grad_norm": 0.01},
    },
    "summed once": {"mesh": {"dp": 2}, "fsdp": {"sharding": "optimizer"}},
    "whole on every rank": {"mesh": {"dp": 2}, "fsdp": {"sharding": "replicate"}},
    "on the host": {
        "mesh": {"dp": 2},
        "fsdp": {"cpu_offload": True},
        "optim": {"momentum": 0.5},
    },
    "frozen": {"mesh": {"dp": 2}, "model": {"frozen": ["*.q_proj.*", "model.layers.0.mlp.*", "model.embed*"]}},
}


def muon_settings(path: Path, **sections: Any) -> RunConfig:
    return settings(path, **{**sections, "optim": {**MUON, **sections.get("optim", {})}})


def without_decay(config: RunConfig) -> RunConfig:
    """For plain steps, whose own optimiser, which has none, is replaced."""
    return config.model_copy(update={"optim": config.optim.model_copy(update={"weight_decay": 0.0})})


def trained(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, Any]:
    with KeepFloat64():
        trainer = Trainer(config, device=CPU)
        metrics = trainer.train_step(batch)
    states = trainer.updater.optimizer.state
    return {
        "weights": {name: p.full_tensor().detach().clone() for name, p in trainer.policy.named_weights()},
        "updates": metrics["updates"],
        "in sync": trainer.check_sync().is_in_sync,
        "states": {name: sorted(states[p]) for name, p in trainer.policy.trained_weights()},
    }


def compare(folder: Path, ranks: RankPool, config: RunConfig) -> None:
    batch = make_batch(folder)
    plan = plan_training(config, batch)
    with KeepFloat64():
        plain = PlainStep(folder, without_decay(config), torch.float64)
        start = plain.weights()
        plain.optimizer = PlainMuon(  # type: ignore[assignment]
            ((name, p) for name, p in plain.model.named_parameters() if p.requires_grad), config.optim
        )
        plain.train(batch, plan)
    assert largest_difference(plain.weights(), start) > 1e-2
    for ours in ranks.run(config.ranks, trained, config, batch):
        assert largest_difference(ours["weights"], plain.weights()) <= 1e-12
        assert ours["updates"] >= 3 and ours["in sync"]
        assert ["momentum_buffer"] in ours["states"].values()
        assert ["exp_avg", "exp_avg_sq", "step"] in ours["states"].values()


@pytest.mark.parametrize("spread", SPREADS)
def test_weights_are_those_of_plain_updates_of_whole_matrices(folder: Path, ranks: RankPool, spread: str) -> None:
    compare(folder, ranks, muon_settings(folder, **SPREADS[spread]))


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt2", "gpt_oss", "gemma2"])
def test_of_experts_and_other_architectures_too(tiny_folder: TinyFolder, ranks: RankPool, kind: str) -> None:
    folder = tiny_folder(kind)
    compare(folder, ranks, muon_settings(folder, mesh={"dp": 2}))


def test_of_a_tied_model_whose_embedding_is_adamws(tied_folder: Path, ranks: RankPool) -> None:
    compare(tied_folder, ranks, muon_settings(tied_folder, mesh={"dp": 2}))


def trained_adapters(rank: int, config: RunConfig, batch: RolloutBatch) -> tuple[dict[str, torch.Tensor], ...]:
    with KeepFloat64():
        trainer = Trainer(config, device=CPU)
        fill_b(trainer)
        start = adapters_of(trainer)
        trainer.train_step(batch)
    return start, adapters_of(trainer)


def test_both_matrices_of_an_adapter_are_muons(folder: Path, ranks: RankPool) -> None:
    lora = {"rank": 3, "alpha": 7.0, "targets": ["attention", "mlp", "head"]}
    optim = {"weight_decay": 0.0}
    config, batch = muon_settings(folder, mesh={"dp": 2}, lora=lora, optim=optim), make_batch(folder)
    found = ranks.run(2, trained_adapters, config, batch)
    with KeepFloat64():
        plain = PeftStep(folder, config, torch.float64, found[0][0], [*ALL, "lm_head"])
        plain.optimizer = PlainMuon(plain.adapters.items(), config.optim)  # type: ignore[arg-type, assignment]
        plain.train(batch, plan_training(config, batch))
    assert largest_difference(plain.weights(), found[0][0]) > 1e-2
    assert all(largest_difference(end, plain.weights()) <= 1e-12 for _, end in found)


def test_adapters_of_experts_end_alike_on_any_mesh(tiny_folder: TinyFolder, ranks: RankPool) -> None:
    folder = tiny_folder("qwen3_moe")
    lora, batch = {"rank": 3, "alpha": 7.0, "targets": ["attention", "experts"]}, make_batch(folder)
    optim = {"adamw_lr": None}  # all of them are Muon's
    (start, alone), *_ = ranks.run(1, trained_adapters, muon_settings(folder, lora=lora, optim=optim), batch)
    assert largest_difference(start, alone) > 1e-2
    for _, end in ranks.run(2, trained_adapters, muon_settings(folder, lora=lora, optim=optim, mesh={"dp": 2}), batch):
        assert largest_difference(end, alone) <= 1e-12


def trained_critic(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, torch.Tensor]:
    with KeepFloat64():
        trainer = Trainer(config, "critic", device=CPU)
        trainer.train_step(batch)
    return {name: p.full_tensor().detach().clone() for name, p in trainer.policy.named_weights()}


def test_a_critics_head_is_adamws_and_its_rates_keep_their_ratio(tmp_path: Path, ranks: RankPool) -> None:
    folder = save_classifier(tmp_path)
    batch_of = {"max_tokens_per_rank": 48, "samples_per_update": 4}
    config = critic_settings(
        folder, mesh={"dp": 2}, batch=batch_of, loss={"epochs": 1}, optim=MUON, critic={"lr": 0.02}
    )
    batch = critic_batch()
    targets, plan = plain_targets(batch), plan_training(config, batch, loss="value")
    with KeepFloat64():
        plain = PlainCritic(folder, config)
        start = plain.weights()
        of_critic = config.optim.model_copy(update={"lr": 0.02, "adamw_lr": 0.004})
        plain.optimizer = PlainMuon(plain.trained.items(), of_critic)  # type: ignore[assignment]
        for update in range(len(plan.updates)):
            plain.backward(batch, targets, plan.samples_of(update))
            plain.step()
    assert largest_difference(plain.weights(), start) > 1e-2 and len(plan.updates) == 2
    for ours in ranks.run(2, trained_critic, config, batch):
        assert largest_difference(ours, plain.weights()) <= 1e-12


def saved_then_trained(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, torch.Tensor]:
    with KeepFloat64():
        trainer = Trainer(config, device=CPU)
        trainer.train_step(batch)
        trainer.save(1)
        trainer.train_step(batch)
    return {name: p.full_tensor().detach().clone() for name, p in trainer.policy.named_weights()}


def loaded_then_trained(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, torch.Tensor]:
    with KeepFloat64():
        trainer = Trainer(config, device=CPU)
        trainer.load(1)
        trainer.train_step(batch)
    return {name: p.full_tensor().detach().clone() for name, p in trainer.policy.named_weights()}


@pytest.mark.parametrize("mesh", [{"dp": 1}, {"dp_replicate": 2, "dp": 2}], ids=str)
def test_another_mesh_goes_on_from_a_checkpoint(
    tiny_folder: TinyFolder, ranks: RankPool, tmp_path: Path, mesh: dict[str, int]
) -> None:
    folder = tiny_folder("qwen3_moe")
    batch, run = make_batch(folder), {"dir": str(tmp_path)}
    straight = ranks.run(2, saved_then_trained, muon_settings(folder, mesh={"dp": 2}, run=run), batch)[0]
    config = muon_settings(folder, mesh=mesh, run=run)
    for ours in ranks.run(config.ranks, loaded_then_trained, config, batch):
        difference = largest_difference(ours, straight)
        assert difference == 0 if mesh == {"dp": 2} else difference <= 1e-12


def single_calls(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, Any]:
    trainer = Trainer(config, device=CPU)
    named = trainer.policy.named_weights()
    decided = {"q_proj": "model.layers.0.self_attn.q_proj.weight", "head": "lm_head.weight"}
    watched = {key: dict(named)[name] for key, name in decided.items()}
    found: dict[str, Any] = {}

    def update(own: UpdateSettings | None, spoil: bool = False) -> dict[str, float]:
        before = {key: p.full_tensor().detach().clone() for key, p in watched.items()}
        trainer.forward_backward(batch)
        if spoil:
            watched["head"].grad.to_local().view(-1)[0] = float("nan")  # type: ignore[union-attr]
        trainer.optimizer_step(own)
        return {key: (p.full_tensor() - before[key]).abs().max().item() for key, p in watched.items()}

    found["first"] = update(None)
    found["lr 0"] = update(UpdateSettings(lr=0.0))
    found["skipped"] = update(None, spoil=True)
    found["momentum kept"] = max(
        state["momentum_buffer"].full_tensor().abs().max().item()
        for state in trainer.updater.optimizer.state.values()
        if "momentum_buffer" in state
    )
    found["decayed"] = update(UpdateSettings(lr=1.0, weight_decay=0.5, betas=(0.5, 0.5), eps=1.0))
    trainer.updater.begin_anew()
    found["anew"] = [float(v.abs().max()) for state in trainer.updater.optimizer.state.values() for v in state.values()]
    return found


def test_calls_choose_rates_and_decay_of_both_parts_and_a_skip_changes_nothing(folder: Path, ranks: RankPool) -> None:
    found = ranks.run(1, single_calls, muon_settings(folder), make_batch(folder))[0]
    # an orthogonalized 64 x 32 update has elements of about 0.2 in square mean; AdamW's first is its rate
    assert 0.001 < found["first"]["q_proj"] < 0.02 and found["first"]["head"] <= 0.0021
    assert set(found["lr 0"].values()) == {0.0} == set(found["skipped"].values())
    assert 0 < found["momentum kept"] < float("inf") and min(found["decayed"].values()) > 0.05
    assert max(found["anew"]) == 0.0
