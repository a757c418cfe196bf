"""Checkpoints and exports change nothing about training: the same bits with and without them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slimefsdp.checkpoint import save_load
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import CheckpointError
from slimefsdp.trainer import Trainer
from tests.support.fresh_ranks import run_fresh
from tests.support.rank_pool import RankPool
from tests.support.trainers import (
    CPU,
    SPREADS,
    error_of,
    fingerprint,
    fresh_batch,
    hex_losses,
    settings,
    steps_then_weights,
)

# ---------------------------------------------------------------------- checkpoints


def saving_run(rank: int, config: RunConfig, batches: list[RolloutBatch], save_after: list[int]) -> tuple[Any, ...]:
    """Trains on the batches, saving after some of them; metrics, last path, weights at every save, and what follows."""
    trainer = Trainer(config, device=CPU)
    metrics, weights, path = [], {}, None
    for step, batch in enumerate(batches, start=1):
        metrics.append(trainer.train_step(batch))
        if step in save_after:
            torch.rand(3 + rank)  # the generators stand elsewhere than in a fresh run, and differ between ranks
            path = trainer.save(step, loop_state={"step": step, "seeds": [1, 2]})
            weights[step] = fingerprint(trainer.policy)
    trainer.finish_save()
    return metrics, path, weights, fingerprint(trainer.policy), torch.rand(1).item()


def resumed_run(rank: int, config: RunConfig, batches: list[RolloutBatch], step: Any) -> dict[str, Any]:
    trainer = Trainer(config, device=CPU)
    if batches:
        trainer.forward_backward(batches[0])  # gradients of before are no part of the state that is restored
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop_state = trainer.load(step)
    loaded, updates = fingerprint(trainer.policy), trainer.updates_taken
    return {"loop_state": loop_state, "loaded": loaded, "updates": updates,
            "warnings": [str(warning.message) for warning in caught if "checkpoint" in str(warning.message)],
            "losses": hex_losses([trainer.train_step(batch) for batch in batches]),
            "weights": fingerprint(trainer.policy), "random": torch.rand(1).item()}  # fmt: skip


@pytest.mark.parametrize(
    "spread, optimizer",
    [
        ("one rank", "adamw"),
        ("one rank", "sgd"),
        ("two shards", "muon"),
        *((spread, "adamw") for spread in SPREADS if spread != "one rank"),
    ],
)
def test_a_resumed_run_has_the_same_losses_to_the_bit(
    tied_folder: Path, ranks: RankPool, tmp_path: Path, spread: str, optimizer: str
) -> None:
    optim = {"name": optimizer, "schedule": "cosine", "warmup_updates": 3, "total_updates": 12}
    config = settings(
        tied_folder, **SPREADS[spread], run={"dir": str(tmp_path)}, optim=optim, batch={"samples_per_update": 4}
    )
    batches = [fresh_batch(seed) for seed in range(5)]
    straight = ranks.run(config.ranks, saving_run, config, batches, [2])
    metrics, path, at_save, end, _ = straight[0]
    assert path == tmp_path / "checkpoints" / "step_00000002" and path.is_dir()
    for rank, result in enumerate(ranks.run(config.ranks, resumed_run, config, batches[2:], 2)):
        assert result["random"] == straight[rank][4]  # and so each rank's generator
        assert result["loop_state"] == {"step": 2, "seeds": [1, 2]}
        assert result["loaded"] == at_save[2] and result["updates"] == 4 and not result["warnings"]
        assert result["losses"] == hex_losses(metrics)[2:] and result["weights"] == end


def straight_and_saving(
    rank: int, send: Callable[[Any], None], config: RunConfig, batches: list[RolloutBatch], save_after: int
) -> None:
    metrics, *_, weights, draw = saving_run(rank, config, batches, [save_after])
    send((hex_losses(metrics), weights, draw))


def going_on(rank: int, send: Callable[[Any], None], config: RunConfig, batches: list[RolloutBatch]) -> None:
    trainer = Trainer(config, device=CPU)
    trainer.load()
    losses = hex_losses([trainer.train_step(batch) for batch in batches])
    send((losses, fingerprint(trainer.policy), torch.rand(1).item()))


@pytest.mark.slow  # processes of their own, twice
def test_new_processes_go_on_with_the_same_bits(folder: Path, tmp_path: Path) -> None:
    optim = {"name": "adamw", "schedule": "linear", "warmup_updates": 2, "total_updates": 12}
    run, checkpoint = {"dir": str(tmp_path)}, {"async_save": True}
    config = settings(folder, mesh={"dp": 2}, optim=optim, run=run, checkpoint=checkpoint)
    batches = [fresh_batch(seed) for seed in range(5)]
    straight = run_fresh(2, straight_and_saving, config, batches, 2)
    resumed = run_fresh(2, going_on, config, batches[2:])
    for (((losses, weights, draw),), code), (((later, end, later_draw),), later_code) in zip(
        straight, resumed, strict=True
    ):
        assert (code, later_code) == (0, 0)
        assert later == losses[2:] and end == weights and later_draw == draw


def test_another_number_of_ranks_loads_the_same_weights_and_trains_on(
    folder: Path, ranks: RankPool, tmp_path: Path
) -> None:
    batches = [fresh_batch(seed) for seed in range(3)]
    config = settings(folder, mesh={"dp": 2}, run={"dir": str(tmp_path)})
    metrics, _, at_save, *_ = ranks.run(2, saving_run, config, batches, [2])[0]
    for dp in (1, 4):
        on_others = settings(folder, mesh={"dp": dp}, run={"dir": str(tmp_path)})
        for result in ranks.run(dp, resumed_run, on_others, batches[2:], "latest"):
            assert result["loaded"] == at_save[2]
            # the moments came along too, else AdamW's third step would be another one
            assert float.fromhex(result["losses"][0]) == pytest.approx(metrics[2]["loss"], rel=1e-5)


@pytest.mark.slow  # seven meshes
def test_any_mesh_reads_what_any_mesh_wrote_and_one_copy_writes(folder: Path, ranks: RankPool, tmp_path: Path) -> None:
    batches = [fresh_batch(seed) for seed in range(3)]
    meshes: list[tuple[int, dict[str, Any]]] = [
        (4, {"mesh": {"dp_replicate": 2, "dp": 2}}),
        (4, {"mesh": {"dp_replicate": 2, "cp": 2}}),
        (2, {"mesh": {"dp": 2}, "fsdp": {"sharding": "replicate"}}),
        (2, {"mesh": {"dp_replicate": 2}}),
        (1, {"mesh": {"dp": 1}}),
        (2, {"mesh": {"cp": 2}}),
        (4, {"mesh": {"dp": 2, "cp": 2}}),
    ]
    for number, (world, sections) in enumerate(meshes):
        run = {"dir": str(tmp_path / str(number))}
        config = settings(folder, **sections, run=run)
        metrics, path, at_save, *_ = ranks.run(world, saving_run, config, batches, [2])[0]
        shards = [2, 2, 1, 1, 1, 2, 4][number]
        sizes = [(path / f"rank_{rank:05d}.safetensors").stat().st_size for rank in range(world)]
        assert all(size > 10_000 for size in sizes[:shards]) and all(size < 100 for size in sizes[shards:])
        world, sections = meshes[(number + 1) % len(meshes)]
        elsewhere = settings(folder, **sections, run=run)
        for result in ranks.run(world, resumed_run, elsewhere, batches[2:], "latest"):
            assert result["loaded"] == at_save[2]
            # the moments came along too, else AdamW's third step would be another one
            assert float.fromhex(result["losses"][0]) == pytest.approx(metrics[2]["loss"], rel=1e-5)


def test_old_checkpoints_go_and_a_torn_one_is_passed_over(folder: Path, ranks: RankPool, tmp_path: Path) -> None:
    config = settings(folder, mesh={"dp": 2}, run={"dir": str(tmp_path)}, checkpoint={"keep_last": 2})
    batches = [fresh_batch(seed) for seed in range(4)]
    _, newest, weights, *_ = ranks.run(2, saving_run, config, batches, [1, 2, 3, 4])[0]
    store = tmp_path / "checkpoints"
    assert sorted(path.name for path in store.glob("*step_*")) == ["step_00000003", "step_00000004"]
    torn = newest / "rank_00001.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    results = ranks.run(2, resumed_run, config, [], "latest")
    assert [result["loaded"] for result in results] == [weights[3]] * 2
    assert results[0]["loop_state"]["step"] == 3
    (warning,) = results[0]["warnings"]
    assert "passed over" in warning and "rank_00001.safetensors" in warning


def failing_checkpoints(rank: int, config: RunConfig, batch: RolloutBatch, blocked: Path) -> dict[str, Any]:
    trainer = Trainer(config, device=CPU)
    before = fingerprint(trainer.policy)
    errors = [error_of(trainer.load), error_of(lambda: trainer.load(7))]
    if rank == 0:
        blocked.write_text("a file where the folder should be")
    errors.append(error_of(lambda: trainer.save(1)))  # rank 0 alone meets the file
    if rank == 0:
        blocked.unlink()
    write = save_load.write_shard
    if rank == 1:
        save_load.write_shard = failing_write
    errors.append(error_of(lambda: trainer.save(1)))
    save_load.write_shard = write
    errors.append(error_of(lambda: trainer.save(1, loop_state={"not": float("nan")})))
    nothing_yet = error_of(trainer.load)
    unchanged = fingerprint(trainer.policy) == before
    loss = trainer.train_step(batch)["loss"]
    trainer.save(1)
    trainer.load(1)
    return {"errors": [*errors, nothing_yet], "unchanged": unchanged, "loss": loss}


def failing_write(*_: Any) -> None:
    raise CheckpointError("the disk is full")


def test_a_checkpoint_that_fails_on_one_rank_fails_on_all_and_the_group_works_on(
    folder: Path, ranks: RankPool, tmp_path: Path
) -> None:
    config = settings(folder, mesh={"dp": 2}, run={"dir": str(tmp_path)})
    (undisturbed,), _ = ranks.run(2, steps_then_weights, config, [fresh_batch()])[0]
    results = ranks.run(2, failing_checkpoints, config, fresh_batch(), tmp_path / "checkpoints")
    for result in results:
        assert [type(error) for error in result["errors"]] == [CheckpointError] * 6
        assert "disk is full" in str(result["errors"][3])
        assert result["unchanged"] and result["loss"] == undisturbed["loss"]
    assert [str(error) for error in results[0]["errors"]] == [str(error) for error in results[1]["errors"]]


def saved_and_loaded(rank: int, config: RunConfig, other: RunConfig) -> tuple[str, ...]:
    Trainer(config, device=CPU).save(1)
    trainer = Trainer(other, device=CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.load(1)
    found = trainer.restored()
    assert found is not None
    return found.differences


def test_a_load_says_which_algorithm_and_schedule_it_goes_on_with(
    folder: Path, ranks: RankPool, tmp_path: Path
) -> None:
    config = settings(folder, run={"dir": str(tmp_path)})
    other = settings(
        folder, run={"dir": str(tmp_path)}, advantage={"estimator": "rloo"}, loss={"clip_high": 0.5, "policy": "cispo"},
        correction={"veto_below": 0.1},
    )  # fmt: skip
    (found,) = ranks.run(1, saved_and_loaded, config, other)
    words = " ".join(found)
    assert "advantage.estimator is rloo (saved: None)" in words and "correction.veto_below is 0.1" in words
    assert "loss.policy is cispo (saved: ppo)" in words and "loss.clip_high is 0.5 (saved: 0.2)" in words
    assert ranks.run(1, saved_and_loaded, config.model_copy(update={"run": other.run}), config) == [()]


# ---------------------------------------------------------------------- export


def reference_after(
    rank: int, config: RunConfig, batches: list[RolloutBatch], resumes: bool
) -> tuple[list[str], bytes]:
    """The losses of two more steps, and the reference's log-probs, after update_ref in the middle of a run."""
    trainer = Trainer(config, device=CPU)
    if resumes:
        trainer.load("latest")
    else:
        trainer.train_step(batches[0])
        trainer.update_ref()
        trainer.train_step(batches[1])
        trainer.save(2)
    losses = hex_losses([trainer.train_step(batch) for batch in batches[2:]])
    return losses, trainer.compute_log_probs(batches[0], "ref").log_probs.tobytes()


