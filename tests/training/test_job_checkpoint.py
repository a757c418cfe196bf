"""One checkpoint holds policy, critic and reference of a moment: all of it comes back, or nothing of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slimefsdp.checkpoint.store import PARTS, CheckpointStore
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import CheckpointError
from slimefsdp.rpc import JobCheckpoint, Role
from slimefsdp.trainer import Trainer
from tests.support.plain_critic import critic_batch, critic_settings
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import TinyFolder
from tests.support.trainers import error_of, fingerprint

CPU = torch.device("cpu")
ROLES: tuple[Role, ...] = ("critic", "ref", "actor")  # in the order in which a driver saves them


class Job:
    """The Trainers of a job's three groups, all in this process."""

    def __init__(self, config: RunConfig) -> None:
        self.trainers = {role: Trainer(config, role, device=CPU) for role in ROLES}

    def save(self, step: int, save_id: str) -> None:
        job = JobCheckpoint(save_id, tuple(PARTS.values()))
        self.trainers["actor"].finish_save()
        for role, trainer in self.trainers.items():
            trainer.job = replace(job, is_part=role != "actor")
            trainer.save(step, {"cursor": step})

    def load(self, step: int, save_id: str | None = None) -> None:
        self.trainers["actor"].job = JobCheckpoint(save_id)
        assert self.trainers["actor"].load(step) == {"cursor": step}
        for role in ("critic", "ref"):
            self.trainers[role].job = JobCheckpoint(is_part=True)
            self.trainers[role].load(step)

    def train(self, batch: RolloutBatch) -> None:
        for role in ("critic", "actor"):
            self.trainers[role].train_step(batch)

    def update_reference(self) -> None:
        named, receiver = self.trainers["actor"].policy.named_weights(), self.trainers["ref"].receiver
        receiver.begin(1, {name: tuple(parameter.shape) for name, parameter in named})
        receiver.receive([(name, parameter.full_tensor().detach()) for name, parameter in named])
        receiver.commit(1)

    def state(self) -> tuple[Any, ...]:
        weights = [fingerprint(trainer.policy) for trainer in self.trainers.values()]  # type: ignore[arg-type]
        return *weights, *(self.trainers[role].updater.progress() for role in ("critic", "actor"))


def saved_and_loaded(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, Any]:
    job = Job(config)
    states, trained = [], []
    for step in range(3):
        states.append(job.state())
        job.save(step, f"save {step}")
        job.train(batch)
        trained.append(job.state())
        if step == 0:
            job.update_reference()
    job.trainers["actor"].finish_save()
    loaded = []
    for step in (2, 0, 1):  # the reference of the launch, and one that was updated
        job.load(step, f"save {step}")
        loaded.append(job.state())
        job.train(batch)
        assert job.state() == trained[step]
    actor, critic = job.trainers["actor"], job.trainers["critic"]
    actor.job = JobCheckpoint("save 2")
    wrong = error_of(lambda: actor.load(1))
    critic.job = JobCheckpoint("of the critic alone")
    critic.save(5)
    critic.train_step(batch)
    critic.job = None
    critic.load(5)
    actor.job = JobCheckpoint("x", ("critic",))
    missing = error_of(lambda: actor.save(7))
    return {
        "are equal": loaded == [states[2], states[0], states[1]],
        "moved": [len(set(map(repr, of_role))) for of_role in zip(*states, strict=True)],
        "critic": job.state()[0] == trained[1][0],
        "errors": (wrong, missing or error_of(actor.finish_save)),
    }


@pytest.mark.parametrize("async_save", [False, True])
def test_policy_critic_and_reference_come_back_together(
    tiny_folder: TinyFolder, ranks: RankPool, tmp_path: Path, async_save: bool
) -> None:
    config = critic_settings(
        tiny_folder(), run={"dir": str(tmp_path)}, mesh={"dp": 2}, loss={"kl_coefficient": 0.1},
        reference={"dp": 2}, checkpoint={"async_save": async_save, "keep_last": 3},
    )  # fmt: skip
    for found in ranks.run(2, saved_and_loaded, config, critic_batch()):
        assert found["are equal"] and found["critic"] and found["moved"] == [3, 2, 3, 3, 3]
        assert all(isinstance(error, CheckpointError) for error in found["errors"])
    store = CheckpointStore.of_run(tmp_path)
    assert CheckpointStore.of_run(tmp_path, "critic").steps() == [5]
    assert store.steps() == [0, 1, 2]
    assert all(store.verify(store.path_of(step)).parts == ("critic", "reference") for step in store.steps())
    assert not list(store.root.glob(".part_*")) and not list(store.root.glob(".tmp_*"))
