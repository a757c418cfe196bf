"""Reads and writes a checkpoint's manifest, which lists its files with size and sha256, and describes the writing run.

Every writer hashes its own files as it writes them, so that no file is reread for the manifest. Nothing that is read
here is trusted: names, sizes and types are checked before they are used. The second half of this module compares the
run that wrote a checkpoint with the run that loads it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from slimefsdp.errors import CheckpointError
from slimefsdp.io.files import FileRecord, damaged, json_bytes, read_json, record_of, whole, write_synced

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_PART_NAME = re.compile(rf"([a-z]{{1,20}})/{re.escape(MANIFEST)}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Manifest:
    """Lists the content of a committed checkpoint; `info` is the caller's JSON."""

    step: int
    info: dict[str, Any]
    files: tuple[FileRecord, ...]  # the folder's own files, and the manifest of each part

    @property
    def parts(self) -> tuple[str, ...]:
        """Returns the names of the parts, which are folders inside of the checkpoint with manifests of their own."""
        return tuple(match[1] for record in self.files if (match := _PART_NAME.fullmatch(record.name)))


def write_manifest(folder: Path, step: int, info: dict[str, Any], files: Sequence[FileRecord]) -> None:
    """Writes the manifest of a folder, which lists the folder's files and the manifests of its parts.

    Args:
        info: plain JSON. The parts must have been written with the same `save_id` and step.
        files: the records of all files directly in the folder, from the ranks that wrote them.

    Raises:
        CheckpointError: the folder does not hold these files, a part belongs to another save, or `info` would change in
            JSON. OSError: the disk is full or fails.
    """
    json_bytes(info, "info")
    listed = (*sorted(files, key=lambda record: record.name), *_parts_of(folder, step, info))
    _check_names(folder, listed)
    for record in files:
        if (folder / record.name).stat().st_size != record.bytes:
            raise _not_of_this_save(folder / record.name, "has changed after it was written")
    write_synced(folder / MANIFEST, _render(Manifest(step, info, listed)))


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a committed folder; `check_files` compares the files with it.

    Raises:
        CheckpointError: the manifest cannot be parsed, was altered, has a newer schema, or lists anything but plain
            file names.
    """
    path = folder / MANIFEST
    document, raw = read_json(path)
    version = document.get("schema_version") if isinstance(document, dict) else None
    if type(version) is int and version > SCHEMA_VERSION:
        raise damaged(path, f"has schema version {version}, this program knows up to {SCHEMA_VERSION}")
    try:
        files = tuple(FileRecord(str(f["name"]), whole(f["bytes"]), str(f["sha256"])) for f in document["files"])
        manifest = Manifest(document["step"], document["info"], files)
        is_as_written = _render(manifest) == raw and type(manifest.step) is int and isinstance(manifest.info, dict)
    except (KeyError, TypeError, ValueError, AttributeError, CheckpointError) as error:
        raise damaged(path, f"is not a manifest ({error!r})") from error
    if not is_as_written:
        raise damaged(path, "was altered after it was written")
    for record in files:
        is_name = _PLAIN_NAME.fullmatch(record.name) or _PART_NAME.fullmatch(record.name)
        if not is_name or record.name == MANIFEST or not _SHA256.fullmatch(record.sha256):
            raise damaged(path, f"lists {record.name!r}, which is no plain file name with a sha256")
    return manifest


def check_files(
    folder: Path, manifest: Manifest, *, share: int = 0, shares: int = 1, only_part: str | None = None
) -> None:
    """Rereads the files of a checkpoint and of its parts, and compares them with the manifest.

    The names and sizes of all files are compared. To divide the work, only the files of share number `share` are
    reread; the `shares` shares have about equally many bytes.

    Args:
        only_part: the part whose files are reread; None means the files of the checkpoint and of all parts.

    Raises:
        CheckpointError: a file is missing, surplus, not a plain file, or has the wrong size or sha256; the error names
            the first such file.
        OSError: the disk fails.
    """
    listed = _listed(folder, manifest)
    for record in listed:
        status = (folder / record.name).lstat()
        if not stat.S_ISREG(status.st_mode):
            raise damaged(folder / record.name, "is not a plain file")
        if status.st_size != record.bytes:
            raise damaged(folder / record.name, f"has {status.st_size} bytes, not {record.bytes}")
    reread = [record for record in listed if only_part is None or record.name.startswith(f"{only_part}/")]
    own: list[FileRecord] = []
    sizes = [0] * shares
    for record in sorted(reread, key=lambda record: (-record.bytes, record.name)):
        least = sizes.index(min(sizes))  # each file, largest first, goes to the share with the fewest bytes
        sizes[least] += record.bytes
        if least == share:
            own.append(record)
    # hashing releases the interpreter lock, so threads can use idle cores
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        present_records = list(pool.map(record_of, (folder / record.name for record in own)))
    for record, present in zip(own, present_records, strict=True):
        if present.sha256 != record.sha256:
            raise damaged(folder / record.name, "does not have the sha256 it was saved with")


def _listed(folder: Path, manifest: Manifest) -> list[FileRecord]:
    """Returns the files of a checkpoint and of its parts, with names relative to `folder`.

    Raises:
        CheckpointError: the folder's files are not those that the manifests list, or a part's manifest cannot be read.
    """
    _check_names(folder, manifest.files)
    listed = list(manifest.files)
    for part in manifest.parts:
        if (folder / part).is_symlink() or not (folder / part).is_dir():
            raise damaged(folder / part, "is not a folder")
        inside = read_manifest(folder / part)
        if inside.parts:
            raise damaged(folder / part / MANIFEST, "lists parts, though it is of a part")
        listed += [replace(record, name=f"{part}/{record.name}") for record in _listed(folder / part, inside)]
    return listed


def _check_names(folder: Path, files: Sequence[FileRecord]) -> None:
    """Raises a CheckpointError unless a folder has exactly the entries of `files`, besides its own manifest.

    For a part, only its folder must exist; the files in it are not looked at here.
    """
    # NFS keeps a file that is removed while it is open under a name .nfs*
    present = {path.name for path in folder.iterdir() if not path.name.startswith(".nfs")} - {MANIFEST}
    if odd := sorted(present ^ {record.name.removesuffix(f"/{MANIFEST}") for record in files}):
        raise damaged(folder / odd[0], "is not in the manifest" if odd[0] in present else "is missing")


def _parts_of(folder: Path, step: int, info: dict[str, Any]) -> Iterator[FileRecord]:
    """Yields a record of each part's manifest, which lists the part's files."""
    for part in sorted(path for path in folder.iterdir() if path.is_dir()):
        manifest, name = read_manifest(part), f"{part.name}/{MANIFEST}"
        same_save = (manifest.step, manifest.info.get("save_id")) == (step, info.get("save_id"))
        if not same_save or not _PART_NAME.fullmatch(name):
            raise _not_of_this_save(part, "is no part of this save")
        yield replace(record_of(part / MANIFEST), name=name)


def _not_of_this_save(path: Path, problem: str) -> CheckpointError:
    hint = "keep other programs out of the folder, and save again"
    return CheckpointError(f"{path} {problem}", field=path.name, hint=hint, call="save")


def _render(manifest: Manifest) -> bytes:
    """Returns the manifest's text; a file with any other text was altered."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "step": manifest.step,
        "info": manifest.info,
        "files": [asdict(record) for record in manifest.files],
    }
    digest = hashlib.sha256(json_bytes(document, MANIFEST)).hexdigest()
    return json_bytes(document | {"sha256": digest}, MANIFEST)


