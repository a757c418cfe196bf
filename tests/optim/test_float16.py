"""Training in float16: a scale that saves small gradients, overflows that heal, exact resumption."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import StateError
from slimefsdp.optim.optimizer_step import LossScale
from slimefsdp.trainer import Trainer
from tests.support.float64 import KeepFloat64
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import TinyFolder
from tests.support.trainers import fingerprint, fresh_batch, settings

CPU = torch.device("cpu")
SPEEDS = ("train_seconds", "tokens_per_second", "tokens_per_second_per_rank", "tflops_per_rank")
FLOAT16 = {"compute_dtype": "float16"}
ADAPTERS = pytest.mark.parametrize("adapters", [{}, {"lora": {"rank": 4}}], ids=["all weights", "adapters"])


def gradients(rank: int, config: RunConfig, batch: RolloutBatch) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Gradients with the scale taken out, in float64, and the metrics of the loss."""
    trainer = Trainer(config, device=CPU)
    metrics = trainer.forward_backward(batch)
    scale = trainer.updater.loss_scale
    return {n: p.grad.full_tensor().double() / scale for n, p in trainer.policy.named_weights()}, metrics


def relative_error(ours: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    error = sum((ours[name] - truth[name]).square().sum() for name in truth)
    return float((error / sum(value.square().sum() for value in truth.values())) ** 0.5)  # type: ignore[arg-type]


def test_the_scale_saves_gradients_that_float16_would_lose(folder: Path, ranks: RankPool) -> None:
    batch = fresh_batch()
    tiny = batch.replace(advantages=np.full(batch.num_response_tokens, 1e-5))
    truth, plain_metrics = ranks.run(1, gradients, settings(folder), tiny)[0]
    errors = {}
    for scale, summed_in in ((1, "auto"), (2**16, "auto"), (2**16, "float16")):
        precision = FLOAT16 | {"loss_scale_init": scale, "reduce_dtype": summed_in}
        config = settings(folder, mesh={"dp": 2}, precision=precision)
        for ours, metrics in ranks.run(2, gradients, config, tiny):
            errors[scale, summed_in] = relative_error(ours, truth)
            # metrics know nothing of the scale
            assert metrics["loss"] == pytest.approx(plain_metrics["loss"], rel=0.05)
    assert errors[2**16, "auto"] < 0.02 < 0.2 < errors[1, "auto"], errors
    assert errors[2**16, "auto"] < errors[2**16, "float16"] < 0.02, errors


def weights_after_steps(
    rank: int, config: RunConfig, batch: RolloutBatch, scale: float | None
) -> tuple[dict[str, torch.Tensor], dict[str, float], float]:
    with KeepFloat64():
        trainer = Trainer(config, device=CPU)
        trainer.updater._loss_scaling = None if scale is None else LossScale(scale, growth_interval=2)
        metrics = trainer.train_step(batch)
    weights = {name: p.full_tensor().detach() for name, p in trainer.policy.all_parameters()}
    return weights, metrics, trainer.updater.loss_scale


@ADAPTERS
def test_a_scaled_step_ends_with_the_weights_of_an_unscaled_one(
    folder: Path, ranks: RankPool, adapters: dict[str, Any]
) -> None:
    config = settings(
        folder, mesh={"dp": 2}, precision={"compute_dtype": "float64"}, batch={"samples_per_update": 2},
        optim={"name": "sgd", "lr": 0.1}, **adapters,
    )  # fmt: skip
    plain, plain_metrics, _ = ranks.run(2, weights_after_steps, config, fresh_batch(), None)[0]
    for ours, metrics, end in ranks.run(2, weights_after_steps, config, fresh_batch(), 2.0**10):
        assert max((ours[name] - plain[name]).abs().max().item() for name in plain) <= 1e-12
        assert metrics["updates"] == 4 and end == 2.0**12  # it doubled twice on the way
        assert metrics["grad_norm"] == pytest.approx(plain_metrics["grad_norm"], rel=1e-12)


def trained(rank: int, config: RunConfig, batches: list[RolloutBatch]) -> dict[str, Any]:
    trainer = Trainer(config, device=CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps = [trainer.train_step(batch) for batch in batches]
    for step in steps:
        for name in SPEEDS:
            del step[name]
    return {
        "steps": steps, "scale": trainer.updater.loss_scale, "taken": trainer.updates_taken,
        "weights": fingerprint(trainer.policy), "skipped_in_a_row": trainer.updater.skipped_in_a_row,
        "health": trainer.gradient_health(), "dtypes": {p.dtype for p in trainer.policy.parameters()},
    }  # fmt: skip


def test_a_scale_that_is_too_large_is_halved_until_updates_are_taken(folder: Path, ranks: RankPool) -> None:
    config = settings(
        folder, mesh={"dp": 2}, precision=FLOAT16 | {"loss_scale_init": 2**30},
        optim={"max_skipped_updates": 1, "log_layer_norms": True},
    )  # fmt: skip
    first, second = ranks.run(2, trained, config, [fresh_batch()] * 24)
    assert str(first) == str(second)  # NaN norms are not equal to themselves
    scales = [step["loss_scale"] for step in first["steps"]]
    skipped = [step["skipped_update"] for step in first["steps"]]
    overflows = int(sum(skipped))
    # more in a row than max_skipped_updates allows, and all at the start
    assert 3 <= overflows < 20 and skipped == [1.0] * overflows + [0.0] * (24 - overflows)
    assert scales == [2.0 ** (30 - min(update, overflows)) for update in range(24)]
    assert first["taken"] == 24 - overflows and first["skipped_in_a_row"] == 0
    assert first["dtypes"] == {torch.float32}
    last = first["steps"][-1]
    groups = [last[f"grad_norm/{name}"] for name in ("embedding", "layer_0", "layer_1", "final_norm", "head")]
    assert np.sqrt(np.square(groups).sum()) == pytest.approx(last["grad_norm"], rel=1e-12)
    assert list(first["health"].group_norms.values()) == groups and first["health"].update == first["taken"] - 1


@ADAPTERS
def test_float16_learns_what_float32_learns(folder: Path, ranks: RankPool, adapters: dict[str, Any]) -> None:
    batches = [fresh_batch(seed) for seed in range(3)]
    optim = {"name": "sgd", "lr": 0.1}
    plain = ranks.run(1, trained, settings(folder, optim=optim, **adapters), batches)[0]
    precision = FLOAT16 | {"loss_scale_init": 1024}  # the tiny model's gradients are large
    config = settings(folder, mesh={"dp": 2}, optim=optim, precision=precision, **adapters)
    ours = ranks.run(2, trained, config, batches)[0]
    if adapters:  # what they are beside is stored in the dtype that it computes in, they are not
        assert ours["dtypes"] == {torch.float16, torch.float32}
    for mine, theirs in zip(ours["steps"], plain["steps"], strict=True):
        assert "loss_scale" in mine and "loss_scale" not in theirs and "grad_norm/head" not in mine
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.02)
        assert mine["entropy"] == pytest.approx(theirs["entropy"], rel=0.01)


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "gpt_oss"])  # soft-cap, sinks and experts take paths of their own
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 1, "cp": 2}], ids=["dp", "cp"])
def test_float16_gradients_are_those_of_float32_for_other_models_and_under_cp(
    ranks: RankPool, tiny_folder: TinyFolder, kind: str, mesh: dict[str, int]
) -> None:
    path, batch = tiny_folder(kind), fresh_batch()
    truth, _ = ranks.run(1, gradients, settings(path), batch)[0]
    precision = FLOAT16 | {"loss_scale_init": 256}
    ours, _ = ranks.run(2, gradients, settings(path, mesh=mesh, precision=precision), batch)[0]
    assert relative_error(ours, truth) < 0.02


