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
from slimefsdp.trainer import Trainer
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
        optim={"log_layer_norms": True},
    )  # fmt: skip
    first, second = ranks.run(2, trained, config, [fresh_batch()] * 24)
    assert str(first) == str(second)  # NaN norms are not equal to themselves
    scales = [step["loss_scale"] for step in first["steps"]]
    skipped = [step["skipped_update"] for step in first["steps"]]
    overflows = int(sum(skipped))
    # as many in a row as end a run elsewhere, or more, and all at the start
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


# ---------------------------------------------------------------------- looking inside a Trainer


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