@pytest.mark.parametrize("dp", [2])
def test_a_reference_that_followed_the_actor_is_resumed_too(
    folder: Path, ranks: RankPool, tmp_path: Path, dp: int
) -> None:
    config = settings(folder, mesh={"dp": dp}, loss={"kl_coefficient": 0.3}, run={"dir": str(tmp_path)})
    batches = [fresh_batch(seed=seed) for seed in range(4)]
    straight = ranks.run(dp, reference_after, config, batches, False)
    assert straight == ranks.run(dp, reference_after, config, batches, True)


def export_twice(rank: int, config: RunConfig, batch: RolloutBatch, target: Path) -> dict[str, Any]:
    trainer = Trainer(config, device=CPU)
    trainer.train_step(batch)
    path = trainer.export_hf(target)
    names = sorted(file.name for file in path.iterdir())
    again = error_of(lambda: trainer.export_hf(target))
    untouched = sorted(file.name for file in path.iterdir()) == names
    log_probs = trainer.compute_log_probs(batch).log_probs
    return {"path": path, "again": again, "untouched": untouched, "log_probs": log_probs,
            "full": {n: p.full_tensor().detach().clone() for n, p in trainer.policy.named_weights()},
            "loss": trainer.train_step(batch)["loss"]}  # fmt: skip