def halves(rank: int, config: RunConfig, batch: RolloutBatch) -> tuple[list[float], list[float]]:
    trainer = Trainer(config, device=CPU)
    scales, norms = [], []
    for _ in range(2):
        for half in (np.arange(0, 4), np.arange(4, batch.num_samples)):
            trainer.forward_backward(batch.select(half), denominator=float(batch.mask.sum()))
            scales.append(trainer.updater.loss_scale)
        norms.append(trainer.optimizer_step()["grad_norm"])
    return scales, norms


def test_the_scale_is_constant_between_updates_so_that_halves_add_up(folder: Path, ranks: RankPool) -> None:
    precision = FLOAT16 | {"loss_scale_init": 64, "loss_scale_growth_interval": 1}
    batch = fresh_batch()
    scales, norms = ranks.run(1, halves, settings(folder, precision=precision), batch)[0]
    assert scales == [64.0, 64.0, 128.0, 128.0]
    _, plain = ranks.run(1, halves, settings(folder), batch)[0]
    assert norms == pytest.approx(plain, rel=0.02)


def resumed(rank: int, config: RunConfig, batch: RolloutBatch) -> tuple[list[Any], list[Any]]:
    """What comes after a save, in the process that wrote it and in one that read it."""
    trainer = Trainer(config, device=CPU)
    for _ in range(3):
        trainer.train_step(batch)
    trainer.save(3)
    outcomes = []
    again = Trainer(config, device=CPU)
    again.load(3)
    for one in (trainer, again):
        steps = [one.train_step(batch) for _ in range(3)]
        outcomes.append([
            *([step["loss"], step["grad_norm"], step["loss_scale"]] for step in steps),
            fingerprint(one.policy), one.updater.progress(),
        ])  # fmt: skip
    return outcomes[0], outcomes[1]