# ---------------------------------------------------------------------- the run that wrote it

# keys of config.json that do not change what a model without dropout computes; keys that begin with _ do not, either
_WITHOUT_EFFECT = (
    *("architectures", "auto_map", "tokenizer_class", "task_specific_params", "name_or_path", "transformers_version"),
    *("bos_token_id", "eos_token_id", "id2label", "label2id", "dtype", "torch_dtype", "initializer_range"),
    *("output_attentions", "output_hidden_states", "return_dict", "use_cache"),
    *("attention_dropout", "embd_pdrop", "attn_pdrop", "resid_pdrop", "embd_dropout"),
)
_ABSENT = "not set"
# entry of a manifest's `info` that a load reads -> its type, and a description of valid values
_INFO: dict[str, tuple[type, str]] = {
    **dict.fromkeys(("identity", "mesh", "config", "loop_state"), (dict, "dict")),
    "reference_follows": (bool, "bool"),
    **dict.fromkeys(("updates_taken", "skipped_in_a_row"), (int, "count")),
    "kl_coefficient": (float, "number >= 0"),
}


def architecture_of(model_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of a config.json that decide what the model computes."""
    return {key: value for key, value in model_config.items() if key not in _WITHOUT_EFFECT and not key.startswith("_")}


def check_info(info: Mapping[str, Any], file: Path) -> None:
    """Checks that a manifest's info has the entries that a load reads.

    Raises:
        CheckpointError: an entry is missing or has a wrong type or value; the error names the first such entry, and
            `file`.
    """
    for name, (kind, rule) in _INFO.items():
        value = info.get(name)
        if type(value) is not kind or (kind in (int, float) and not 0 <= info[name] < math.inf):
            raise CheckpointError(
                f"{name} is {info.get(name, _ABSENT)!r:.100} in {file}, which is no {rule}",
                field=name,
                hint="load a checkpoint that this version wrote",
                call="load",
            )


def check_loop_state(loop_state: object) -> None:
    """Checks that a checkpoint can hold the caller's own state.

    Raises:
        CheckpointError: it is not a dict, or would change in JSON.
    """
    if loop_state is not None and type(loop_state) is not dict:
        raise CheckpointError(
            f"loop_state is a {type(loop_state).__name__}", field="loop_state", hint="give a dict of plain JSON"
        )
    json_bytes({"info": {"loop_state": loop_state or {}}}, "loop_state")  # nested as deeply as in the manifest


def check_identity(saved: Mapping[str, Any], own: Mapping[str, Any], file: Path) -> None:
    """Checks that the saved identity of a run equals that of this run; compares nested mappings key by key.

    Raises:
        CheckpointError: they differ; the error names the first differing field, both values and `file`.
    """
    for name in [*own, *(name for name in saved if name not in own)]:
        saved_value, own_value = saved.get(name, _ABSENT), own.get(name, _ABSENT)
        if isinstance(saved_value, Mapping) and isinstance(own_value, Mapping):
            check_identity(saved_value, own_value, file)
        elif saved_value != own_value:
            raise CheckpointError(
                f"{name} is {saved_value} in {file}, but {own_value} in this run",
                field=name,
                hint=_way_to_fit(name, saved_value),
                call="load",
            )


def _way_to_fit(name: str, saved_value: object) -> str:
    """Returns the hint for a run whose `name` differs from that of the checkpoint."""
    if name.startswith(("lora.", "optim.", "precision.")) or name == "model.frozen":
        value = saved_value if isinstance(saved_value, str) else json.dumps(saved_value)
        setting = f"leave {name} out" if saved_value == _ABSENT else f"set {name}={value}"
        return f"{setting}, or start a new run from an exported model"
    return "load a checkpoint of the same model, master dtype, optimiser, frozen parameters and adapters"


def differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Returns a phrase for each value in `own` that differs from the saved value of the same name."""
    return [
        f"{name} is {value} (saved: {saved[name]})"
        for name, value in own.items()
        if name in saved and saved[name] != value
    ]
