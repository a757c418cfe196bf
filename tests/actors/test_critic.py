"""The critic in a group: beside the actor or in processes of its own, trained with it, saved with it, gone with it."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.loop import train
from actors.workers.worker_group import WorkerGroup
from slimefsdp.checkpoint.store import CheckpointStore
from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import StateError
from tests.support.runs import bits, rows_of

STEPS, INTERVAL, WARMED = 6, 4, 2


@pytest.fixture(scope="module")
def make_ppo(make_config: Any) -> Any:
    """Settings as `make_config` makes them, of PPO."""

    def make(**sections: dict[str, Any]) -> RunConfig:
        critic = {"critic": sections.pop("critic", {})}
        return config_from_dict(
            {**make_config(**sections).model_dump(exclude_unset=True), "algorithm": "ppo", **critic}
        )

    return make


CRITIC_LR = 0.01


@pytest.fixture(scope="module")
def colocated(cluster: None, make_ppo: Any) -> Iterator[WorkerGroup]:
    group = WorkerGroup.launch(make_ppo(batch={"samples_per_update": 6}, critic={"lr": CRITIC_LR}))
    yield group
    group.shutdown()


@pytest.fixture(scope="module")
def first_steps(colocated: WorkerGroup, batch: RolloutBatch) -> tuple[list[dict[str, str]], list[np.ndarray]]:
    return two_steps(colocated, batch)


@pytest.fixture(scope="module")
def critic(colocated: WorkerGroup, first_steps: Any) -> WorkerGroup:
    """As its first steps left it."""
    assert colocated.critic is not None
    return colocated.critic


def two_steps(group: WorkerGroup, batch: RolloutBatch) -> tuple[list[dict[str, str]], list[np.ndarray]]:
    """Metrics and values of two steps, each of which trains critic and policy."""
    assert group.critic is not None
    metrics, values = [], []
    for _ in range(2):
        values.append(group.critic.compute_values(batch))
        with_values = batch.replace(values=values[-1])
        metrics += [bits(group.critic.train_step(with_values)), bits(group.train_step(with_values))]
    return metrics, values


def test_a_critic_computes_the_same_beside_the_actor_and_in_processes_of_its_own(
    colocated: WorkerGroup, critic: WorkerGroup, first_steps: Any, make_ppo: Any, batch: RolloutBatch
) -> None:
    settings = {"lr": CRITIC_LR, "dp": 2}
    group = WorkerGroup.launch(make_ppo(batch={"samples_per_update": 6}, critic=settings))
    assert group.critic is not None
    apart, own = two_steps(group, batch), {answer.pid for each in (group, group.critic) for answer in each.health()}
    group.shutdown()
    with pytest.raises(StateError):
        group.critic.compute_values(batch)
    metrics, values = first_steps
    assert metrics == apart[0] and all(map(np.array_equal, values, apart[1]))
    assert not values[0].any() and values[1].any() and values[1].shape == (batch.num_response_tokens,)
    assert len(own) == 4 and len({answer.pid for each in (colocated, critic) for answer in each.health()}) == 2


def test_a_critic_sleeps_and_wakes_without_the_actor(
    colocated: WorkerGroup, critic: WorkerGroup, batch: RolloutBatch
) -> None:
    before = critic.compute_values(batch)
    assert all(report.device_bytes_after < report.device_bytes_before for report in critic.sleep())
    assert all(memory.parameters == 0 and memory.optimizer == 0 for memory in critic.memory())
    assert all(memory.parameters > 0 and not memory.asleep for memory in colocated.memory())
    np.testing.assert_array_equal(critic.compute_values(batch), before)
    assert critic.check_sync().is_in_sync


@pytest.fixture(scope="module")
def make_run(make_ppo: Any, example: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run in which everything moves: a KL in the rewards whose coefficient adapts, and several updates a step.

    The reference is a group of its own, which equals no policy that is saved.
    """
    folder = tmp_path_factory.mktemp("ppo")

    def make(name: str, *, steps: int, lora: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
        return make_ppo(
            lora=lora or {},
            run={"dir": str(folder / name), "steps": steps, "seed": 5, "export_dir": str(folder / f"{name}_{steps}")},
            batch={"samples_per_update": 8},
            loss={"kl_coefficient": 0.1, "kl_in": "reward", "kl_target": 0.01},
            data={"train": str(example / "train.jsonl")},
            rollout={
                "prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 6, "engines": 1,
                "reward": "tests.support.runs:variety",
            },
            reference={} if lora else {"dp": 2, "update_interval_steps": INTERVAL - 1},
            checkpoint={"interval_steps": INTERVAL, "keep_last": 2, **sections},
            critic={"lr": 0.01, "warmup_steps": WARMED},
        )  # fmt: skip

    return make


def model_bits(config: RunConfig) -> str:
    assert config.run.export_dir is not None
    return hashlib.sha256((config.run.export_dir / "model.safetensors").read_bytes()).hexdigest()


def critic_bits(config: RunConfig, step: int) -> list[str]:
    assert config.run.dir is not None
    folder = CheckpointStore.of_run(config.run.dir).path_of(step) / "critic"
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.glob("*.safetensors"))]


@pytest.fixture(scope="module")
def straight(cluster: None, make_run: Any) -> RunConfig:
    config: RunConfig = make_run("straight", steps=STEPS)
    assert train(config).startswith("PPO on 2 FSDP2 ranks")
    return config


def test_the_critic_is_trained_alone_at_first_and_with_the_policy_later(straight: RunConfig) -> None:
    rows = rows_of(straight)
    assert len(rows) == STEPS
    for index, row in enumerate(rows):
        assert row["critic/updates"] == 2.0 and np.isfinite(row["critic/loss"])
        assert row["updates"] == (0.0 if index < WARMED else 2.0) and ("grad_norm" in row) == (index >= WARMED)
        assert row["weight_version"] == 2.0 * max(0, index + 1 - WARMED)
    # nothing was expected at first, and something soon after
    assert rows[0]["critic/value"] != 0.0 and abs(rows[-1]["critic/value"]) > 0.01
    coefficients = [row["kl_coefficient"] for row in rows[WARMED:]]
    assert coefficients[0] == 0.1 and len(set(coefficients)) == len(coefficients)


def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(straight: RunConfig, make_run: Any) -> None:
    for steps, resume in ((INTERVAL, False), (STEPS, True)):
        config = make_run("resumed", steps=steps, resume=resume, async_save=True)
        train(config)
    assert list(map(bits, rows_of(config))) == list(map(bits, rows_of(straight)))
    assert model_bits(config) == model_bits(straight)
    assert critic_bits(config, STEPS) == critic_bits(straight, STEPS) != critic_bits(straight, INTERVAL)


def test_a_checkpoint_whose_critic_is_damaged_is_passed_over(
    straight: RunConfig, make_run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_run("halved", steps=STEPS, resume=True)
    assert straight.run.dir is not None and config.run.dir is not None
    shutil.copytree(straight.run.dir, config.run.dir)
    critic = CheckpointStore.of_run(config.run.dir).path_of(STEPS) / "critic"
    with (critic / "rank_00001.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read()
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    train(config)
    assert list(map(bits, rows_of(config))) == list(map(bits, rows_of(straight)))
    said = capsys.readouterr().err
    assert "critic/rank_00001.safetensors" in said and f"resuming at step {INTERVAL}" in said
