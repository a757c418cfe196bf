"""Memory, disks, ports, places and Ray itself run out: a typed error, at once, and where anything can go on it does."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.exceptions import ActorDiedError, GetTimeoutError, OutOfDiskError, OutOfMemoryError, RaySystemError
from ray.util.placement_group import remove_placement_group

from actors.cluster.placement import is_alive
from actors.cluster.ray_errors import explained
from actors.fault_tolerance.supervisor import SupervisedGroup
from actors.run_dir import RecordedBatches
from actors.workers.futures import CallFuture
from actors.workers.group_calls import RankRequest
from actors.workers.oom_advice import memory_error
from actors.workers.train_worker import TrainWorker
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.distributed.collectives import is_out_of_memory
from slimefsdp.errors import CheckpointError, ResourceError, SlimeError, SyncError, WorkerDied, WorkerHung
from slimefsdp.monitoring.metrics_log import MetricsLog, read_metrics
from slimefsdp.trainer import Trainer
from tests.support.fresh_ranks import run_fresh
from tests.support.process_resources import files_up_to
from tests.support.refusals import assert_refusal, refused
from tests.support.runs import Untouchable
from tests.support.tiny_models import TinyFolder
from tests.support.trainers import CPU, fresh_batch, settings
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
IMPOSSIBLE = 2**60  # bytes that no machine has


def bits(metrics: dict[str, float]) -> dict[str, str]:
    return {name: metrics[name].hex() for name in ("loss", "grad_norm", "entropy", "kl_ref") if name in metrics}


# ------------------------------------------------------------------ memory


def train_in_little_memory(rank: int, send: Callable[[Any], None], config: RunConfig) -> None:
    """A large batch in 16 MiB more than the process has; what that ends in, and whether training goes on."""
    trainer = Trainer(config, device=CPU)
    trainer.train_step(fresh_batch())
    rng = np.random.default_rng(0)
    samples = [
        {"tokens": rng.integers(0, 97, 2000), "response_length": 1000, "reward": float(i % 2), "group_id": i // 4}
        for i in range(16)
    ]
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (has + 16 * 2**20, hard))
    try:
        trainer.train_step(RolloutBatch.from_samples(samples))
    except Exception as error:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        assert is_out_of_memory(error) and not isinstance(error, SlimeError), error
        send(memory_error(error, trainer.config, "actor", trainer.folder.config, CPU))
    send(bits(trainer.train_step(fresh_batch(1))))


def train_in_enough_memory(rank: int, send: Callable[[Any], None], config: RunConfig) -> None:
    trainer = Trainer(config, device=CPU)
    trainer.train_step(fresh_batch())
    send(bits(trainer.train_step(fresh_batch(1))))


def test_no_memory_says_what_was_expected_and_what_needs_less_and_a_trainer_alone_goes_on(
    tiny_folder: TinyFolder,
) -> None:
    model = tiny_folder(vocab_size=97, intermediate_size=55)
    config = settings(model, batch={"max_tokens_per_rank": 32000})
    (((error, after), code),) = run_fresh(1, train_in_little_memory, config)
    (((expected,), _),) = run_fresh(1, train_in_enough_memory, config)
    assert code == 0 and isinstance(error, ResourceError) and error.field == "batch.max_tokens_per_rank"
    for said in ("32,000", "DefaultCPUAllocator", "`slimefsdp plan`", "activations", "MB"):
        assert said in error.message
    smaller, recompute = map(error.hint.index, ("max_tokens_per_rank=16000 (-", "activation_checkpointing=full (-"))
    assert 0 < smaller < recompute
    assert after == expected, "the update that failed has left nothing"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("my_loss raised OutOfMemoryError: CUDA out of memory. (losses.py:3)"),
    ],
)
def test_allocators_words_for_no_memory_are_known(error: Exception) -> None:
    assert is_out_of_memory(error)


def starve(worker: Any) -> None:
    """In a rank's process: its next forward asks once for what no machine has, and the one after goes through."""
    from slimefsdp.training import packs

    evaluate = packs.evaluate

    def greedy(*args: Any, **how: Any) -> Any:
        packs.evaluate = evaluate
        torch.empty(IMPOSSIBLE, dtype=torch.uint8)

    packs.evaluate = greedy


