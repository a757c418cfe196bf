"""Weights by every transport, from two ranks to real engines: equal log-probs, and engines that are lost meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import safetensors.torch
import torch

from actors.engines.pool import EnginePool
from actors.workers.worker_group import WorkerGroup
from slimefsdp.errors import EngineError, SyncError
from tests.support.refusals import refused
from tests.support.sglang_server import SglangServer
from tests.support.waiting import PATIENCE_S

PROMPTS = ["sort 31", "sort 2718", "sort 90210"]


@pytest.fixture(scope="module")
def broadcasting(cluster: None, make_config: Any) -> Iterator[tuple[Any, EnginePool]]:
    """Two ranks that broadcast, and two engines."""
    config = make_config(rollout={"weight_transport": "broadcast"}, cluster={"max_restarts": 2})
    group = WorkerGroup.launch(config)
    engines = EnginePool.launch(config, restarts=True)
    yield group, engines
    engines.shutdown()
    group.shutdown()


def pids(engines: EnginePool) -> list[int]:
    return [ray.get(engine.progress.remote(), timeout=PATIENCE_S).pid for engine in engines.receivers]


def test_engines_compute_the_trainers_log_probs_after_every_broadcast(
    broadcasting: tuple[Any, EnginePool], small_batch: Any
) -> None:
    group, engines = broadcasting
    for version in range(3):
        assert engines.update_from(group) == version
        assert max(engines.check_log_probs(group, PROMPTS)) < 1e-5
        group.train_step(small_batch)
    with refused(EngineError, "rollout.engine_logprob_bound", "engine 0"):
        engines.check_log_probs(group, PROMPTS)


def test_an_engine_that_is_killed_between_updates_is_replaced_and_another_group_forms(
    broadcasting: tuple[Any, EnginePool],
) -> None:
    group, engines = broadcasting
    engines.update_from(group)
    first, second = pids(engines)
    os.kill(second, signal.SIGKILL)
    with pytest.raises(SyncError):
        group.update_weights(engines.receivers)
    version = engines.update_from(group)
    assert pids(engines)[0] == first and pids(engines)[1] != second
    assert max(engines.check_log_probs(group, PROMPTS)) < 1e-5
    assert engines.generate(PROMPTS, samples_per_prompt=2, seed=(1,))[0] == version


# tests/workers/test_weight_update.py has the other calls, of receivers without a model
CALLS = {"object_store": ["begin", "commit"], "broadcast": ["begin", "receive"], "disk": ["commit"], "ipc": ["receive"]}


@pytest.mark.parametrize("transport", CALLS)
def test_an_engine_that_is_killed_in_an_update_comes_back_alone(
    cluster: None, make_config: Any, small_batch: Any, tmp_path: Path, transport: str
) -> None:
    settings = {"engine": "tests.support.troubled_engine:TroubledEngine", "weight_checksums": True}
    config = make_config(
        run={"dir": str(tmp_path)},
        rollout={**settings, "weight_transport": transport},
        cluster={"max_restarts": 3},
        model={"frozen": ["*.mlp.*"]},
    )
    group, engines = WorkerGroup.launch(config), EnginePool.launch(config, restarts=True)
    try:
        engines.update_from(group)
        before = pids(engines)
        for version, call in enumerate(CALLS[transport], 1):
            group.train_step(small_batch)
            (tmp_path / "trouble").write_text(f"{version % 2} {call}")
            assert engines.update_from(group) == version
            now = pids(engines)
            assert [new == old for new, old in zip(now, before, strict=True)] == [version % 2 == 1, version % 2 == 0]
            before = now
            assert max(engines.check_log_probs(group, PROMPTS)) < 1e-5
            assert engines.generate(PROMPTS, samples_per_prompt=2, seed=(version,))[0] == version
        if transport == "disk":
            assert len(list((tmp_path / "weights").iterdir())) == 1
    finally:
        engines.shutdown()
        group.shutdown()


def test_ranks_broadcast_to_a_server_whose_group_torch_makes(cluster: None, make_config: Any) -> None:
    server = SglangServer("qwen3", str)
    config = make_config(rollout={"engine": "sglang", "engines": 1, "engine_urls": [server.url]})
    group = WorkerGroup.launch(config)
    engines = EnginePool.launch(config)
    try:
        for _ in range(2):
            version = group.update_weights(engines.receivers).version
            assert server.version == str(version)
            found, samples = engines.generate(PROMPTS, samples_per_prompt=2, seed=(1,))
            assert found == version and len(samples) == 6
        sent = safetensors.torch.load_file(Path(config.model.path) / "model.safetensors")
        assert all(torch.equal(server.tensors[name], tensor) for name, tensor in sent.items())
    finally:
        engines.shutdown()
        group.shutdown()
        server.close()
