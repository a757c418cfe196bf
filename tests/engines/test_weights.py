"""Weights in an embedded engine by each transport, bit for bit; what was altered or is elsewhere is not committed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.engines.embedded import EmbeddedEngine
from actors.engines.protocol import Request
from actors.workers.disk_update import CHECKSUMS, write_weights
from actors.workers.weight_update import pack_bucket
from slimefsdp.errors import StateError, SyncError
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.sampling.params import SamplingParams
from slimefsdp.weight_sync.buckets import Bucket, SharedBuffer, digest_of, layout_of, opened, pack, packed_bytes
from tests.support.refusals import refused
from tests.support.tiny_models import TinyFolder

CPU = torch.device("cpu")


class OpenEngine(EmbeddedEngine):
    """Shows its weights."""

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self._policy.named_weights()}


@pytest.fixture(scope="module")
def engine(make_config: Any) -> OpenEngine:
    return OpenEngine(make_config(), 0)


@pytest.fixture(scope="module")
def versions(make_config: Any) -> list[Bucket]:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(make_config().model.path)
    return [
        [(name, parameter.detach() + 0.1 * torch.randn_like(parameter)) for name, parameter in model.named_parameters()]
        for _ in range(3)
    ]


def manifest(bucket: Bucket) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in bucket}


def require_weights(engine: OpenEngine, bucket: Bucket) -> None:
    found = engine.weights()
    assert found.keys() == dict(bucket).keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in bucket)


def ask(engine: EmbeddedEngine) -> None:
    list(engine.generate([Request([5, 9], 1, SamplingParams(2, 0.8, seed=(0,)))]))


def by_object_store(engine: EmbeddedEngine, bucket: Bucket, flips: bool = False) -> None:
    wire = pack_bucket(bucket, with_digests=True)
    if flips:
        name, dtype, shape, data, digest = wire[-1]
        wire[-1] = (name, dtype, shape, flipped(torch.from_numpy(data.copy())).numpy(), digest)
    engine.receive(wire)


def by_ipc(engine: EmbeddedEngine, bucket: Bucket, flips: bool = False) -> None:
    layout = layout_of(bucket)
    buffer = SharedBuffer(packed_bytes(layout) + 64, CPU)
    digest = digest_of(pack([tensor for _, tensor in bucket], into=buffer.data))
    if flips:
        flipped(buffer.data)
    engine.receive_ipc(buffer.handle, layout, digest)


def flipped(data: torch.Tensor) -> torch.Tensor:
    data[len(data) // 2] ^= 1
    return data


TRANSPORTS = {"object_store": by_object_store, "ipc": by_ipc}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_weights_arrive_bit_for_bit_in_any_buckets(engine: OpenEngine, versions: list[Bucket], transport: str) -> None:
    for version, bucket in enumerate(versions):
        engine.begin(version, manifest(bucket))
        for some in (bucket[:1], bucket[1:4], bucket[4:]):
            TRANSPORTS[transport](engine, some)
        engine.commit(version)
        require_weights(engine, bucket)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_flipped_bit_is_an_error_and_nothing_is_committed(
    engine: OpenEngine, versions: list[Bucket], transport: str
) -> None:
    engine.begin(5, manifest(versions[0]))
    with refused(SyncError, "rollout.weight_checksums", "altered"):
        TRANSPORTS[transport](engine, versions[0], flips=True)
    with refused(SyncError, "update_weights", 5):
        engine.commit(5)
    TRANSPORTS[transport](engine, versions[0])
    engine.commit(5)
    require_weights(engine, versions[0])


# ---------------------------------------------------------------------- memory that processes share


def test_a_buffer_that_is_not_here_is_refused_by_name(engine: OpenEngine, versions: list[Bucket]) -> None:
    buffer = SharedBuffer(64, CPU)
    others = {"name": "slimefsdp_elsewhere", "pid": 2**22 + 1, "descriptor": 10_000}
    engine.begin(6, manifest(versions[0]))
    for field, value in others.items():
        with refused(SyncError, "rollout.weight_transport", buffer.handle["pid"] if field != "pid" else value):
            engine.receive_ipc({**buffer.handle, field: value}, layout_of([("a", torch.zeros(2))]))


def test_shared_memory_has_no_name_and_no_descriptor_is_left() -> None:
    def ours() -> list[str]:
        links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return sorted(link for link in links if "slimefsdp_" in link)

    before = ours()
    for _ in range(20):
        buffer = SharedBuffer(1 << 16, CPU)
        there = opened(buffer.handle)
        there[7] = 9
        assert buffer.data[7] == 9
        handle, open_ones = buffer.handle, ours()
        del buffer, there
        assert any(handle["name"] in link for link in open_ones)
    assert ours() == before
    assert not list(Path("/dev/shm").glob("slimefsdp_*"))


# ---------------------------------------------------------------------- a folder


@pytest.fixture
def folder(make_config: Any, versions: list[Bucket], tmp_path: Path) -> Path:
    """Weights of the last version."""
    source = read_model_folder(make_config().model.path)
    write_weights(tmp_path / "weights", manifest(versions[2]), versions[2], source, torch.float32)
    return tmp_path / "weights"


def test_a_folder_of_weights_is_loaded_bit_for_bit_and_is_one_that_transformers_opens(
    engine: OpenEngine, versions: list[Bucket], folder: Path
) -> None:
    engine.begin(8, manifest(versions[2]))
    engine.receive_disk(str(folder))
    engine.commit(8)
    require_weights(engine, versions[2])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert all(torch.equal(dict(model.named_parameters())[name], tensor) for name, tensor in versions[2])


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def altered(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = torch.from_numpy(np.frombuffer(file.read_bytes(), np.uint8).copy())
    file.write_bytes(flipped(data).numpy().tobytes())


def without_checksums(folder: Path) -> None:
    (folder / CHECKSUMS).unlink()


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("damage", [cut, altered, without_checksums, without_weights])
def test_a_folder_that_is_not_whole_is_refused_and_nothing_is_committed(
    engine: OpenEngine, versions: list[Bucket], folder: Path, damage: Callable[[Path], None]
) -> None:
    damage(folder)
    engine.begin(9, manifest(versions[2]))
    with refused(SyncError, "rollout.weight_transport", str(folder)):
        engine.receive_disk(str(folder))
    with refused(SyncError, "update_weights", 9):
        engine.commit(9)


def test_a_folder_that_lacks_a_tensor_is_not_committed(
    engine: OpenEngine, versions: list[Bucket], make_config: Any, tmp_path: Path
) -> None:
    source = read_model_folder(make_config().model.path)
    write_weights(tmp_path / "less", manifest(versions[0][1:]), versions[0][1:], source, torch.float32)
    engine.begin(10, manifest(versions[0]))
    engine.receive_disk(str(tmp_path / "less"))
    with refused(SyncError, "update_weights", 10, versions[0][0][0]):
        engine.commit(10)


def test_experts_are_apart_in_a_folder_and_together_in_the_engine(
    tiny_folder: TinyFolder, make_config: Any, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(tiny_folder("qwen3_moe"), tmp_path / "model"))
    for file in read_model_folder(make_config().model.path).extra_files:  # a tokenizer, which is not asked here
        shutil.copy(file, path)
    experts = OpenEngine(make_config(model={"path": str(path)}), 0)
    torch.manual_seed(0)
    bucket = [(name, torch.randn_like(tensor)) for name, tensor in experts.weights().items()]
    write_weights(tmp_path / "weights", manifest(bucket), bucket, read_model_folder(path), torch.float32)
    experts.begin(0, manifest(bucket))
    experts.receive_disk(str(tmp_path / "weights"))
    experts.commit(0)
    require_weights(experts, bucket)


# ---------------------------------------------------------------------- weights that are not trained


def test_frozen_weights_are_kept_until_the_engine_sleeps_or_others_come(
    engine: OpenEngine, versions: list[Bucket]
) -> None:
    first, second = versions[:2]
    kept = frozenset(name for name, _ in first[:3])
    assert not engine.has_frozen("one")
    engine.begin(20, manifest(first))
    by_object_store(engine, first)
    assert not engine.has_frozen("one"), "not before the commit"
    engine.commit(20)
    assert engine.has_frozen("one")
    engine.begin(21, manifest(first), kept)
    by_object_store(engine, second[3:])
    engine.commit(21)
    require_weights(engine, [*first[:3], *second[3:]])
    assert not engine.has_frozen("another") and engine.has_frozen("one")
    engine.sleep()
    engine.wake_up()
    assert not engine.has_frozen("one")
    with refused(StateError, "update_weights"):
        ask(engine)
    engine.begin(22, manifest(first))
    by_object_store(engine, first)
    engine.commit(22)
    ask(engine)
    assert engine.has_frozen("one")
    engine.begin(23, manifest(first), kept)
    by_object_store(engine, second[3:5])
    with refused(SyncError, "update_weights", 23):
        engine.commit(23)
    assert engine.has_frozen("one"), "what was cut off had none of them"
    engine.begin(24, manifest(first))
    assert not engine.has_frozen("one"), "others are coming"
