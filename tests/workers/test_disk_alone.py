"""Weights by a folder: what is not whole is refused by whoever reads it, and what was not committed is removed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.workers import disk_update, futures, weight_update
from actors.workers.disk_update import (
    CHECKSUMS,
    DiskUpdate,
    checked_adapter,
    checked_weights,
    read_weights,
    write_adapter,
    write_weights,
)
from slimefsdp.errors import CheckpointError, SyncError
from slimefsdp.models.hf_folder import SINGLE_FILE, ModelFolder, read_model_folder
from slimefsdp.models.peft_folder import ADAPTER_FOLDER, TENSOR_FILE
from tests.support.refusals import refused
from tests.support.scripted_ray import Actor, script_ray
from tests.support.waiting import PATIENCE_S

MODULE = "model.layers.0.self_attn.q_proj"
MATRICES = [(f"{MODULE}.lora_A", torch.ones(2, 4)), (f"{MODULE}.lora_B", torch.ones(3, 2))]


@pytest.fixture
def source(folder: Path) -> ModelFolder:
    return read_model_folder(folder)


@pytest.fixture
def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / SINGLE_FILE)


def shapes(weights: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def remove(file: Path) -> None:
    file.unlink()


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    (SINGLE_FILE, flip, "was altered"),
    (SINGLE_FILE, cut, SINGLE_FILE),
    (SINGLE_FILE, remove, "safetensors"),
    ("config.json", remove, "config.json"),
    (CHECKSUMS, remove, CHECKSUMS),
    (CHECKSUMS, lambda file: file.write_text("{"), "is not a whole folder"),
    (CHECKSUMS, lambda file: file.write_text("[]"), "is not a whole folder"),
    (CHECKSUMS, lambda file: file.write_text('{"other.safetensors": "0"}'), "is of other files"),
]


@pytest.mark.parametrize(("name", "damage", "word"), DAMAGES)
def test_a_folder_that_is_not_whole_is_refused_with_its_path(
    name: str, damage: Callable[[Path], object], word: str, source: ModelFolder, weights: Any, tmp_path: Path
) -> None:
    write_weights(tmp_path / "w", shapes(weights), weights.items(), source, torch.float32)
    found = dict(read_weights(checked_weights(tmp_path / "w"), {**shapes(weights), "not.there": (1,)}))
    assert found.keys() == weights.keys() and all(torch.equal(found[one], weights[one]) for one in weights)
    damage(tmp_path / "w" / name)
    with refused(SyncError, "rollout.weight_transport", tmp_path / "w", word):
        checked_weights(tmp_path / "w")
    with refused(SyncError, "rollout.weight_transport", tmp_path / "none"):
        checked_weights(tmp_path / "none")


@pytest.mark.parametrize(
    ("name", "damage", "word"),
    [
        (TENSOR_FILE, flip, "was altered"),
        (TENSOR_FILE, remove, TENSOR_FILE),
        (CHECKSUMS, remove, CHECKSUMS),
        (CHECKSUMS, lambda file: file.write_text("{}"), "is of other files"),
    ],
)
def test_an_adapter_that_is_not_whole_is_refused(
    name: str, damage: Callable[[Path], object], word: str, source: ModelFolder, tmp_path: Path
) -> None:
    write_adapter(tmp_path, MATRICES, 0.5, source, torch.float32)
    assert checked_adapter(tmp_path) == {name for name, _ in MATRICES}
    assert json.loads((tmp_path / ADAPTER_FOLDER / "adapter_config.json").read_text())["lora_alpha"] == 1.0
    damage(tmp_path / ADAPTER_FOLDER / name)
    with refused(SyncError, "rollout.weight_transport", tmp_path, word):
        checked_adapter(tmp_path)


def test_weights_that_change_after_they_were_checked_are_an_error_when_they_are_read(
    source: ModelFolder, weights: Any, tmp_path: Path
) -> None:
    write_weights(tmp_path / "w", shapes(weights), weights.items(), source, torch.float32)
    checked = checked_weights(tmp_path / "w")
    save_file({"other": torch.zeros(3)}, tmp_path / "w" / SINGLE_FILE)
    with refused(SyncError, "rollout.weight_transport", "weights did not arrive"):
        dict(read_weights(checked, shapes(weights)))


# ---------------------------------------------------------------------- whole updates


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    script_ray(monkeypatch, [futures, weight_update])


def update_to(actors: list[Actor], folder: Path, source: ModelFolder, timeout_s: float = PATIENCE_S) -> DiskUpdate:
    return DiskUpdate(actors, timeout_s, folder=folder, source=source, dtype=torch.float32)


def test_an_update_is_announced_when_its_folder_is_whole_and_replaces_the_one_before(
    without_ray: None, source: ModelFolder, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    engine, manifest = Actor(), shapes(weights)
    for version in (1, 2):
        update = update_to([engine], tmp_path, source)
        update.begin(version, manifest)
        for item in weights.items():
            update.receive([item])
        assert len(engine.calls) == 3 * (version - 1), "nothing is announced before the end"
        update.commit(version)
        (path,) = tmp_path.iterdir()
        assert engine.calls[-3:] == [
            ("begin", (version, manifest)), ("receive_disk", (str(path),)), ("commit", (version,))
        ]  # fmt: skip
        assert checked_weights(path).tensors.keys() == weights.keys()


@pytest.mark.parametrize("has_weights", [True, False])
def test_an_adapter_is_written_beside_those_weights_that_engines_lack(
    has_weights: bool, without_ray: None, source: ModelFolder, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    engine, (first, *others) = Actor(), weights
    sent = [(first, weights[first]), *MATRICES] if has_weights else MATRICES
    kept = frozenset(others) if has_weights else frozenset(weights)
    manifest = {**shapes(weights), **shapes(dict(MATRICES))}
    update = update_to([engine], tmp_path, source)
    update.begin(4, manifest, kept, 0.5)
    update.receive(sent)
    update.commit(4)
    (path,) = tmp_path.iterdir()
    assert engine.calls[0] == ("begin", (4, manifest, kept, 0.5))
    assert checked_adapter(path) == {name for name, _ in MATRICES}
    assert (path / SINGLE_FILE).exists() == has_weights
    if has_weights:
        assert list(checked_weights(path).tensors) == [first]


@pytest.mark.parametrize("call", ["begin", "receive_disk", "commit"])
def test_a_folder_that_an_engine_refuses_is_removed_and_the_one_before_stays(
    call: str, without_ray: None, source: ModelFolder, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    (tmp_path / "before").mkdir()
    update = update_to([Actor(**{call: [KeyError("a defect")]})], tmp_path, source)
    update.begin(1, shapes(weights))
    update.receive(list(weights.items()))
    with refused(SyncError, "update_weights", f"{call} failed at receiver 0", "a defect"):
        update.commit(1)
    assert [one.name for one in tmp_path.iterdir()] == ["before"]


@pytest.mark.parametrize(
    ("raised", "field", "word"),
    [
        (CheckpointError("no space left", field="path", hint="make room"), "run.dir", "no space left"),
        (SyncError("a defect of its own", field="rollout", hint="-"), "rollout", "a defect of its own"),
    ],
)
def test_what_cannot_be_written_fails_the_update_while_it_is_sent_and_at_its_end(
    raised: Exception, field: str, word: str, without_ray: None, source: ModelFolder, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def fails(*_: Any) -> None:
        raise raised

    monkeypatch.setattr(disk_update, "write_weights", fails)
    engine = Actor()
    for sends in (True, False):
        update = update_to([engine], tmp_path, source)
        update.begin(1, {"a": (1,)})
        with refused(SyncError, field, word):
            if sends:
                update.receive([("a", torch.ones(1))])
            update.commit(1)
    assert engine.calls == []


def test_a_disk_or_a_sender_that_is_too_slow_is_told_with_the_timeout(
    without_ray: None, source: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, given = threading.Event(), list[Any]()

    def blocks(*_: Any) -> None:
        may_end.wait(PATIENCE_S)

    def takes_all(path: Path, manifest: Any, tensors: Iterable[Any], *_: Any) -> None:
        given.extend(tensors)

    engine = Actor()
    for write in (blocks, takes_all):
        monkeypatch.setattr(disk_update, "write_weights", write)
        monkeypatch.setattr(disk_update, "in_thread", weight_update.in_thread)
        update = update_to([engine], tmp_path, source, timeout_s=0.0)
        update.begin(1, {"a": (1,)})
        with refused(SyncError, "cluster.sync_timeout_s", tmp_path, 0):
            update.receive([("a", torch.ones(1))])
            update.receive([("b", torch.ones(1))])
            update.commit(1)
    may_end.set()
    assert engine.calls == []
