"""Two ranks under Ray do what the bare Trainer does, survive bad input, and report a death instead of hanging."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import ray
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from actors.cluster.placement import reserve
from actors.workers import worker_group
from actors.workers.futures import CallFuture, QueuedCall
from actors.workers.group_calls import RankRequest
from actors.workers.train_worker import Loaded, TrainWorker
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
from slimefsdp.rpc import ROLES_OF_CALLS, UpdateSettings
from slimefsdp.trainer import Trainer
from slimefsdp.training.plan import plan_training
from tests.support.refusals import refused
from tests.support.rpcs import RPCS
from tests.support.runs import TIMES, Untouchable, bits
from tests.support.waiting import PATIENCE_S, is_alive, wait_until

ROOT = Path(__file__).parents[2]


# ------------------------------------------------------------------ the same as the bare Trainer


def test_trainer_and_group_have_the_same_calls_with_the_same_arguments_and_async_twins() -> None:
    public = {name for name, value in vars(Trainer).items() if callable(value) and not name.startswith("_")}
    assert public == {*RPCS, "health", "use_adapter"} and set(RPCS) == ROLES_OF_CALLS.keys()
    for name in RPCS:
        call, twin = getattr(WorkerGroup, name), getattr(WorkerGroup, f"{name}_async")
        assert call.__doc__ and twin.__doc__
        of_rank, of_group, of_twin = (
            {key: (one.default, one.kind) for key, one in inspect.signature(function).parameters.items()}
            for function in (getattr(Trainer, name), call, twin)
        )
        if name == "update_weights":  # receivers that a rank drops are Ray actors
            of_rank["drop_failed"] = (False, inspect.Parameter.KEYWORD_ONLY)
        assert of_rank == of_group == of_twin, name
        hints, of_future = get_type_hints(call), get_type_hints(twin)
        assert get_args(of_future.pop("return")) == (hints.pop("return"),) and hints == of_future, name


@pytest.fixture(scope="module")
def replayed(
    actor_config: RunConfig, batch: RolloutBatch, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, float], Path, dict[str, float]]:
    """Metrics and weights of two torchrun ranks, and the metrics of one plain process, on the same batch."""
    folder = tmp_path_factory.mktemp("replayed")
    batch.save(folder / "batch.safetensors")
    (folder / "config.yaml").write_text(yaml.safe_dump(actor_config.model_dump(mode="json", exclude_unset=True)))
    replay = ["-m", "slimefsdp.replay", "config.yaml", "--batch", "batch.safetensors"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    commands = [[*torchrun, *replay, "--export", "two"], [*replay, "mesh.dp=1"]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([sys.executable, *command], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    two, one = (json.loads(process.communicate(timeout=PATIENCE_S)[0]) for process in started)
    assert [process.returncode for process in started] == [0, 0]
    return two, folder / "two", one


def test_a_train_step_is_bit_identical_to_the_same_ranks_under_torchrun(
    group: Any, batch: RolloutBatch, replayed: Any, tmp_path: Path
) -> None:
    metrics = group.train_step(batch)
    two, folder, _ = replayed
    assert metrics["updates"] >= 2 and metrics["loss"] != 0 and metrics["kl_ref"] > 0
    assert bits(metrics) == bits(two)
    assert group.export_hf(tmp_path / "exported") == tmp_path / "exported"
    ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / "exported", folder))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    AutoModelForCausalLM.from_pretrained(tmp_path / "exported")


def test_a_train_step_agrees_with_one_plain_process(group: Any, batch: RolloutBatch, replayed: Any) -> None:
    metrics, one = group.train_step(batch), replayed[2]
    assert metrics.keys() == one.keys()
    for name in metrics.keys() - TIMES - {"plan_imbalance"}:  # one rank has no imbalance
        assert metrics[name] == pytest.approx(one[name], abs=1e-6, rel=1e-5), name


def test_log_probs_and_entropies_are_transformers_own(group: Any, batch: RolloutBatch, actor_config: RunConfig) -> None:
    model = AutoModelForCausalLM.from_pretrained(actor_config.model.path, dtype=torch.float32)
    log_probs, entropy = [], []
    for sample in batch.to_samples():
        tokens, length = torch.as_tensor(np.array(sample["tokens"])), sample["response_length"]
        with torch.no_grad():
            logits = model(input_ids=tokens[None]).logits[0, :-1] / actor_config.rollout.temperature
        table = logits.log_softmax(-1)[-length:]
        log_probs.append(table.gather(-1, tokens[-length:, None])[:, 0])
        entropy.append(-(table.exp() * table).sum(-1))
    for which in ("actor", "ref"):
        answer = group.compute_log_probs(batch, model=which)
        assert answer.log_probs.dtype == np.float32
        np.testing.assert_allclose(answer.log_probs, torch.cat(log_probs), atol=1e-5)
        np.testing.assert_allclose(answer.entropy, torch.cat(entropy), atol=1e-5)


def test_the_primitives_are_what_train_step_is_made_of(group: Any, small_batch: RolloutBatch) -> None:
    whole = group.train_step(small_batch)
    after = group.compute_log_probs(small_batch)
    group.load(0)
    metrics = {**group.forward_backward(small_batch), **group.optimizer_step()}
    assert whole["updates"] == 1 and metrics.keys() <= whole.keys()
    assert bits(metrics) == {name: value for name, value in bits(whole).items() if name in metrics}
    np.testing.assert_array_equal(group.compute_log_probs(small_batch).log_probs, after.log_probs)


def test_a_loop_of_ones_own_says_by_call_what_it_trains(group: Any, small_batch: RolloutBatch) -> None:
    before = group.compute_log_probs(small_batch)
    weighted = small_batch.replace(loss_weights=-np.ones(small_batch.num_response_tokens))
    found = group.forward_backward(weighted, "sft", 1.0, with_log_probs=True)
    np.testing.assert_array_equal(found.log_probs.log_probs, np.where(weighted.mask, before.log_probs, 0.0))
    assert found.metrics["loss"] == pytest.approx(float(before.log_probs[weighted.mask].sum(dtype=float)), rel=1e-5)
    bounds = {"policy": "cispo", "clip_low": 0.1, "clip_high": 0.1}
    again = group.forward_backward_async(small_batch, settings=bounds, with_log_probs=True)
    bounds["clip_low"] = 7.0  # what was given is what ranks get
    assert again.result().metrics["ratio"] == 1.0
    metrics = group.optimizer_step(UpdateSettings(lr=1e-3, betas=(0.5, 0.5), max_grad_norm=0.0))
    assert metrics["lr"] == 1e-3
    with refused(ConfigError, "settings"):
        group.forward_backward(small_batch, settings={"epochs": 2})
    with refused(ConfigError, "settings"):
        group.optimizer_step({"lr": 1.0})
    with refused(ConfigError, "with_log_probs"):
        group.forward_backward(small_batch, with_log_probs="yes")
    with refused(CheckpointError, "name"):
        group.save(3, name="a/b")
    after = group.compute_log_probs(small_batch).log_probs
    group.save(3, {"is": "named"}, name="kept")
    group.load(0)
    assert group.load(name="kept") == {"is": "named"}
    np.testing.assert_array_equal(group.compute_log_probs(small_batch).log_probs, after)


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
    health = group.gradient_health_async().result()
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


def test_async_twins_return_futures_and_keep_the_order_of_calls(group: Any, batch: RolloutBatch) -> None:
    expected = [bits(group.train_step(batch)) for _ in range(2)]
    group.load(0)
    futures = [group.train_step_async(batch) for _ in range(2)] + [group.memory_async(), group.update_ref_async()]
    assert all(isinstance(future, QueuedCall) for future in futures)
    results = [future.result() for future in futures]
    assert [bits(metrics) for metrics in results[:2]] == expected
    assert len(results[2]) == 2 and results[3] is None
    assert bits(futures[0].result()) == expected[0], "a future can be asked twice"


def test_the_reference_follows_only_update_ref(group: Any, small_batch: RolloutBatch) -> None:
    before = group.compute_log_probs(small_batch, "ref").log_probs
    assert group.train_step(small_batch)["kl_ref"] == 0.0
    np.testing.assert_array_equal(group.compute_log_probs(small_batch, "ref").log_probs, before)
    assert group.train_step(small_batch)["kl_ref"] > 1e-6
    assert group.update_ref() is None
    actor, reference = (group.compute_log_probs(small_batch, model).log_probs for model in ("actor", "ref"))
    np.testing.assert_array_equal(actor, reference)
    assert np.abs(reference - before).max() > 1e-3
    assert group.train_step(small_batch)["kl_ref"] == 0.0


# ------------------------------------------------------------------ bad input

# the driver's whole table is in test_group_alone.py: here, that ranks do not notice
BAD_BATCHES: dict[str, tuple[Callable[[Any, RolloutBatch], Any], type[SlimeError], str]] = {
    "no rewards": (lambda group, batch: group.train_step(batch.replace(rewards=None)), BatchError, "rewards"),
    "no groups": (lambda group, batch: group.train_step_async(batch.replace(group_ids=None)), BatchError, "group_ids"),
    "groups of one": (
        lambda group, batch: group.train_step(batch.replace(group_ids=np.arange(batch.num_samples))),
        BatchError,
        "group_ids",
    ),
    "a dictionary": (lambda group, batch: group.train_step({"tokens": batch.tokens}), BatchError, "batch"),
    "no batch": (lambda group, _: group.train_step(None), BatchError, "batch"),
    "an unknown model": (lambda group, batch: group.compute_log_probs(batch, "critic"), ConfigError, "model"),
    "an unknown loss": (lambda group, batch: group.forward_backward(batch=batch, loss="ppo"), ConfigError, "loss"),
    "a plan that is none": (lambda group, batch: group.train_step(batch, plan=[[0, 1]]), BatchError, "plan"),
    "another batch's plan": (
        lambda group, batch: group.train_step(batch.select([4, 5]), plan_training(group.config, batch)),
        BatchError,
        "plan",
    ),
}


@pytest.mark.parametrize("case", BAD_BATCHES)
def test_a_bad_batch_is_refused_before_any_rank_sees_it(
    case: str, actor_group: Any, batch: RolloutBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, kind, field = BAD_BATCHES[case]
    monkeypatch.setattr(actor_group, "_workers", [Untouchable(), Untouchable()])
    with pytest.raises(kind) as caught:
        call(actor_group, batch)
    assert caught.value.field == field and caught.value.hint and caught.value.rank is None


def places_of(group: Any) -> list[tuple[int, int, int]]:
    return [(one.rank, one.pid, one.updates_taken) for one in group.health()]


def test_a_group_that_saw_bad_input_goes_on_as_if_it_had_not(group: Any, batch: RolloutBatch, tmp_path: Path) -> None:
    expected = bits(group.train_step(batch))
    group.load(0)
    before = places_of(group)
    for call, kind, _ in BAD_BATCHES.values():
        with pytest.raises(kind):
            call(group, batch)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    # what only the ranks can know: they refuse it alike, and stay together
    for kind, call in [
        (StateError, group.optimizer_step),
        (ConfigError, lambda: group.sleep(("weights",))),
        (CheckpointError, lambda: group.load(99)),
        (CheckpointError, lambda: group.save(7, {"cursor": object()})),
        (CheckpointError, lambda: group.export_hf(tmp_path / "taken")),
        (BatchError, lambda: group.forward_backward(batch, denominator=0.0)),
    ]:
        with pytest.raises(kind) as caught:
            call()
        assert caught.value.hint
    for wrong in (
        lambda: group.train_step(batch, verbose=True),
        group.save,
    ):  # Python's own, from the method's signature
        with pytest.raises(TypeError):
            wrong()
    assert places_of(group) == before
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
        future = group.train_step_async(batch)  # rank 0 enters its first collective and waits there
        time.sleep(1.5)  # to be there; that it cannot answer is the other one's doing
        answer, silence = group.health(timeout_s=10.0)
    finally:
        os.kill(stuck.pid, signal.SIGCONT)
    assert isinstance(answer, Health) and answer.rank == 0
    assert isinstance(silence, WorkerHung) and silence.rank == 1
    assert bits(future.result()) == expected


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"k": value}
    return value


def test_gradients_that_wait_refuse_a_train_step_until_they_are_dropped(group: Any, small_batch: RolloutBatch) -> None:
    group.forward_backward(small_batch)
    with pytest.raises(StateError) as caught:
        group.train_step(small_batch)
    assert caught.value.field == "train_step"
    group.zero_grad()
    assert group.train_step(small_batch)["updates"] == 1


def test_arguments_that_make_no_sense_are_typed_errors_and_the_group_lives_on(
    group: Any, batch: RolloutBatch, tmp_path: Path
) -> None:
    pids = [answer.pid for answer in group.health()]
    short, long = batch.select(range(8)), batch
    for call, kind in (
        (lambda: group.update_weights([object()]), SyncError),
        (lambda: group.update_weights(None), SyncError),
        (lambda: group.update_weights(receivers="engines"), SyncError),
        (lambda: group.save(1, nested(5_000)), CheckpointError),
        (lambda: group.save(1, loop_state={"handle": object()}), CheckpointError),
        (lambda: group.sleep(3), ConfigError),
        (lambda: group.sleep(None), ConfigError),
        (lambda: group.save(-1), CheckpointError),
        (lambda: group.save(1.5), CheckpointError),
        (lambda: group.export_hf(None), ConfigError),
        (lambda: group.export_hf(tmp_path / ("x" * 300)), CheckpointError),
        (lambda: group.forward_backward(batch, "policy", "3"), BatchError),
        (lambda: group.train_step(short, plan_training(group.config, long)), BatchError),
    ):
        with pytest.raises(kind):
            call()
    assert [answer.pid for answer in group.health()] == pids and group.train_step(batch)["updates"] >= 1


@pytest.fixture
def doomed(cluster: None, make_config: Any) -> Iterator[Any]:
    group = WorkerGroup.launch(make_config())
    yield group
    group.shutdown()


def test_a_killed_rank_is_named_at_once_and_the_group_can_be_shut_down(doomed: Any, batch: RolloutBatch) -> None:
    pids = [health.pid for health in doomed.health()]
    assert all(map(is_alive, pids)) and os.getpid() not in pids
    os.kill(pids[1], signal.SIGSTOP)  # so that the call cannot end before the kill
    future = doomed.train_step_async(batch)
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
    request = RankRequest("train_step", check=lambda planner: planner.for_training(batch))
    good = doomed.prepared(request, doomed.check(request))
    # only rank 1 gets it, and fails before the collective that rank 0 waits in
    bad = replace(good, args=(*good.args, None, "one too many"))
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

    def add_trainer(self, config: RunConfig, role: str) -> Loaded:
        import threading

        from slimefsdp.distributed import collectives

        loaded = super().add_trainer(config, role)
        is_freed, self._has_answered = threading.Event(), threading.Event()

        def abort() -> None:
            is_freed.set()
            self._has_answered.wait(600)

        def meet(last_one_fails: bool) -> Any:
            """Rank 0 waits in a kernel for rank 1, which does not come."""
            if self.rank == 1 and last_one_fails:
                raise MemoryError("nothing left")
            return is_freed.wait(600) and "whatever was in memory"

        self.trainers[role].meet = meet
        collectives.needs_abort = lambda: True
        collectives.abort_collectives = abort
        return loaded

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
    request = RankRequest("meet", (how == "has no memory",), of_all_ranks=True)
    calls = [worker.call.remote(request) for worker in on_nccl.receivers]
    if how == "is killed":
        os.kill(doomed, signal.SIGKILL)
    with pytest.raises(cause) as failed:
        CallFuture(calls, name="meet", timeout_s=600, first_only=False, watchdog=on_nccl._watchdog).result()
    assert failed.value.rank == 1 and failed.value.ends_rank
    with pytest.raises(PeerFailed) as freed:
        ray.get(calls[0], timeout=PATIENCE_S)
    assert (freed.value.rank, freed.value.call) == (0, "meet")
    with pytest.raises(PeerFailed):
        ray.get(on_nccl.receivers[0].call.remote(RankRequest("memory", of_all_ranks=True)), timeout=PATIENCE_S)
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


# ------------------------------------------------------------------ other meshes


def test_ranks_that_share_packs_agree_with_one_plain_process(
    make_config: Any, batch: RolloutBatch, replayed: Any
) -> None:
    same = {"batch": {"samples_per_update": 6}, "loss": {"kl_coefficient": 0.2}}  # as those that were replayed
    group = WorkerGroup.launch(make_config(mesh={"dp": 1, "cp": 2}, **same))
    try:
        metrics, one = group.train_step(batch), replayed[2]
        for name in one.keys() - TIMES - {"plan_imbalance"}:
            assert metrics[name] == pytest.approx(one[name], abs=1e-6, rel=1e-5), name
        assert all(description.attention.startswith("ring: ") for description in group.describe())
        assert group.check_sync().is_in_sync
    finally:
        group.shutdown()


# ------------------------------------------------------------------ a reference group of its own


def test_a_reference_group_of_another_size_gives_the_colocated_result(
    group: Any, make_config: Any, small_batch: RolloutBatch
) -> None:
    apart = WorkerGroup.launch(make_config(loss={"kl_coefficient": 0.2}, reference={"placement": "group", "dp": 1}))
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


def test_a_group_of_copies_as_large_as_the_machine_trains_like_one_of_shards(
    cluster: None, make_config: Any, batch: RolloutBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)  # auto takes a rank a core
    results = []
    for mesh in ({"dp": "auto", "dp_replicate": 2}, {"dp": 2}):
        group = WorkerGroup.launch(make_config(mesh=mesh))
        try:
            assert len(group.health()) == group.config.ranks == 2
            results.append((group.config.actor_mesh, group.train_step(batch)))
        finally:
            group.shutdown()
    (copies, ours), (shards, sharded) = results
    assert (copies, shards) == ((2, 1), (1, 2))
    for name in ("loss", "grad_norm", "entropy"):
        assert ours[name] == pytest.approx(sharded[name], rel=1e-5, abs=1e-6), name
