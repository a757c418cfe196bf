"""Servers get the model's weights once, then the adapter of lora.sync=adapters alone, which every request names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from actors.engines.dialect import ADAPTER
from actors.engines.pool import EnginePool
from actors.engines.protocol import Request
from actors.workers.disk_update import write_adapter, write_weights
from actors.workers.worker_group import WorkerGroup
from slimefsdp.config import RunConfig
from slimefsdp.errors import EngineError, StateError, SyncError
from slimefsdp.models.hf_folder import read_model_folder
from tests.support.refusals import refused
from tests.support.served import PROMPT, SGLANG, VLLM, Kind, drawn, params
from tests.support.table_server import EMBEDDING, Adapter

LAYER = "model.layers.0.self_attn.q_proj"
NAMES_ADAPTER = {"vllm": "model", "sglang": "lora_path"}  # the field of a request's JSON


@pytest.fixture(scope="module", params=[VLLM, SGLANG], ids=["vllm", "sglang"])
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


def with_adapters(kind: Kind, make_config: Any, url: str, folder: Path, **lora: Any) -> RunConfig:
    rollout = {"engine": kind.name, "engines": 1, "engine_urls": [url], "weight_transport": "disk"}
    settings = {"lora": {"rank": 2, "sync": "adapters", **lora}, "run": {"dir": str(folder)}}
    config: RunConfig = make_config(rollout=rollout, **settings)
    return config


class Sender:
    """A model's weights and an adapter of one of its layers, in folders as `DiskUpdate` has them."""

    def __init__(self, engine: Any, tensors: dict[str, torch.Tensor], folder: Path) -> None:
        self.engine, self.tensors, self._folder = engine, tensors, folder
        rows, columns = tensors[f"{LAYER}.weight"].shape
        self.matrices = {f"{LAYER}.lora_A": torch.randn(2, columns), f"{LAYER}.lora_B": torch.randn(rows, 2)}
        self.manifest = {name: tuple(one.shape) for name, one in {**tensors, **self.matrices}.items()}

    def write(self, version: int, *, is_whole: bool) -> Path:
        path, source = self._folder / f"weights{version}", read_model_folder(self.engine.config.model.path)
        if is_whole:
            shapes = {name: tuple(one.shape) for name, one in self.tensors.items()}
            write_weights(path, shapes, self.tensors.items(), source, torch.float32)
        write_adapter(path, list(self.matrices.items()), 3.5, source, torch.float32)
        return path

    def send(self, version: int, *, source: str = "base") -> bool:
        """Whether the weights were left out."""
        path_of: Callable[[bool], Path] = lambda is_whole: self.write(version, is_whole=is_whole)  # noqa: E731
        has_frozen: bool = self.engine.has_frozen(source)
        self.engine.begin(version, self.manifest, frozenset(self.tensors if has_frozen else ()), 3.5)
        self.engine.receive_disk(str(path_of(not has_frozen)))
        self.engine.commit(version)
        return has_frozen

    @property
    def expected(self) -> dict[str, torch.Tensor]:
        return {f"base_model.model.{name}.weight": one for name, one in self.matrices.items()}


