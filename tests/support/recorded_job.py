"""A job whose every bit can be compared: recorded batches, each call that training knows, and what came out of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.data.rollout_batch import RolloutBatch
from tests.support.ragged import ragged_batch
from tests.support.waiting import PATIENCE_S

VOCAB_SIZE = 96  # of tests.support.tiny_models
MATRIX = {"steps": 5, "save_every": 2}  # of the jobs in which ranks fail at the moments of a step
SAVES = {"steps": 6, "save_every": 1}  # of those in which saves fail, or what they wrote
TIMES = {"train_seconds", "tokens_per_second", "tokens_per_second_per_rank", "tflops_per_rank"}


@dataclass(frozen=True)
class Outcome:
    """What a job leaves, to the last bit.

    Args:
        metrics: of each step, all that are no times, in hex.
        log_probs: before each step, their sha256.
        received: by version of the weights, the sha256 of what the receiver committed.
        checkpoint: by tensor file of the last checkpoint (parameters, moments, the reference), its sha256.
        weights: sha256 of the final weights as an exported folder.
    """

    metrics: list[dict[str, str]]
    log_probs: list[str]
    received: dict[int, str]
    checkpoint: dict[str, str]
    weights: str

    @property
    def losses(self) -> list[str]:
        """Those of the steps, in hex."""
        return [metrics["loss"] for metrics in self.metrics]


class HashingReceiver:
    """Stands for a rollout engine: takes weights over the object store and keeps what they hash to."""

    def __init__(self) -> None:
        self._committed: list[tuple[int, str]] = []
        self._digest = hashlib.sha256()

    def begin(self, version: int, manifest: dict[str, tuple[int, ...]]) -> None:
        self._digest = hashlib.sha256(repr(sorted(manifest.items())).encode())

    def receive(self, bucket: Any) -> None:
        for name, dtype, shape, data in bucket:
            self._digest.update(f"{name} {dtype} {shape}".encode() + data.tobytes())

    def commit(self, version: int) -> None:
        self._committed.append((version, self._digest.hexdigest()))

    def take(self) -> list[tuple[int, str]]:
        """All commits since the last call."""
        taken, self._committed = self._committed, []
        return taken


def start_receiver() -> Any:
    """One of these as a Ray actor."""
    return ray.remote(HashingReceiver).options(num_cpus=0).remote()  # type: ignore[attr-defined]


def settings(model: Path, run_dir: Path, **sections: dict[str, Any]) -> RunConfig:
    """Two float32 gloo ranks, several updates a step beside a reference; sections given are laid over that.

    On another device than a CPU they use deterministic kernels alone: others would not repeat to the bit.
    """
    tree: dict[str, Any] = {
        "model": {"path": str(model)},
        "run": {"dir": str(run_dir)},
        "mesh": {"dp": 2, "device": "cpu"},
        "precision": {"compute_dtype": "float32"},
        "batch": {"max_tokens_per_rank": 96, "samples_per_update": 8},
        "optim": {"lr": 1e-2, "total_updates": 100_000},
        "loss": {"kl_coefficient": 0.1},
        "rollout": {"temperature": 0.8},
        "checkpoint": {"keep_last": 3},
        "cluster": {
            "launch_timeout_s": 120.0,
            "call_timeout_s": 120.0,
            "sync_timeout_s": 60.0,
            "max_restarts": 10_000,
        },
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    tree["run"].setdefault("deterministic", tree["mesh"]["device"] != "cpu")
    return config_from_dict(tree)


def recorded_batch(step: int) -> RolloutBatch:
    """16 ragged samples in groups of four, with holes in their masks: the same ones whenever a step is asked for."""
    return ragged_batch(np.random.default_rng(1000 + step), longest=32, tokens=(3, VOCAB_SIZE))


def begin(group: Any) -> None:
    """Leaves the checkpoint that every job on this group goes back to."""
    group.save(0, {"cursor": 0})


def job(
    group: Any,
    receiver: Any,
    folder: Path,
    *,
    steps: int = 5,
    save_every: int = 2,
    at_step: Callable[[int], None] = lambda step: None,
) -> Outcome:
    """Trains from the checkpoint of step 0 on and uses every call of the surface that changes or shows state.

    Args:
        group: a WorkerGroup, or what behaves like one; `begin` has been called on it.
        folder: a new one, for the exported weights.
        at_step: called as each step begins, counted from 1.
    """
    assert group.load(0) == {"cursor": 0}
    ray.get(receiver.take.remote(), timeout=PATIENCE_S)
    metrics, log_probs = [], []
    saved = Path()
    for step in range(1, steps + 1):
        at_step(step)
        batch = recorded_batch(step)
        log_probs.append(hashlib.sha256(group.compute_log_probs(batch).log_probs.tobytes()).hexdigest())
        metrics.append({k: v.hex() for k, v in group.train_step(batch).items() if k not in TIMES})
        if step == 1:
            group.update_ref()
        group.sleep()
        group.wake_up()
        if step % save_every == 0:
            saved = group.save(step, {"cursor": step})
        group.update_weights([receiver])
    received: dict[int, str] = {}
    for version, digest in ray.get(receiver.take.remote(), timeout=PATIENCE_S):
        assert received.setdefault(version, digest) == digest, "an update that was sent again was another one"
    assert group.check_sync().is_in_sync
    exported = group.export_hf(folder)
    weights = hashlib.sha256((exported / "model.safetensors").read_bytes()).hexdigest()
    return Outcome(metrics, log_probs, received, digests_of(saved), weights)


def digests_of(checkpoint: Path) -> dict[str, str]:
    """The sha256 of each tensor file of a committed checkpoint, by its own manifest."""
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    return {file["name"]: file["sha256"] for file in files if file["name"].endswith(".safetensors")}
