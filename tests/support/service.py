"""A service under test, and datums to send to it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import requests
import tinker
from tinker import types

from actors.fault_tolerance.supervisor import SupervisedGroup
from actors.service import tinker_pb2
from slimefsdp.config import RunConfig
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Served:
    """Where it is, and its settings.

    Args:
        key: the operator's.
        other_key: another user's.
    """

    url: str
    key: str
    other_key: str
    config: RunConfig
    group: SupervisedGroup

    def client(self, key: str | None = None) -> tinker.ServiceClient:
        """Of the unmodified package, with the operator's key or another one."""
        return tinker.ServiceClient(base_url=self.url, api_key=key or self.key)

    def training_client(self, client: tinker.ServiceClient, **how: Any) -> tinker.TrainingClient:
        """Of rank 4, where `how` says nothing else."""
        given = {"rank": 4, "seed": 1, **how}
        return client.create_lora_training_client(base_model="tiny/model", **given).result()

    def post(self, path: str, body: Any, **headers: str) -> requests.Response:
        """What a client of one's own would send: JSON, or bytes of protobuf."""
        known = {"X-API-Key": self.key, **headers}
        where = f"{self.url}/api/v1/{path}"
        if isinstance(body, bytes):
            return requests.post(
                where, data=body, headers={"content-type": "application/x-protobuf", **known}, timeout=30
            )
        return requests.post(where, json=body, headers=known, timeout=30)


def tokens_of(seed: int, length: int = 12, vocab: int = 90) -> list[int]:
    """Random ones."""
    return np.random.default_rng(seed).integers(2, vocab, length).tolist()


def datum(tokens: Sequence[int], **inputs: Any) -> types.Datum:
    """Of a sequence, which is moved by one; `inputs` beside the targets."""
    moved = {"target_tokens": list(tokens[1:]), **inputs}
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=moved)


def log_probs_of(output: Any) -> list[np.ndarray]:
    """Those of a forward or forward_backward, by datum."""
    return [one["logprobs"].to_numpy() for one in output.loss_fn_outputs]


def soon(check: Any, seconds: float = 60.0) -> bool:
    """Whether it becomes true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if check():
            return True
        time.sleep(0.1)
    return False


def message(model: str = "s:train:0", number: int = 1, loss: str = "cross_entropy", **inputs: Any) -> Any:
    """A request of one datum: `inputs` are arrays, or protobuf tensors."""
    made = tinker_pb2.ForwardBackwardRequest(model_id=model, seq_id=number, loss_fn=loss)
    one = made.data.add()
    one.model_input.add().encoded_text.tokens = np.array([3, 4, 5], "<i4").tobytes()
    for name, values in {"target_tokens": np.array([4, 5, 6]), **inputs}.items():
        if isinstance(values, np.ndarray):
            values = tensor(values)
        if values is not None:
            one.loss_fn_inputs[name].CopyFrom(values)
    return made


def tensor(values: np.ndarray) -> Any:
    """As a datum has it."""
    kind = tinker_pb2.DTYPE_FLOAT32 if values.dtype.kind == "f" else tinker_pb2.DTYPE_INT64
    data = values.astype("<f4" if values.dtype.kind == "f" else "<i8").tobytes()
    return tinker_pb2.Tensor(dense=data, dtype=kind, shape=values.shape)


def service_tree(model: Path, folder: Path, /, **sections: dict[str, Any]) -> dict[str, Any]:
    """Settings of a service on one rank, as a file holds them."""
    settings: dict[str, Any] = {
        "run": {"dir": str(folder / "run")},
        "model": {"path": str(model)},
        "lora": {"rank": 8, "targets": ["attention", "mlp", "head"]},
        "mesh": {"dp": 1, "device": "cpu"},
        "precision": {"compute_dtype": "float32"},
        "batch": {"max_tokens_per_rank": 256},
        "optim": {"lr": 1e-4, "total_updates": 1},
        "service": {"address": "127.0.0.1:0"},
    }
    for name, values in sections.items():
        settings[name] = {**settings.get(name, {}), **values}
    return settings


class Server:
    """`slimefsdp serve` in a process group of its own."""

    def __init__(self, file: Path, *overrides: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "actors.cli", "serve", str(file), *overrides],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=file.parent, start_new_session=True,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        (self.url,) = re.findall(r"serving .+ at (http://\S+)", self.process.stdout.readline())

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
