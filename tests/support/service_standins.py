"""Stand-ins for the ranks and the sampling engine of a service, and what a client sends to it over HTTP."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from starlette.testclient import TestClient

from actors.service.samplers import Samplers
from slimefsdp.checkpoint.manifest import write_manifest
from slimefsdp.checkpoint.store import CheckpointStore
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import CheckpointError, ResourceError
from slimefsdp.results import ForwardBackward, LogProbs
from slimefsdp.sampling.params import SampleAnswer, SampledTokens, SampleRequest, SamplingStats

LOCAL = "http://127.0.0.1"  # what a client names that was given no key
ASKED: dict[str, Any] = {"model_seq_id": 0, "base_model": "tiny/model", "lora_config": {"rank": 4}}
ADAM: dict[str, float] = {"learning_rate": 0.1, "beta1": 0.8, "beta2": 0.9, "eps": 1e-5}


class Calls:
    """Those of a group for an adapter; every log-prob is -1."""

    def __init__(self, group: Group, name: str) -> None:
        self.group, self.name = group, name

    def forward_backward(self, batch: RolloutBatch, *args: Any, **how: Any) -> ForwardBackward:
        self.group.batches.append(batch)
        return ForwardBackward({}, self.compute_log_probs(batch))

    def compute_log_probs(self, batch: RolloutBatch) -> LogProbs:
        return LogProbs(*np.full((2, batch.num_response_tokens), -1, np.float32))

    def optimizer_step(self, settings: Any) -> dict[str, float]:
        self.group.updates.append(settings)
        return {"grad_norm": 1.0, "lr": settings.lr, "skipped_update": float(self.group.skips)}

    def load(self, step: int | None = None, name: str | None = None, weights_only: bool = False) -> None:
        if name is None:
            folder = self.store(None).path_of(cast(int, step))
        else:
            (step,) = self.store(name).steps()
            folder = self.store(name).path_of(step)
        if not (folder / "weights").exists():
            raise CheckpointError("it is torn", field="run.dir", hint="load another one")
        self.group.loaded.append((folder / "weights").read_text())
        self.group.loaded_names.append(name)

    def store(self, name: str | None) -> CheckpointStore:
        whole = CheckpointStore.of_run(self.group.run_dir, "actor", self.name)
        return whole if name is None else whole.named(name)

    def zero_grad(self) -> None:
        self.group.dropped += 1

    def save(self, step: int, loop_state: dict[str, Any], name: str | None = None, overwrite: bool = False) -> None:
        if self.name in self.group.broken:
            raise CheckpointError("the disk is full", field="run.dir", hint="make room")
        store = self.store(name)
        if name is not None and overwrite:
            shutil.rmtree(store.root, ignore_errors=True)
        folder = store.final_path(step)
        if name is None:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_manifest(folder, step, {"loop_state": loop_state}, [])
        (folder / "weights").write_text(self.name)

    def export_adapter(self, folder: Path) -> None:
        folder.mkdir()


class Group:
    """A group without ranks."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.names: list[str] = []
        self.batches: list[RolloutBatch] = []
        self.updates: list[Any] = []
        self.dropped = 0
        self.loaded: list[str] = []  # what was in the checkpoints
        self.loaded_names: list[str | None] = []  # and what they were called; None: by its step
        self.broken: set[str] = set()  # adapters that cannot be saved
        self.skips = False  # gradients are not finite

    def create_adapter(self, name: str, **how: Any) -> None:
        self.names.append(name)

    def delete_adapter(self, name: str) -> None:
        self.names.remove(name)

    def adapter(self, name: str) -> Calls:
        return Calls(self, name)


class Engine:
    """Has room for so many versions; what it samples is the name of the version, as soon as it may."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.held: list[str] = []
        self.reads, self.draws = asyncio.Event(), asyncio.Event()
        self.reads.set()
        self.draws.set()
        # as of a SupervisedEngine
        self.versions: dict[str, float] = {}
        self.problem: str | None = None
        self.is_lost, self.replacements = False, 0

    async def watch(self) -> None:
        pass

    async def load(self, version: str, folder: str) -> int:
        if len(self.held) >= self.room:
            raise ResourceError("full", field="memory_bytes", hint="drop one")
        await self.reads.wait()
        self.held.append(version)
        return 1

    async def stats(self) -> SamplingStats:
        return SamplingStats(3, 2, 2, 50, 7, dict.fromkeys(self.held, 11), 100)

    async def drop(self, version: str) -> None:
        self.held.remove(version)

    async def sample(self, request: SampleRequest) -> SampleAnswer:
        assert request.version is None or request.version in self.held
        await self.draws.wait()
        await asyncio.sleep(0)
        tokens = SampledTokens([len(request.version or "")], [-1.0], "stop")
        return SampleAnswer([tokens] * request.num_samples, np.zeros(len(request.prompt)))


def samplers_of(engine: Any, most_unnamed: int) -> Samplers:
    """Samplers without a service, whose sessions get at most so many with unnamed weights."""
    settings = SimpleNamespace(service=SimpleNamespace(max_samplers=most_unnamed))
    return Samplers(cast(Any, SimpleNamespace(config=settings)), engine, cast(Any, None))


def answer(http: TestClient, response: Any) -> Any:
    """What comes of a request that is answered later."""
    assert response.status_code == 200, response.text
    found = http.post("/api/v1/retrieve_future", json={"request_id": response.json()["request_id"]})
    assert found.status_code == 200, found.text
    return found.json() if found.headers["content-type"] == "application/json" else found.content


def new_run(http: TestClient, **more: Any) -> str:
    session = http.post("/api/v1/create_session", json={"sdk_version": "0.38.0"}).json()["session_id"]
    both = [http.post("/api/v1/create_model", json={"session_id": session, **ASKED, **more}) for _ in range(2)]
    assert both[0].json() == both[1].json()  # sent again, it is the same one
    assert answer(http, both[0])["model_id"] == f"{session}:train:0"
    return f"{session}:train:0"
