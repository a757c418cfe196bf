"""Two ranks under Ray do what the bare Trainer does, survive bad input, and report a death instead of hanging."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from actors.cluster.placement import reserve
from actors.fault_tolerance.supervisor import SupervisedGroup
from actors.workers import worker_group
from actors.workers.futures import CallFuture
from actors.workers.group_calls import AdapterHandle, RankRequest, submit
from actors.workers.named_group import NamedGroup
from actors.workers.train_worker import TrainWorker
from actors.workers.worker_group import WorkerGroup
from slimefsdp.checkpoint.store import CheckpointStore
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    ModelError,
    PeerFailed,
    ResourceError,
    SlimeError,
    StateError,
    SyncError,
    WorkerDied,
    WorkerHung,
)
from slimefsdp.results import Health, Memory
from slimefsdp.rpc import CALLS, ROLES
from slimefsdp.trainer import Trainer
from slimefsdp.training.plan import plan_training
from tests.support.refusals import refused
from tests.support.runs import TIMES, bits
from tests.support.waiting import PATIENCE_S, is_alive, wait_until

ROOT = Path(__file__).parents[2]


# ------------------------------------------------------------------ the same as the bare Trainer


def test_trainer_and_all_handles_have_the_same_calls_and_nobody_defines_one_again() -> None:
    public = {name for name in dir(Trainer) if inspect.isfunction(getattr(Trainer, name)) and name[0] != "_"}
    assert public == {*CALLS, "health", "use_adapter"}
    for name, call in CALLS.items():
        for kind in (WorkerGroup, SupervisedGroup, NamedGroup, AdapterHandle):
            assert getattr(kind, name) is getattr(Trainer, name)
        assert call.method.__doc__ and set(call.roles) <= set(ROLES)
        if call.prepare is not None:
            assert "batch" in inspect.signature(call.method).parameters
        if call.adapter == "by_name":
            assert "name" in inspect.signature(call.method).parameters


def test_a_train_step_is_bit_identical_to_the_same_ranks_under_torchrun(
    group: Any, batch: RolloutBatch, actor_config: RunConfig, tmp_path: Path
) -> None:
    batch.save(tmp_path / "batch.safetensors")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(actor_config.model_dump(mode="json", exclude_unset=True)))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "slimefsdp.replay"]
    done = subprocess.run(
        [sys.executable, *torchrun, "config.yaml", "--batch", "batch.safetensors", "--export", "theirs"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
        text=True, check=True, timeout=PATIENCE_S,
    )  # fmt: skip
    metrics = group.train_step(batch)
    assert metrics["updates"] >= 2 and metrics["loss"] != 0 and metrics["kl_ref"] > 0
    assert bits(metrics) == bits(json.loads(done.stdout))
    assert group.export_hf(tmp_path / "ours") == tmp_path / "ours"
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    AutoModelForCausalLM.from_pretrained(tmp_path / "ours")


def test_sleep_frees_memory_on_every_rank_and_changes_no_bit(group: Any, batch: RolloutBatch) -> None:
    expected = [bits(group.train_step(batch)) for _ in range(2)]
    group.load(0)
    awake = group.memory()
    assert [type(memory) for memory in awake] == [Memory, Memory]
    assert all(memory.parameters > 0 and memory.optimizer >= 2 * 0.9 * memory.parameters for memory in awake)
    first = bits(group.train_step(batch))
    reports = group.sleep()
    assert len(reports) == 2
    assert all(report.device_bytes_before > 0 and report.device_bytes_after == 0 for report in reports)
    assert all(report.device_bytes_before == 0 for report in group.sleep()), "a second sleep has nothing to do"
    for memory, before in zip(group.memory(), awake, strict=True):
        assert (memory.parameters, memory.optimizer, memory.reference) == (0, 0, 0)
        assert memory.host_buffers >= before.parameters + before.optimizer
        assert memory.asleep == ("parameters", "optimizer", "reference")
    second = bits(group.train_step(batch))  # wakes what it needs
    assert [first, second] == expected
    group.sleep(("optimizer",))
    assert all(memory.asleep == ("optimizer", "reference") for memory in group.memory())
    group.wake_up()
    assert all(memory.asleep == () for memory in group.memory())


def test_a_group_can_be_looked_into(group: Any, batch: RolloutBatch) -> None:
    with refused(StateError, "gradient_health"):
        group.gradient_health()
    metrics = group.train_step(batch)
    descriptions = group.describe()
    assert [description.rank for description in descriptions] == [0, 1]
    assert all(description.units[0].name == "(root)" for description in descriptions)
    numel = descriptions[0].numel
    assert sum(description.local_bytes for description in descriptions) == 4 * numel, "each rank holds its own share"
    assert group.check_sync().is_in_sync
    health = submit(group.gradient_health).result()
    assert not health.is_skipped and list(health.group_norms)[:2] == ["embedding", "layer_0"]
    assert metrics["updates"] > 1 and health.update == metrics["updates"] - 1, "it is that of the last update"


def test_a_checkpoint_brings_back_every_bit(group: Any, batch: RolloutBatch, actor_config: RunConfig) -> None:
    group.train_step(batch)
    folder = group.save(5, {"cursor": [3, 1], "name": "x"})
    assert folder.is_dir() and folder.is_relative_to(actor_config.run.dir)
    updates = group.health()[0].updates_taken
    expected = bits(group.train_step(batch))
    assert group.load(0) == {"cursor": 17}
    assert group.health()[0].updates_taken == 0
    assert bits(group.train_step(batch)) != expected
    assert group.load("latest") == {"cursor": [3, 1], "name": "x"}
    assert group.health()[0].updates_taken == updates
    assert bits(group.train_step(batch)) == expected


# ------------------------------------------------------------------ bad input


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"k": value}
    return value


def test_a_group_that_saw_bad_input_goes_on_as_if_it_had_not(group: Any, batch: RolloutBatch, tmp_path: Path) -> None:
    expected = bits(group.train_step(batch))
    group.load(0)
    before = [(one.rank, one.pid, one.updates_taken) for one in group.health()]
    for kind, call in [
        # what the driver knows; tests/faults/test_bad_input.py has more of both kinds
        (BatchError, lambda: group.train_step(batch.select(range(8)), plan_training(group.config, batch))),
        (SyncError, lambda: group.update_weights(None)),
        (CheckpointError, lambda: group.save(1, nested(5_000))),
        (ConfigError, lambda: group.export_hf(None)),
        (ConfigError, lambda: submit(group.health)),
        # what only the ranks can know: they refuse it alike, and stay together
        (ConfigError, lambda: group.sleep(3)),
        (CheckpointError, lambda: group.save(1.5)),
        (CheckpointError, lambda: group.export_hf(tmp_path / ("x" * 300))),
    ]:
        with pytest.raises(kind):
            call()
    for wrong in (lambda: group.train_step(batch, verbose=True), group.save):  # Python's own, by the signature
        with pytest.raises(TypeError):
            wrong()
    assert [(one.rank, one.pid, one.updates_taken) for one in group.health()] == before
    assert bits(group.train_step(batch)) == expected


# ------------------------------------------------------------------ launching


def test_a_launch_that_cannot_work_says_so_before_any_process_starts(
    cluster: None, make_config: Any, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as missing:
        WorkerGroup.launch(make_config(model={"path": str(tmp_path / "nowhere")}))
    assert missing.value.field == "model.path"
    with pytest.raises(ModelError) as no_reference:
        WorkerGroup.launch(make_config(reference={"path": str(tmp_path / "nowhere")}), role="ref")
    assert no_reference.value.field == "reference.path"
    with refused(ResourceError, "mesh.dp", 200, "CPU"):
        reserve(200, gpus_per_rank=0, timeout_s=1.0)
    with pytest.raises(ResourceError) as too_many:
        WorkerGroup.launch(make_config(mesh={"dp": 100}))
    assert too_many.value.field == "mesh.dp"


# ------------------------------------------------------------------ ranks that hang, fail and die


def test_health_answers_while_a_rank_waits_in_a_collective(group: Any, batch: RolloutBatch) -> None:
    expected = bits(group.train_step(batch))
    group.load(0)
    stuck = group.health()[1]
    os.kill(stuck.pid, signal.SIGSTOP)
    try:
        future = submit(group.train_step, batch)  # rank 0 enters its first collective and waits there
        time.sleep(1.5)  # to be there; that it cannot answer is the other one's doing
        answer, silence = group.health(timeout_s=10.0)
    finally:
        os.kill(stuck.pid, signal.SIGCONT)
    assert isinstance(answer, Health) and answer.rank == 0
    assert isinstance(silence, WorkerHung) and silence.rank == 1
    assert bits(future.result()) == expected


@pytest.fixture
def doomed(cluster: None, make_config: Any) -> Iterator[Any]:
    group = WorkerGroup.launch(make_config())
    yield group
    group.shutdown()


def test_a_killed_rank_is_named_at_once_and_the_group_can_be_shut_down(doomed: Any, batch: RolloutBatch) -> None:
    pids = [health.pid for health in doomed.health()]
    assert all(map(is_alive, pids)) and os.getpid() not in pids
    os.kill(pids[1], signal.SIGSTOP)  # so that the call cannot end before the kill
    future = submit(doomed.train_step, batch)
    time.sleep(0.5)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDied) as died:  # and not WorkerHung, as when cluster.call_timeout_s is over
        future.result()
    assert died.value.rank == 1 and died.value.call == "train_step" and died.value.hint
    survivor, dead = doomed.health()
    assert isinstance(survivor, Health) and survivor.pid == pids[0]
    assert isinstance(dead, WorkerDied) and dead.rank == 1
    with pytest.raises(WorkerDied):
        doomed.compute_log_probs(batch)
    doomed.shutdown()
    assert wait_until(lambda: not any(map(is_alive, pids)))
    assert doomed.health() == []
    for name, args in (("train_step", (batch,)), ("update_ref", ()), ("update_weights", ([],))):
        with refused(StateError, name, f"{name}()"):
            getattr(doomed, name)(*args)


def test_a_rank_that_fails_alone_frees_its_peers(doomed: Any, batch: RolloutBatch) -> None:
    health = doomed.health()
    request = RankRequest("train_step", {"batch": batch})
    good = doomed.prepared(request, doomed.check(request))
    # only rank 1 gets it, and fails before the collective that rank 0 waits in
    bad = good.having(another="one too many")
    refs = [worker.call.remote(call) for worker, call in zip(doomed.receivers, (good, bad), strict=True)]
    # long for a busy machine, and less than the cluster.call_timeout_s that a peer would wait for
    done, _ = ray.wait(refs, num_returns=2, timeout=0.75 * doomed.config.cluster.call_timeout_s)
    assert len(done) == 2
    with pytest.raises(TypeError):  # rank 1's own, not rank 0's about a lost peer
        CallFuture(refs, name="train_step", timeout_s=PATIENCE_S, first_only=True).result()
    pid = health[0].pid
    assert wait_until(lambda: isinstance(doomed.health()[1], WorkerDied))
    assert isinstance(doomed.health()[0], Health) and doomed.health()[0].pid == pid


class OnNccl(TrainWorker):
    """As NCCL, whose kernels wait for a peer that is gone, and end without an error when they are aborted.

    They end while the abort is at work: the thread of the call answers before the abort returns.
    """

    def add_trainer(self, config: RunConfig, role: str) -> str:
        import threading

        from slimefsdp.distributed import collectives

        level = super().add_trainer(config, role)
        is_freed, self._has_answered = threading.Event(), threading.Event()

        def abort() -> None:
            is_freed.set()
            self._has_answered.wait(600)

        def meet(last_one_fails: bool) -> Any:
            """Rank 0 waits in a kernel for rank 1, which does not come."""
            if self.rank == 1 and last_one_fails:
                raise MemoryError("nothing left")
            return is_freed.wait(600) and "whatever was in memory"

        self.trainers[role].describe = meet
        collectives.needs_abort = lambda: True
        collectives.abort_collectives = abort
        return level

    def call(self, request: RankRequest, role: str = "actor") -> Any:
        try:
            return super().call(request, role)
        finally:
            self._has_answered.set()


@pytest.fixture
def on_nccl(cluster: None, make_config: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A group of two ranks of `OnNccl`."""
    monkeypatch.setattr(worker_group, "TrainWorker", OnNccl)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # processes need not import this file
    try:
        group = WorkerGroup.launch(make_config())
        try:
            yield group
        finally:
            group.shutdown()
    finally:
        ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize(
    ("how", "cause"), [("is killed", WorkerDied), ("has no memory", ResourceError)], ids=["killed", "no memory"]
)
def test_a_rank_that_a_peers_end_does_not_free_is_freed_by_an_abort_and_answers_nothing_that_came_after(
    on_nccl: Any, how: str, cause: type[SlimeError]
) -> None:
    survivor, doomed = (health.pid for health in on_nccl.health() if isinstance(health, Health))
    request = RankRequest("describe", {"last_one_fails": how == "has no memory"})
    calls = [worker.call.remote(request) for worker in on_nccl.receivers]
    if how == "is killed":
        os.kill(doomed, signal.SIGKILL)
    with pytest.raises(cause) as failed:
        CallFuture(calls, name="describe", timeout_s=600, first_only=False, watchdog=on_nccl._watchdog).result()
    assert failed.value.rank == 1 and failed.value.ends_rank
    with pytest.raises(PeerFailed) as freed:
        ray.get(calls[0], timeout=PATIENCE_S)
    assert (freed.value.rank, freed.value.call) == (0, "describe")
    with pytest.raises(PeerFailed):
        ray.get(on_nccl.receivers[0].call.remote(RankRequest("memory")), timeout=PATIENCE_S)
    assert isinstance(on_nccl.health()[0], Health) and is_alive(survivor), "it ends with the group"
    assert wait_until(lambda: not is_alive(doomed))