def test_a_checkpoint_resumes_with_its_scale_in_the_middle_of_an_interval(
    folder: Path, ranks: RankPool, tmp_path: Path
) -> None:
    config = settings(
        folder, mesh={"dp": 2}, run={"dir": str(tmp_path)},
        precision=FLOAT16 | {"loss_scale_init": 64, "loss_scale_growth_interval": 4},
    )  # fmt: skip
    for went_on, resumed_run in ranks.run(2, resumed, config, fresh_batch()):
        assert went_on == resumed_run
        assert [step[2] for step in went_on[:3]] == [64.0, 128.0, 128.0]


# ---------------------------------------------------------------------- looking inside a Trainer


def looked_inside(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, Any]:
    trainer = Trainer(config, device=CPU)
    refusals = []
    try:
        trainer.gradient_health()
    except StateError as error:
        refusals.append(str(error))
    before = trainer.describe()
    trainer.train_step(batch)
    trainer.compute_log_probs(batch)  # leaves the outermost unit gathered, if nobody frees it
    after, check = trainer.describe(), trainer.check_sync()
    health = trainer.gradient_health()
    trainer.sleep()
    asleep = trainer.describe()
    woken = trainer.check_sync()
    freed = trainer.sleep()
    trainer.wake_up()
    buffers = dict(trainer.policy.named_buffers())
    if rank == 1:
        trainer.updater.updates_taken += 1
        next(iter(buffers.values())).view(-1)[0] += 1
    spoiled = trainer.check_sync()
    return {
        "refusals": refusals, "descriptions": [before, after, asleep], "checks": [check, woken], "freed": freed,
        "spoiled": spoiled, "health": health, "buffers": len(buffers),
        "names": [name for name, _ in trainer.policy.named_weights()],
    }  # fmt: skip


def test_a_trainer_can_be_looked_into_at_any_time(folder: Path, ranks: RankPool) -> None:
    precision = FLOAT16 | {"loss_scale_init": 1024}
    config = settings(folder, mesh={"dp": 2}, precision=precision, loss={"kl_coefficient": 0.1})
    for rank, result in enumerate(ranks.run(2, looked_inside, config, fresh_batch())):
        assert len(result["refusals"]) == 1 and "train_step" in result["refusals"][0]
        before, after, asleep = result["descriptions"]
        assert before == after == asleep and before.rank == rank and before.mesh["dp"] == 2
        assert sorted(name for unit in before.units for name in unit.parameters) == sorted(result["names"])
        assert {(u.master_dtype, u.compute_dtype, u.reduce_dtype) for u in before.units} == {
            ("float32", "float16", "float32")
        }
        check, woken = result["checks"]
        assert check.is_in_sync and check == woken
        # two models' buffers, Adam's step counts, and six numbers: the KL coefficient is one
        assert check.checked == 2 * result["buffers"] + len(result["names"]) + 6
        assert result["freed"].device_bytes_after == 0  # what was looked at can still be freed
        names = [difference.name for difference in result["spoiled"].differences]
        assert names[:1] == ["state.updates_taken"] and names[1].startswith("buffer.") and len(names) == 2
        assert result["health"].norm > 0 and result["health"].first_nonfinite is None


def test_one_flipped_bit_in_one_copy_of_a_model_is_found(folder: Path, ranks: RankPool) -> None:
    config = settings(folder, mesh={"dp": 1, "dp_replicate": 2})
    name = "model.layers.0.self_attn.q_proj.weight"
    for clean, spoiled, norms in ranks.run(2, spoiled_copy, config, fresh_batch(), name):
        assert clean.is_in_sync
        assert [(found.name.partition("[")[0], found.deviating) for found in spoiled.differences] == [
            (f"model.{name}", (1,))
        ]
        single = ranks.run(1, trained, settings(folder), [fresh_batch()])[0]
        # copies count once in the norm
        assert norms == pytest.approx(list(single["health"].group_norms.values()), rel=1e-4)


def spoiled_copy(rank: int, config: RunConfig, batch: RolloutBatch, name: str) -> tuple[Any, ...]:
    trainer = Trainer(config, device=CPU)
    trainer.train_step(batch)
    clean = trainer.check_sync()
    norms = list(trainer.gradient_health().group_norms.values())
    if rank == 1:
        shard: Any = dict(trainer.policy.named_weights())[name]
        bits = shard.to_local().detach().view(-1)[-1:].view(torch.int32)
        bits ^= 1
    return clean, trainer.check_sync(), norms