def test_a_job_goes_on_after_a_rank_had_no_memory_and_after_its_places_were_taken_away(
    cluster: None, make_config: Any, batch: RolloutBatch, tmp_path: Path
) -> None:
    config = make_config(run={"dir": str(tmp_path)}, batch={"samples_per_update": 6}, loss={"kl_coefficient": 0.2})
    group = SupervisedGroup.launch(config)
    try:
        group.save(0)
        found = [bits(group.train_step(batch))]
        ray.get(group.receivers[1].__ray_call__.remote(starve), timeout=PATIENCE_S)
        with pytest.raises(ResourceError, match=r"\d+ tokens") as caught:
            group.train_step(batch)
        error = caught.value
        assert (error.rank, error.call, error.field) == (1, "train_step", "batch.max_tokens_per_rank")
        assert "max_tokens_per_rank=" in str(error.hint) and "in greedy" in "".join(error.__notes__)
        assert not group.recoveries, "it is not tried again unasked"
        found.append(bits(group.train_step(batch)))
        assert len(group.recoveries) == 1

        (reserved,) = group._job._places._groups.values()
        assert is_alive(reserved)
        remove_placement_group(reserved)
        found.append(bits(group.train_step(batch)))
        assert [recovery.code for recovery in group.recoveries][1:] == ["worker_died"]
        (anew,) = group._job._places._groups.values()
        assert is_alive(anew) and not is_alive(reserved)

        group.load(0)
        assert [bits(group.train_step(batch)) for _ in range(3)] == found
    finally:
        group.shutdown()


# ------------------------------------------------------------------ what leaves a rank


class Locked(Exception):
    """Cannot be pickled."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class FailingTrainer:
    """Stands for a Trainer whose update fails in a way of choice."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.mesh = SimpleNamespace(device=torch.device("cpu"))
        self.folder = SimpleNamespace(config=json.loads((config.model.path / "config.json").read_text()))

    def train_step(self, how: str) -> None:
        raise {"a lock": lambda: Locked("it holds a lock"), "a bug": lambda: KeyError("missing")}[how]()


@pytest.fixture(scope="module")
def lone_rank(cluster: None, make_config: Any) -> Iterator[Any]:
    """A rank's process without a model, which outlives its errors."""

    class Lasting(TrainWorker):
        def prepared(self, config: RunConfig) -> None:
            from actors.workers import train_worker

            train_worker.EXIT_AFTER_S = 600.0
            self.trainers["actor"] = FailingTrainer(config)

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        kind: Any = ray.remote(concurrency_groups={"control": 1})(Lasting)
        actor = kind.options(num_cpus=0).remote(0, 1)
        ray.get(actor.prepared.remote(make_config(mesh={"dp": 1})), timeout=PATIENCE_S)
        yield actor
        ray.kill(actor)
    finally:
        ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def failure(actor: Any, how: str) -> Exception:
    with pytest.raises(Exception) as caught:
        CallFuture(
            [actor.call.remote(RankRequest("train_step", {"how": how}))],
            name="train_step",
            timeout_s=PATIENCE_S,
            first_only=True,
        ).result()
    return caught.value


def test_the_port_of_a_rank_that_is_asked_for_one_is_nobody_elses(lone_rank: Any) -> None:
    address = tuple(ray.get(lone_rank.free_address.remote(), timeout=PATIENCE_S))
    with pytest.raises(OSError, match="in use"):
        socket.create_server(address)

    def join(worker: Any) -> int:
        from slimefsdp.distributed.mesh import start_process_group

        host, port = address
        start_process_group(
            CPU, rank=0, world_size=1, address=host, port=port, timeout_s=30.0, listener=worker._listener
        )
        return torch.distributed.get_world_size()

    assert ray.get(lone_rank.__ray_call__.remote(join), timeout=PATIENCE_S) == 1