def test_a_shutdown_lets_a_save_in_the_background_end(cluster: None, make_config: Any, tmp_path: Path) -> None:
    config = make_config(run={"dir": str(tmp_path)}, checkpoint={"async_save": True})
    group = WorkerGroup.launch(config)
    for step in range(1, 4):
        folder = group.save(step)
    group.shutdown()
    manifest, found, _ = CheckpointStore(folder.parent).newest_verified()
    assert (manifest.step, found) == (3, folder)


# ------------------------------------------------------------------ a reference group of its own


def test_a_reference_group_of_another_size_gives_the_colocated_result(
    group: Any, make_config: Any, small_batch: RolloutBatch
) -> None:
    apart = WorkerGroup.launch(make_config(loss={"kl_coefficient": 0.2}, reference={"dp": 1}))
    try:
        assert [len(apart.health()), len(apart.reference_group.health())] == [2, 1]
        kl = []
        for step in range(5):
            if step == 3:
                apart.update_ref()
                group.update_ref()
            metrics, colocated = apart.train_step(small_batch), group.train_step(small_batch)
            assert metrics.keys() == colocated.keys()
            for name in metrics.keys() - TIMES:
                assert metrics[name] == pytest.approx(colocated[name], abs=1e-6, rel=1e-5), (step, name)
            kl.append(metrics["kl_ref"])
        assert kl[0] <= 1e-6 and kl[3] <= 1e-6
        assert min(kl[1], kl[2], kl[4]) > 1e-5
        log_probs = apart.reference_group.compute_log_probs(small_batch, model="ref").log_probs
        np.testing.assert_allclose(log_probs, group.compute_log_probs(small_batch, "ref").log_probs, atol=1e-5)
        with pytest.raises(StateError) as elsewhere:
            apart.compute_log_probs(small_batch, model="ref")
        assert elsewhere.value.field == "model"
        with pytest.raises(StateError, match="role 'ref'"):
            apart.reference_group.train_step(small_batch)
        assert apart.train_step(small_batch)["updates"] == 1
        pids = [health.pid for health in [*apart.health(), *apart.reference_group.health()]]
    finally:
        apart.shutdown()
    assert wait_until(lambda: not any(map(is_alive, pids)))
