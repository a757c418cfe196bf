"""Whatever is altered in a sealed folder is noticed, and named, before anything in it is used."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from slimefsdp.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    architecture_of,
    check_files,
    check_identity,
    differences,
    read_manifest,
    write_manifest,
)
from slimefsdp.errors import CheckpointError
from slimefsdp.io.files import MAX_DEPTH, MAX_JSON_BYTES, json_bytes, record_of
from tests.support.refusals import names, refused

FILES = {"a.bin": bytes(range(256)) * 9, "b.json": b'{"x": 1}\n', "empty": b""}


def sealed_folder(parent: Path, info: dict[str, Any] | None = None) -> Path:
    folder = parent / "sealed"
    folder.mkdir()
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    write_manifest(folder, 1, info or {}, [record_of(folder / name) for name in FILES])
    return folder


def verified(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    return manifest


def rewrite_manifest(folder: Path, **changes: Any) -> None:
    """What an attacker who knows the format would write: the digest inside the manifest is right."""
    document = json.loads((folder / MANIFEST).read_text()) | changes
    document.pop("sha256")
    digest = hashlib.sha256((json.dumps(document, indent=1) + "\n").encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(document | {"sha256": digest}, indent=1) + "\n")


def test_a_surplus_file_or_folder_and_a_link_are_refused(tmp_path):
    folder = sealed_folder(tmp_path)
    (folder / "extra").mkdir()
    with refused(CheckpointError, "extra", folder / "extra"):
        verified(folder)
    (folder / "extra").rmdir()
    (tmp_path / "outside").write_bytes(FILES["a.bin"])
    (folder / "a.bin").unlink()
    (folder / "a.bin").symlink_to(tmp_path / "outside")
    with refused(CheckpointError, "a.bin", folder / "a.bin"):
        verified(folder)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "..", "a/b", ".hidden", "", MANIFEST])
def test_a_manifest_that_leads_out_of_its_folder_is_refused_even_when_its_digest_is_right(tmp_path, name):
    folder = sealed_folder(tmp_path)
    (tmp_path / "outside").write_bytes(b"x")
    record = {"name": name, "bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
    rewrite_manifest(folder, files=[record])
    with refused(CheckpointError, MANIFEST, repr(name)):
        verified(folder)


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"null", b"{}", b"\xff\xfe", b"[" * 200_000, b'{"schema_version": 1}', b'{"schema_version": "1"}'],
)
def test_a_manifest_that_is_not_one_is_refused(tmp_path, raw):
    folder = sealed_folder(tmp_path)
    (folder / MANIFEST).write_bytes(raw)
    with pytest.raises(CheckpointError) as caught:
        verified(folder)
    assert caught.value.field == MANIFEST


@pytest.mark.parametrize("changes", [{"step": "1"}, {"step": True}, {"info": [1]}, {"files": {"a": 1}}, {"more": 1}])
def test_a_manifest_of_the_wrong_types_is_refused_even_when_its_digest_is_right(tmp_path, changes):
    folder = sealed_folder(tmp_path)
    rewrite_manifest(folder)
    verified(folder)  # the rewriting itself is faithful
    rewrite_manifest(folder, **changes)
    with pytest.raises(CheckpointError) as caught:
        verified(folder)
    assert caught.value.field == MANIFEST


def test_a_huge_manifest_is_refused_without_being_read(tmp_path):
    folder = sealed_folder(tmp_path)
    os.truncate(folder / MANIFEST, MAX_JSON_BYTES + 1)
    with refused(CheckpointError, MANIFEST, MAX_JSON_BYTES):
        verified(folder)


def test_a_newer_schema_is_refused_by_its_number(tmp_path):
    folder = sealed_folder(tmp_path)
    rewrite_manifest(folder, schema_version=2)
    with refused(CheckpointError, MANIFEST, 2, 1):
        verified(folder)


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth - 1):
        value = {"k": [value]} if depth % 2 else {"k": value}
    return value


def test_what_is_nested_too_deep_is_refused_when_it_is_written() -> None:
    assert json.loads(json_bytes(nested(MAX_DEPTH), "info")) == nested(MAX_DEPTH)
    for depth in (MAX_DEPTH + 2, 100_000):
        with refused(CheckpointError, "loop_state", MAX_DEPTH):
            json_bytes(nested(depth), "loop_state")


# ---------------------------------------------------------------------- whether a checkpoint fits a run

FILE = Path("run/step_00000001/manifest.json")
OWN = {"model_type": "qwen3", "config.json": {"hidden_size": 32, "rope": {"theta": 1e4}}, "optim.name": "adamw"}


def test_equal_identities_pass() -> None:
    check_identity(OWN, OWN, FILE)


@pytest.mark.parametrize(
    ("changes", "field", "saved", "own"),
    [
        ({"optim.name": "sgd"}, "optim.name", "sgd", "adamw"),
        ({"config.json": {"hidden_size": 64, "rope": {"theta": 1e4}}}, "hidden_size", 64, 32),
        ({"config.json": {"hidden_size": 32, "rope": {"theta": 5}}}, "theta", 5, 10000.0),
        ({"config.json": {"hidden_size": 32}}, "rope", FILE, {"theta": 1e4}),
        ({"more": 1}, "more", 1, FILE),
    ],
)
def test_the_first_difference_is_named_with_both_values_and_the_file(changes, field, saved, own) -> None:
    with refused(CheckpointError, field, field, saved, own, FILE):
        check_identity(OWN | changes, OWN, FILE)


def test_keys_that_change_no_number_are_no_part_of_an_architecture() -> None:
    config = {"hidden_size": 32, "transformers_version": "5.0", "_name_or_path": "x", "torch_dtype": "float32"}
    assert architecture_of(config) == {"hidden_size": 32}


def test_a_difference_names_the_setting_and_both_values_and_only_what_both_sides_have_is_compared() -> None:
    (difference,) = differences({"lr": 1, "gone": 2, "same": 3}, {"lr": 4, "new": 5, "same": 3})
    assert all(names(difference, value) for value in ("lr", 4, 1))