@pytest.mark.parametrize(
    ("how", "name", "text"), [("a lock", "Locked", "it holds a lock"), ("a bug", "KeyError", "missing")]
)
def test_of_an_error_that_cannot_travel_name_text_and_traceback_do(
    lone_rank: Any, how: str, name: str, text: str
) -> None:
    error = failure(lone_rank, how)
    assert not isinstance(error, SlimeError)
    assert name in f"{type(error).__name__} {error}" and text in str(error)
    (note,) = error.__notes__
    assert note.startswith("on rank 0, in train_step:\nTraceback") and "test_resources.py" in note


# ------------------------------------------------------------------ disks


def test_metrics_that_the_disk_refuses_are_a_typed_error_and_later_lines_are_whole(tmp_path: Path) -> None:
    row = {f"metric_{number}": float(number) for number in range(200)}
    with MetricsLog(tmp_path) as log:
        log.write(1, row)
        with files_up_to((tmp_path / "metrics.jsonl").stat().st_size + 100), pytest.raises(ResourceError) as caught:
            log.write(2, row)
        log.write(3, row)
    assert_refusal(caught.value, ResourceError, "run.dir", os.strerror(errno.EFBIG))
    rows = read_metrics(tmp_path)
    assert [found["step"] for found in rows][-1] == 3 and all(found.keys() == rows[0].keys() for found in rows)


def test_a_batch_that_the_disk_refuses_is_a_typed_error_and_those_before_stand(tmp_path: Path) -> None:
    recorded = RecordedBatches(tmp_path)
    batch = RolloutBatch(tokens=np.arange(60_000), lengths=[60_000], response_lengths=[1])
    recorded.write(0, batch, {"n": 0})
    with files_up_to(50_000), refused(CheckpointError, "run.dir", os.strerror(errno.EFBIG)):
        recorded.write(1, batch, {"n": 1})
    assert recorded.read(1) is None
    recorded.write(1, batch, {"n": 1})
    for step in range(2):
        found, notes = recorded.read(step) or pytest.fail("it is gone")
        assert notes == {"n": step} and np.array_equal(found.tokens, batch.tokens)


# ------------------------------------------------------------------ Ray


