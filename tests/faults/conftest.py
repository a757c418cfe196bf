"""A supervised group whose ranks fail when they are told to, and what its jobs leave where nothing fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from actors.fault_tolerance.supervisor import SupervisedGroup
from actors.workers.worker_group import WorkerGroup
from slimefsdp.config import RunConfig
from tests.support.faulty_worker import FaultPlan, Supervised, faulty_worker
from tests.support.recorded_job import MATRIX, SAVES, Outcome, begin, job, settings, start_receiver
from tests.support.tiny_models import save_tiny_model

MakeSettings = Callable[[str], RunConfig]


@pytest.fixture(scope="session")
def tiny_settings(tmp_path_factory: pytest.TempPathFactory) -> MakeSettings:
    """By the name of a run, its settings: `tests.support.recorded_job.settings` on a tiny model."""
    folder = tmp_path_factory.mktemp("recorded_job")
    model = save_tiny_model(folder / "model")
    # few faults stop a rank, so patience costs little, and a busy machine may keep a healthy one from answering
    impatient = {"ping_timeout_s": 20.0}
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


@pytest.fixture(scope="session")
def supervised_group(
    cluster: None, tiny_settings: MakeSettings, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Supervised]:
    plan = FaultPlan(tmp_path_factory.mktemp("faults"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actors.workers.worker_group.TrainWorker", faulty_worker(plan.folder))
        group = SupervisedGroup.launch(tiny_settings("supervised"))
    begin(group)
    yield Supervised(group, plan)
    group.shutdown()


@pytest.fixture
def supervised(supervised_group: Supervised, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervised]:
    """The same, without any fault armed; ranks that are replaced can fail too."""
    monkeypatch.setattr("actors.workers.worker_group.TrainWorker", faulty_worker(supervised_group.faults.folder))
    supervised_group.faults.arm()
    yield supervised_group
    supervised_group.faults.arm()
