"""The colocated reference: where it is between uses changes no bit of what it says, and it follows only when told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.distributed.fsdp import parameter_groups
from slimefsdp.errors import CheckpointError, ModelError, StateError
from slimefsdp.trainer import Trainer
from tests.support.checkpoints import forge_index
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import TinyFolder, save_tiny_model
from tests.support.trainers import CPU, error_of, fingerprint, fresh_batch, settings

POLICIES = ("sleep", "fsdp", "none", "swap")
MESHES: dict[str, dict[str, Any]] = {
    "one rank": {"mesh": {"dp": 1}},
    "two shards": {"mesh": {"dp": 2}},
    "copies of context shards": {"mesh": {"dp_replicate": 2, "cp": 2}},
    "whole on every rank": {"mesh": {"dp": 2}, "fsdp": {"sharding": "replicate"}},
    "policy on the host": {"mesh": {"dp": 2}, "fsdp": {"cpu_offload": True}},
}


@pytest.fixture(scope="module")
def folder(tiny_folder: TinyFolder) -> Path:
    return tiny_folder(tie_word_embeddings=True, vocab_size=97, intermediate_size=55)


@pytest.fixture(scope="module")
def other_folder(tiny_folder: TinyFolder) -> Path:
    return tiny_folder(tie_word_embeddings=True, vocab_size=97, intermediate_size=55, seed=1)


def life_of_a_reference(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, Any]:
    trainer = Trainer(config, device=CPU)
    assert trainer.reference is not None
    own_bytes = sum(p.to_local().untyped_storage().nbytes() for p in trainer.policy.parameters())
    own_bytes += sum(buffer.nbytes for buffer in trainer.policy.buffers())
    kl = [trainer.train_step(batch)["kl_ref"]]  # from here on there are moments
    beside: set[tuple[bool, bool]] = set()  # whether the policy and its moments are there while the reference computes

    def note(*_: Any) -> None:
        beside.add((trainer.memory().parameters > 0, trainer.memory().optimizer > 0))

    hook = trainer.reference.register_forward_pre_hook(note)
    kl.append(trainer.train_step(batch)["kl_ref"])
    hook.remove()
    between = [trainer.memory()]
    trainer.update_ref()
    between.append(trainer.memory())
    kl += [trainer.train_step(batch)["kl_ref"] for _ in range(2)]
    said = trainer.compute_log_probs(batch, "ref").log_probs
    trainer.sleep()
    asleep = trainer.memory().reference
    kl.append(trainer.train_step(batch)["kl_ref"])
    between.append(trainer.memory())
    groups = [group for module in trainer.reference.modules() if hasattr(module, "_get_fsdp_state")
              for group in parameter_groups(module)]  # fmt: skip
    return {
        "kl": kl, "beside": beside, "said": said.tobytes(), "weights": fingerprint(trainer.policy), "asleep": asleep,
        "share": {memory.reference / own_bytes for memory in between},
        "offloads": {parameter.offload_to_cpu for group in groups for parameter in group.fsdp_params},
    }  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES)
def test_kl_to_an_equal_reference_is_exactly_zero_wherever_it_is_kept(
    folder: Path, other_folder: Path, ranks: RankPool, mesh: str
) -> None:
    on_the_host = "cpu_offload" in MESHES[mesh].get("fsdp", {})
    for path in (folder, other_folder) if mesh == "two shards" else (folder,):
        lives: dict[str, list[dict[str, Any]]] = {}
        for offload in POLICIES[: 2 if on_the_host else 4]:
            reference = {"offload": offload, **({"path": str(path)} if path != folder else {})}
            config = settings(folder, **MESHES[mesh], loss={"kl_coefficient": 0.1}, reference=reference)
            lives[offload] = ranks.run(config.ranks, life_of_a_reference, config, fresh_batch())
            for life in lives[offload]:
                first, moved, updated, moved_again, after_sleep = life["kl"]
                assert (first == 0.0) if path == folder else (first > 0.1)
                assert moved > 0 and updated == 0.0 and moved_again > 0 and after_sleep > moved_again
                # a CPU's device memory is the host's: it holds what FSDP offloads
                assert life["share"] == {0.0 if offload in ("sleep", "swap") else 1.0} and life["asleep"] == 0
                assert life["beside"] == {(offload != "swap",) * 2}
                assert life["offloads"] == {offload == "fsdp" or on_the_host}
        said = {offload: [(life["said"], life["weights"], life["kl"]) for life in lives[offload]] for offload in lives}
        assert all(values == said["sleep"] for values in said.values())


def loads_across_updates(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, Any]:
    """What the reference says at first, after each load, and in between; checkpoint 1 is from before `update_ref`."""
    trainer = Trainer(config, device=CPU)

    def says() -> bytes:
        return trainer.compute_log_probs(batch, "ref").log_probs.tobytes()

    found: dict[str, Any] = {"first": says()}
    trainer.train_step(batch)
    trainer.save(1)
    trainer.update_ref()
    found["followed"] = says()
    trainer.train_step(batch)
    trainer.save(2)
    trainer.load(1)
    found["loaded 1"], found["asleep"] = says(), trainer.memory().asleep
    trainer.train_step(batch)
    trainer.save(3)  # it follows nobody now
    trainer.load(2)
    found["loaded 2"] = says()
    trainer.load(3)
    found["loaded 3"] = says()
    trainer.update_ref()
    found["follows again"] = np.array_equal(
        trainer.compute_log_probs(batch, "ref").log_probs, trainer.compute_log_probs(batch).log_probs
    )
    return found


@pytest.mark.parametrize("offload", POLICIES)
@pytest.mark.parametrize("world", [2])
def test_a_checkpoint_brings_the_reference_of_its_time_back(
    folder: Path, ranks: RankPool, tmp_path: Path, offload: str, world: int
) -> None:
    config = settings(
        folder, mesh={"dp": world}, loss={"kl_coefficient": 0.1}, reference={"offload": offload},
        run={"dir": str(tmp_path)}, checkpoint={"keep_last": 3},
    )  # fmt: skip
    for found in ranks.run(world, loads_across_updates, config, fresh_batch()):
        assert found["first"] != found["followed"]  # else nothing below would mean anything
        assert found["loaded 1"] == found["loaded 3"] == found["first"]
        assert found["loaded 2"] == found["followed"] and found["follows again"]
        assert ("reference" in found["asleep"]) == (offload in ("sleep", "swap"))


def lost_folder(rank: int, config: RunConfig, batch: RolloutBatch, reference: Path) -> list[Any]:
    trainer = Trainer(config, device=CPU)
    trainer.save(1)
    trainer.train_step(batch)
    trainer.update_ref()
    weights = fingerprint(trainer.policy)
    if torch.distributed.get_rank() == 0:
        (reference / "config.json").rename(reference / "away.json")
    torch.distributed.barrier()
    followed = trainer.compute_log_probs(batch, "ref").log_probs
    error = error_of(trainer.load)
    kept = fingerprint(trainer.policy) == weights
    kept = kept and np.array_equal(trainer.compute_log_probs(batch, "ref").log_probs, followed)
    kept = kept and trainer.memory().asleep == ("reference",)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        (reference / "away.json").rename(reference / "config.json")
    torch.distributed.barrier()
    trainer.load()
    return [error, kept, trainer.train_step(batch)["kl_ref"]]


def test_a_reference_whose_folder_is_gone_fails_the_load_before_anything_changes(
    folder: Path, ranks: RankPool, tmp_path: Path
) -> None:
    reference = save_tiny_model(tmp_path / "ref", tie_word_embeddings=True, vocab_size=97, intermediate_size=55)
    config = settings(
        folder, mesh={"dp": 2}, loss={"kl_coefficient": 0.1}, reference={"path": str(reference)},
        run={"dir": str(tmp_path)},
    )  # fmt: skip
    for error, kept, kl in ranks.run(2, lost_folder, config, fresh_batch(), reference):
        assert isinstance(error, ModelError) and kept
        assert kl == 0.0  # the folder holds the policy's first weights, and so did the checkpoint


def refused_by_its_tensors(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, Any]:
    trainer = Trainer(config, device=CPU)
    folder = trainer.save(1)
    if rank == 0:  # found out when reads are planned, after the reference of that time is at hand
        forge_index(folder, lambda index: index["tensors"].pop("model.model.norm.weight"))
    torch.distributed.barrier()
    trainer.train_step(batch)
    trainer.update_ref()
    trainer.train_step(batch)

    def state() -> tuple[Any, ...]:
        moments = [value for state in trainer.updater.optimizer.state.values() for value in state.values()]
        return (
            fingerprint(trainer.policy),
            [(v.to_local() if isinstance(v, DTensor) else v).clone().numpy().tobytes() for v in moments],
            trainer.updater.progress(),
            trainer.compute_log_probs(batch, "ref").log_probs.tobytes(),
        )

    before = state()
    error = error_of(trainer.load)
    asleep = trainer.memory().asleep
    trainer.sleep(("reference",))
    follows = trainer._state.reference.follows
    return {"error": error, "unchanged": state() == before, "asleep": asleep, "follows": follows}


def test_a_load_that_is_refused_late_changes_neither_policy_nor_moments_nor_reference(
    folder: Path, ranks: RankPool, tmp_path: Path
) -> None:
    config = settings(folder, mesh={"dp": 2}, loss={"kl_coefficient": 0.1}, run={"dir": str(tmp_path)})
    for result in ranks.run(2, refused_by_its_tensors, config, fresh_batch()):
        assert isinstance(result["error"], CheckpointError) and "model.norm.weight" in str(result["error"])
        assert result["unchanged"] and result["follows"] and result["asleep"] == ("reference",)


def update_without_a_reference(rank: int, config: RunConfig) -> list[Any]:
    trainer = Trainer(config, device=CPU)
    return [error_of(trainer.update_ref), trainer.reference]


@pytest.mark.parametrize("dp", [None, 1])
def test_an_update_of_no_reference_is_refused(folder: Path, ranks: RankPool, dp: int | None) -> None:
    error, reference = ranks.run(1, update_without_a_reference, settings(folder, reference={"dp": dp}))[0]
    assert isinstance(error, StateError) and error.field == "reference.dp" and reference is None


def update_of_another_architecture(rank: int, config: RunConfig, batch: RolloutBatch) -> list[Any]:
    trainer = Trainer(config, device=CPU)
    before = trainer.compute_log_probs(batch, "ref").log_probs
    error = error_of(trainer.update_ref)
    return [error, np.array_equal(trainer.compute_log_probs(batch, "ref").log_probs, before)]


@pytest.mark.parametrize("offload", POLICIES)
def test_a_reference_of_another_architecture_says_its_own_and_cannot_follow(
    folder: Path, ranks: RankPool, tiny_folder: TinyFolder, offload: str
) -> None:
    larger = tiny_folder(vocab_size=97, hidden_size=48)
    reference = {"path": str(larger), "offload": offload}
    config = settings(folder, mesh={"dp": 2}, loss={"kl_coefficient": 0.1}, reference=reference)
    for error, same in ranks.run(2, update_of_another_architecture, config, fresh_batch()):
        assert isinstance(error, StateError) and error.field == "reference.path" and same