def test_a_head_elsewhere_is_gone_when_it_has_not_answered_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import worker

    from actors.cluster import ray_errors

    monkeypatch.setattr(ray_errors.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_errors, "_ASK_EVERY_S", 0.0)
    monkeypatch.setattr(ray_errors, "_AWAY_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        monkeypatch.setattr(worker, "_global_node", SimpleNamespace(is_head=lambda: False, gcs_address=address))
        assert not any(ray_errors.cluster_is_gone() for _ in range(3))
    assert not ray_errors.cluster_is_gone(), "a network may fail for a moment"
    deadline = time.monotonic() + 30
    while not ray_errors.cluster_is_gone() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ray_errors.cluster_is_gone()
    monkeypatch.setattr(worker, "_global_node", None)
    assert not ray_errors.cluster_is_gone()


def test_what_ray_raises_for_a_rank_is_typed_unless_it_is_a_bug_to_show() -> None:
    for error, kind, said in (
        (OutOfMemoryError("1 worker(s) were killed"), WorkerDied, "memory"),
        (ActorDiedError(), WorkerDied, "train_step"),
        (GetTimeoutError("late"), WorkerHung, "late"),
    ):
        found = explained(error, 3, "train_step")
        assert type(found) is kind and said in found.message and found.hint
        assert (found.rank, found.call) == (3, "train_step")
    bug = RaySystemError("no module named x")
    assert explained(bug, 0, "save") is bug


def test_weights_that_the_store_has_no_room_for_are_an_error_of_their_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    from actors.cluster import ray_errors
    from actors.workers.weight_update import ObjectStoreUpdate

    def full(value: Any) -> None:
        raise OutOfDiskError("the disk is full")

    monkeypatch.setattr(ray_errors.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_errors.ray, "put", full)
    receiver = ObjectStoreUpdate([], timeout_s=60.0)
    with refused(SyncError, "weights"):
        receiver.receive([("tail", torch.zeros(2))])


def test_a_driver_that_has_left_the_cluster_starts_no_other_one_to_end_what_went_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from actors.cluster import placement, ray_errors

    monkeypatch.setattr(ray_errors.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray_errors.ray, "kill", Untouchable())
    monkeypatch.setattr(placement, "remove_placement_group", Untouchable())
    ray_errors.end_processes([object()])
    placement.release(object())  # type: ignore[arg-type]
    with refused(ResourceError, "cluster.address", "ray.shutdown()"):
        ray_errors.require_cluster()


# what the driver of a cluster of its own sees while that is taken from it; one JSON object a line
ALONE = """
import json, os, signal, sys, time
import numpy as np
import ray
from actors.workers.futures import CallFuture
from actors.cluster.connect import connect, disconnect
from actors.cluster.placement import release, reserve
from actors.cluster.ray_errors import end_processes, require_cluster, store
from slimefsdp.config import config_from_dict
from slimefsdp.errors import SlimeError

def attempt(name, action):
    start = time.monotonic()
    try:
        action()
        found = {}
    except SlimeError as error:
        found = {"code": error.code, "field": error.field, "message": error.message, "hint": bool(error.hint)}
    print(json.dumps({"name": name, "seconds": time.monotonic() - start, **found}), flush=True)

class Rank:
    def act(self, seconds):
        time.sleep(seconds)

connect(config_from_dict({"model": {"path": "x"}, "optim": {"total_updates": 1}}))
from ray._private import worker
victim = worker._global_node.all_processes[sys.argv[1]][0].process
attempt("large", lambda: store(np.zeros(20_000_000), "batch"))
attempt("small", lambda: store(np.zeros(1000), "batch"))
place = reserve(1, gpus_per_rank=0, timeout_s=30.0)
rank = ray.remote(Rank).options(num_cpus=0).remote()
ray.get(rank.act.remote(0.0), timeout=300)
running = CallFuture([rank.act.remote(60.0)], name="act", timeout_s=60.0, first_only=True)
os.kill(victim.pid, signal.SIGKILL)
victim.wait()
attempt("waiting", running.result)
attempt("next", require_cluster)
attempt("launch", lambda: reserve(1, gpus_per_rank=0, timeout_s=30.0))
attempt("end", lambda: (end_processes([rank]), release(place)))
attempt("disconnect", disconnect)
"""


def is_ours(line: str) -> bool:
    return line.startswith("{")  # Ray prints the raylet's log when it ends


def test_without_raylet_or_head_every_call_ends_at_once_and_a_full_store_refuses_only_what_is_too_large() -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": "80000000",
        "RAY_local_fs_capacity_threshold": "0.0001",  # the disk behind the store counts as full
    }
    started = {
        kind: subprocess.Popen(
            [sys.executable, "-c", ALONE, kind], cwd=ROOT, env=environment, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )
        for kind in ("raylet", "gcs_server")
    }  # fmt: skip
    try:
        printed = {kind: process.communicate(timeout=PATIENCE_S) for kind, process in started.items()}
    finally:
        for process in started.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its cleanup process ends the rest of its cluster
                process.communicate()
    for kind, (output, said) in printed.items():
        found = {line["name"]: line for line in map(json.loads, filter(is_ours, output.splitlines()))}
        assert started[kind].returncode == 0, (kind, output, said[-2000:])
        assert found["large"]["code"] == "resource" and found["large"]["field"] == "batch" and found["large"]["hint"]
        assert "code" not in found["small"] and "code" not in found["end"] and "code" not in found["disconnect"]
        for name in ("waiting", "next", "launch"):
            assert found[name]["code"] == "resource" and "cluster is gone" in found[name]["message"]
        assert all(line["seconds"] < 20.0 for line in found.values()), found
