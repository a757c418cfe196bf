"""A supervised group whose ranks fail when they are told to, and what its jobs leave where nothing fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from actors.supervisor import SupervisedGroup
from actors.worker_group import WorkerGroup
from slimefsdp.config import RunConfig
from tests.faults.faulty_worker import FaultPlan, faulty_worker
from tests.faults.recorded_job import Outcome, begin, job, settings, start_receiver
from tests.tiny_models import save_tiny_model

MATRIX = {"steps": 5, "save_every": 2}  # of the jobs in which ranks fail at the phases of a step
SAVES = {"steps": 6, "save_every": 1}  # of those in which saves fail, or what they wrote
MakeSettings = Callable[[str], RunConfig]


@pytest.fixture(scope="session")
def tiny_settings(tmp_path_factory: pytest.TempPathFactory) -> MakeSettings:
    """By the name of a run, its settings: `tests.faults.recorded_job.settings` on a tiny model."""
    folder = tmp_path_factory.mktemp("recorded_job")
    model = save_tiny_model(folder / "model")
    # a busy machine may keep a healthy rank waiting: this long without an answer is no slowness
    impatient = {"ping_timeout_s": 5.0}
    return lambda name: settings(model, folder / name, checkpoint={"keep_last": 8}, cluster=impatient)


@pytest.fixture(scope="session")
def receiver(cluster: None) -> Any:
    """What the jobs send their weights to."""
    return start_receiver()


@pytest.fixture(scope="session")
def undisturbed(
    cluster: None, tiny_settings: MakeSettings, receiver: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Outcome]:
    """What both kinds of job leave on a group that nobody supervises or disturbs."""
    group = WorkerGroup.launch(tiny_settings("undisturbed"))
    begin(group)
    folder = tmp_path_factory.mktemp("undisturbed")
    found = {
        "matrix": job(group, receiver, folder / "matrix", **MATRIX),
        "saves": job(group, receiver, folder / "saves", **SAVES),
    }
    group.shutdown()
    return found


@dataclass(frozen=True)
class Supervised:
    """A group under a supervisor, and the plan of its ranks' faults."""

    group: SupervisedGroup
    faults: FaultPlan


@pytest.fixture(scope="session")
def supervised_group(
    cluster: None, tiny_settings: MakeSettings, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Supervised]:
    plan = FaultPlan(tmp_path_factory.mktemp("faults"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actors.worker_group.TrainWorker", faulty_worker(plan.folder))
        group = SupervisedGroup.launch(tiny_settings("supervised"))
    begin(group)
    yield Supervised(group, plan)
    group.shutdown()


@pytest.fixture
def supervised(supervised_group: Supervised, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervised]:
    """The same, without any fault armed; ranks that are replaced can fail too."""
    monkeypatch.setattr("actors.worker_group.TrainWorker", faulty_worker(supervised_group.faults.folder))
    supervised_group.faults.arm()
    yield supervised_group
    supervised_group.faults.arm()
