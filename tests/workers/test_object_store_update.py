"""Weights on their way through the object store: bit-equal in every dtype, and no failure of a receiver is silent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load_file

from actors.engines.embedded import EmbeddedEngine
from actors.engines.protocol import EngineInfo
from actors.workers.broadcast_update import BroadcastUpdate
from actors.workers.watchdog import remote_class
from actors.workers.weight_update import pack_bucket, unpack_bucket
from actors.workers.worker_group import WorkerGroup
from slimefsdp.errors import SyncError
from slimefsdp.weight_sync.broadcast import Rendezvous
from tests.support.refusals import refused
from tests.support.waiting import PATIENCE_S


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_bucket_keeps_names_shapes_and_every_bit(dtype: torch.dtype) -> None:
    special = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1e-40, -3.14159], dtype=dtype)
    bucket = [("norm", special), ("matrix", torch.randn(3, 5, dtype=dtype)), ("row", torch.randn(1, 7, dtype=dtype))]
    comm = pack_bucket(bucket)
    assert all(isinstance(data, np.ndarray) and data.dtype == np.uint8 for *_, data in comm)
    for (name, tensor), (name_after, after) in zip(bucket, unpack_bucket(comm), strict=True):
        assert (name_after, after.dtype, after.shape) == (name, dtype, tensor.shape)
        assert torch.equal(after.view(torch.uint8), tensor.view(torch.uint8))


# ------------------------------------------------------------------ a real engine in bfloat16


class OpenEngine(EmbeddedEngine):
    """An engine that shows its weights."""

    def weights(self) -> dict[str, np.ndarray]:
        return {name: parameter.view(torch.int16).numpy() for name, parameter in self._policy.named_weights()}


def test_bfloat16_weights_arrive_bit_equal_to_the_rounded_masters(
    cluster: None, make_config: Any, example: Path, small_batch: Any, tmp_path: Path
) -> None:
    config = make_config(precision={"compute_dtype": "bfloat16"})
    engine = remote_class(OpenEngine).options(num_cpus=0).remote(config, 0)
    group = WorkerGroup.launch(config)
    try:
        group.train_step(small_batch)
        report = group.update_weights([engine])
        group.export_hf(tmp_path / "exported")
        masters = load_file(tmp_path / "exported" / "model.safetensors")
        arrived = ray.get(engine.weights.remote(), timeout=PATIENCE_S)
        assert report.version == 1 and report.bytes == sum(2 * master.numel() for master in masters.values())
        assert arrived.keys() == masters.keys()
        start = load_file(example / "model" / "model.safetensors")
        for name, master in masters.items():
            assert master.dtype == torch.float32 and not torch.equal(master, start[name])
            np.testing.assert_array_equal(arrived[name], master.to(torch.bfloat16).view(torch.int16).numpy())
    finally:
        group.shutdown()
        ray.kill(engine)


class Unwilling:
    """An engine that names the backend of the group that it was to join."""

    def info(self) -> EngineInfo:
        return EngineInfo("unwilling", 320, "float32", None, ("broadcast",))

    def join(self, meeting: Rendezvous) -> None:
        raise RuntimeError(f"asked for {meeting.backend}")


@pytest.mark.parametrize(("is_shared", "backend"), [(True, "gloo"), (False, "nccl")])
def test_engines_on_the_senders_own_gpu_are_sent_weights_by_gloo(cluster: None, is_shared: bool, backend: str) -> None:
    engine = ray.remote(num_cpus=0)(Unwilling).remote()
    gpu = torch.device("cuda")
    receiver = BroadcastUpdate([engine], PATIENCE_S, address="127.0.0.1", device=gpu, is_shared=is_shared)
    with refused(SyncError, "update_weights", f"asked for {backend}"):
        receiver.begin(0, {})
    ray.kill(engine)