@pytest.mark.parametrize(
    ("spread", "kind"),
    [*((spread, "folder") for spread in SPREADS), ("one rank", "tied_folder"), ("two shards", "tied_folder")],
)
def test_an_export_opens_in_transformers_with_the_trained_weights(
    request: pytest.FixtureRequest, ranks: RankPool, tmp_path: Path, spread: str, kind: str
) -> None:
    folder = request.getfixturevalue(kind)
    config, batch = settings(folder, **SPREADS[spread]), fresh_batch()
    for result in ranks.run(config.ranks, export_twice, config, batch, tmp_path / "exported"):
        assert isinstance(result["again"], CheckpointError) and result["untouched"] and np.isfinite(result["loss"])
    model = AutoModelForCausalLM.from_pretrained(result["path"])
    exported = dict(model.named_parameters())
    assert exported.keys() == result["full"].keys()
    assert all(torch.equal(parameter, result["full"][name]) for name, parameter in exported.items())
    original = AutoModelForCausalLM.from_pretrained(folder)
    assert not any(torch.equal(parameter, exported[name]) for name, parameter in original.named_parameters())
    log_probs = []
    for sample in batch.to_samples():
        tokens = torch.as_tensor(np.array(sample["tokens"]))
        with torch.no_grad():
            table = model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
        log_probs.append(table.gather(-1, tokens[1:, None])[-sample["response_length"] :, 0])
    assert np.abs(torch.cat(log_probs).numpy() - result["log_probs"]).max() <= 1e-5