@pytest.fixture
def sender(
    kind: Kind, server: Any, make_config: Any, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> Iterator[Sender]:
    server.tensors, server.adapters = {}, {}
    engine = kind.engine(with_adapters(kind, make_config, server.url, tmp_path / "run"), 0)
    yield Sender(engine, tensors, tmp_path)
    engine.stop()


def is_held(adapter: Adapter, sender: Sender) -> bool:
    matrices = adapter.matrices
    same = matrices.keys() == sender.expected.keys()
    return same and all(torch.equal(matrices[name], one) for name, one in sender.expected.items())


def test_weights_come_once_and_the_adapter_with_every_update(sender: Sender, server: Any, kind: Kind) -> None:
    assert not sender.send(0)
    assert all(torch.equal(server.tensors[name], one) for name, one in sender.tensors.items())
    for version in (1, 2):
        server.tensors = {EMBEDDING: server.tensors[EMBEDDING].clone()}
        sender.matrices = {name: torch.randn_like(one) for name, one in sender.matrices.items()}
        assert sender.send(version)
        assert server.tensors.keys() == {EMBEDDING}, "weights came again"
        assert list(server.adapters) == [ADAPTER] and is_held(server.adapters[ADAPTER], sender)
        assert server.adapters[ADAPTER].scale == pytest.approx(3.5, abs=1e-12)
        samples = drawn(sender.engine, Request(PROMPT, 2, params()))
        assert {one.versions[0].version for one in samples.values()} == {version}
        assert [asked[NAMES_ADAPTER[kind.name]] for asked in server.asked[-2:]] == [ADAPTER, ADAPTER]


def test_all_weights_come_again_where_the_server_may_not_have_them(sender: Sender, server: Any) -> None:
    assert not sender.send(0) and sender.send(1)
    assert not sender.send(2, source="another base")
    assert sender.send(3, source="another base")
    server.version = "default"  # it was started anew
    assert not sender.send(4, source="another base")
    sender.engine.begin(5, sender.manifest, frozenset(sender.tensors), 3.5)
    with refused(SyncError, "rollout.weight_transport"):
        sender.engine.receive_disk("nowhere")
    with refused(StateError, "update_weights"):
        drawn(sender.engine, Request(PROMPT, 1, params()))
    assert not sender.send(6, source="another base")


def test_an_adapter_that_was_altered_is_an_error_and_is_not_committed(sender: Sender) -> None:
    sender.send(0)
    path = sender.write(1, is_whole=False)
    file = path / "adapter" / "adapter_model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert sender.engine.has_frozen("base")
    sender.engine.begin(1, sender.manifest, frozenset(sender.tensors), 3.5)
    with refused(SyncError, "rollout.weight_transport", "checksum"):
        sender.engine.receive_disk(str(path))


def test_adapters_of_experts_are_refused_by_name_and_change_nothing(sender: Sender, server: Any) -> None:
    sender.send(0)
    calls = len(server.calls)
    stack = {"model.layers.0.mlp.experts.down_proj_lora_A": (4, 2, 8)}
    with refused(SyncError, "lora.targets", next(iter(stack))):
        sender.engine.begin(1, {**sender.manifest, **stack}, frozenset(sender.tensors), 3.5)
    assert len(server.calls) == calls and drawn(sender.engine, Request(PROMPT, 1, params()))


def test_without_lora_sync_servers_are_sent_all_weights_and_asked_for_no_adapter(
    engine: Any, server: Any, kind: Kind
) -> None:
    assert not engine.has_frozen("base")
    assert kind.server_arguments(engine.config).count("--enable-lora") == 0


@pytest.mark.parametrize(
    ("kind", "faults", "named"),
    [
        (VLLM, {"said": {"max_lora_rank": None}}, ["--enable-lora --max-lora-rank 8"]),
        (VLLM, {"said": {"max_lora_rank": 1}}, ["--max-lora-rank 8", 1, 2]),
        (VLLM, {"has_runtime_lora": False}, ["VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"]),
        (SGLANG, {"server_info": {"enable_lora": None}}, ["--enable-lora --max-lora-rank 2"]),
        (SGLANG, {"server_info": {"max_lora_rank": 1}}, ["--max-lora-rank 2", 1]),
        (SGLANG, {"server_info": {"max_lora_rank": None}}, ["--max-lora-rank 2"]),
    ],
    indirect=["kind"],
)
def test_a_server_without_room_for_the_adapter_is_refused_by_the_argument_that_it_lacks(
    kind: Kind, server: Any, make_config: Any, tmp_path: Path, faults: dict[str, Any], named: list[object]
) -> None:
    server.faults = kind.faults(**faults)
    engine = kind.engine(with_adapters(kind, make_config, server.url, tmp_path), 0)
    with refused(EngineError, "rollout.engine_urls", "lora.sync=adapters", *named):
        engine.info()
    engine.stop()


def test_servers_are_started_with_room_for_the_adapter(kind: Kind, make_config: Any, tmp_path: Path) -> None:
    config = with_adapters(kind, make_config, "http://127.0.0.1:1", tmp_path, rank=9)
    arguments = kind.server_arguments(config)
    assert "--enable-lora" in arguments
    room = arguments[arguments.index("--max-lora-rank") + 1]
    assert room == {"vllm": "16", "sglang": "9"}[kind.name]  # vLLM has some ranks alone


@pytest.mark.parametrize(
    ("kind", "transport"), [(VLLM, "broadcast"), (VLLM, "ipc"), (VLLM, "disk"), (SGLANG, "disk")], indirect=["kind"]
)
def test_ranks_send_the_adapter_that_they_would_export(
    cluster: None,
    kind: Kind,
    server: Any,
    make_config: Any,
    tensors: dict[str, torch.Tensor],
    small_batch: Any,
    tmp_path: Path,
    transport: str,
) -> None:
    server.tensors, server.adapters = {}, {}
    config = make_config(
        run={"dir": str(tmp_path / "run")},
        mesh={"dp": 2},
        lora={"rank": 3, "alpha": 5.0, "sync": "adapters"},
        optim={"lr": 0.02},
        rollout={"engine": kind.name, "engines": 1, "engine_urls": [server.url], "weight_transport": transport},
    )
    group = WorkerGroup.launch(config)
    engines = EnginePool.launch(config)
    try:
        whole = group.update_weights(engines.receivers)
        own = safetensors.torch.load_file(Path(config.model.path) / "model.safetensors")
        assert all(torch.equal(server.tensors[name], one) for name, one in own.items())
        base = sum(one.numel() * 4 for one in own.values())
        for version in (1, 2, 3):
            server.tensors = {EMBEDDING: own[EMBEDDING]}
            group.train_step(small_batch)
            report = group.update_weights(engines.receivers)
            assert report.version == version and report.bytes == whole.bytes - base < base / 3
            exported = group.export_adapter(tmp_path / f"adapter{version}")
            expected = safetensors.torch.load_file(Path(exported) / "adapter_model.safetensors")
            (held,) = server.adapters.values()
            assert held.scale == pytest.approx(5 / 3, abs=1e-12) and held.matrices.keys() == expected.keys()
            assert all(torch.equal(held.matrices[name], one) for name, one in expected.items())
            assert server.tensors.keys() == {EMBEDDING} and server.version == str(version)
            assert engines.generate(["sort 31"], samples_per_prompt=2, seed=(1,))[0] == version
    finally:
        engines.shutdown()
        group.shutdown()
