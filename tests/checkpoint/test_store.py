"""The commit protocol: a checkpoint is whole or absent, and the newest whole one is found."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from slimefsdp.checkpoint.manifest import MANIFEST
from slimefsdp.checkpoint.store import LATEST, CheckpointStore, PartStore
from slimefsdp.errors import CheckpointError
from slimefsdp.io.files import LOCK, FileRecord, record_of, write_synced
from tests.support.refusals import refused

FILES = {"a.bin": bytes(range(256)) * 9, "b.json": b'{"x": 1}\n', "empty": b""}


def save(store: CheckpointStore, step: int, files: dict[str, bytes] = FILES, info: Any = None) -> Path:
    records = written(store.begin(step), files)
    return store.commit(step, {} if info is None else info, records)


def written(folder: Path, files: dict[str, bytes]) -> list[FileRecord]:
    for name, data in files.items():
        write_synced(folder / name, data)
    return [record_of(folder / name) for name in files]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != MANIFEST}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK)


def test_a_committed_folder_holds_the_written_files_and_a_manifest_that_describes_them(tmp_path):
    store = CheckpointStore(tmp_path / "run")
    info = {"loop": {"cursor": 7, "lr": 0.1}, "names": ["é", None, True]}
    folder = save(store, 12, info=info)
    manifest = store.verify(folder)
    assert folder == tmp_path / "run/step_00000012" == store.path_of(12)
    assert contents(folder) == FILES
    assert (manifest.step, manifest.info) == (12, info)
    assert set(manifest.files) == {
        FileRecord(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in FILES.items()
    }
    assert (tmp_path / "run" / LATEST).read_text() == "step_00000012\n"
    assert names(tmp_path / "run") == [LATEST, "step_00000012"]
    assert store.newest_verified() == (manifest, folder, [])


def test_saving_a_step_again_replaces_it(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 3)
    folder = save(store, 3, {"other": b"new"}, {"try": 2})
    assert contents(folder) == {"other": b"new"} and store.verify(folder).info == {"try": 2}
    assert names(tmp_path) == [LATEST, "step_00000003"]


def test_a_folder_under_another_steps_name_is_refused(tmp_path):
    store = CheckpointStore(tmp_path)
    moved = save(store, 1).rename(tmp_path / "step_00000002")
    with refused(CheckpointError, MANIFEST, moved, 1):
        store.verify(moved)


def test_a_damaged_newest_is_reported_and_the_one_before_is_used(tmp_path):
    store = CheckpointStore(tmp_path)
    first = save(store, 5)
    (save(store, 10) / "a.bin").write_bytes(b"damage")
    manifest, folder, skipped = store.newest_verified()
    step = manifest.step
    assert (step, folder) == (5, first)
    assert len(skipped) == 1 and "step_00000010" in skipped[0].message


@pytest.mark.parametrize("pointer", ["step_00000099\n", "../step_00000010\n", "", "\0", None])
def test_latest_pointing_nowhere_is_reported_and_the_newest_good_one_is_used(tmp_path, pointer):
    store = CheckpointStore(tmp_path)
    save(store, 5)
    save(store, 10)
    (tmp_path / LATEST).unlink()
    if pointer is not None:
        (tmp_path / LATEST).write_text(pointer)
    manifest, _, skipped = store.newest_verified()
    step = manifest.step
    assert step == 10 and [error.field for error in skipped] == [LATEST]


def test_a_run_resumed_from_an_earlier_step_is_not_overtaken_by_its_abandoned_future(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in (5, 20, 30, 10):  # 10 was committed last
        save(store, step)
    manifest, folder, skipped = store.newest_verified()
    step = manifest.step
    assert step == 10 and [error.field for error in skipped] == [store.path_of(later).name for later in (20, 30)]
    (folder / "a.bin").unlink()
    assert store.newest_verified().manifest.step == 5


def test_nothing_to_load_is_an_error(tmp_path):
    with refused(CheckpointError, "run.dir", tmp_path / "absent"):
        CheckpointStore(tmp_path / "absent").newest_verified()
    store = CheckpointStore(tmp_path)
    (save(store, 1) / "a.bin").unlink()
    with refused(CheckpointError, "run.dir", store.path_of(1) / "a.bin"):
        store.newest_verified()
    with refused(CheckpointError, "step", 2, tmp_path):
        store.path_of(2)


def test_a_torn_temporary_folder_is_ignored_and_cleared_by_the_next_save(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    for torn in (store.begin(2), tmp_path / ".tmp_step_00000007"):
        torn.mkdir(exist_ok=True)
        (torn / "half").write_bytes(b"x")
    (tmp_path / "step_7").mkdir()  # not a name this store gives
    assert store.steps() == [1] and store.newest_verified().manifest.step == 1
    assert list(store.begin(2).iterdir()) == []
    assert not (tmp_path / ".tmp_step_00000007").exists()


@pytest.mark.parametrize("keep_last", [1, 2, 3, 9])
def test_prune_keeps_the_last_and_never_what_latest_names(tmp_path, keep_last):
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 8, 9, 4):  # resumed from 2, so 8 and 9 are an abandoned future
        save(store, step, {"f": b"x"})
    kept = [4, 2, 1, 9, 8][:keep_last]
    assert store.prune(keep_last) == sorted({1, 2, 4, 8, 9} - set(kept))
    assert store.steps() == sorted(kept) and store.newest_verified().manifest.step == 4
    assert len(names(tmp_path)) == len(kept) + 1


def test_a_file_that_nobody_wrote_or_that_changed_later_is_not_committed(tmp_path):
    store = CheckpointStore(tmp_path)
    folder = store.begin(1)
    records = written(folder, {"a": b"12"})
    for files, name in ((records, "b"), ([*records, FileRecord("c", 0, "0" * 64)], "b"), (records, "a")):
        (folder / name).write_bytes(b"123")
        with refused(CheckpointError, name, folder / name):
            store.commit(1, {}, files)
        (folder / name).unlink()
    assert store.steps() == []


@pytest.mark.parametrize("info", [{"x": float("nan")}, {"x": (1, 2)}, {1: "x"}, {"x": b"y"}, {"x": {1}}])
def test_info_that_json_would_change_is_refused(tmp_path, info):
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        save(store, 1, info=info)
    assert caught.value.field == "info" and store.steps() == []


def test_a_root_that_cannot_be_made_is_a_checkpoint_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    store = CheckpointStore(tmp_path / "file" / "run")
    with refused(CheckpointError, "run.dir", tmp_path / "file" / "run", os.strerror(errno.ENOTDIR)):
        store.begin(1)
    with pytest.raises(CheckpointError):
        store.commit(1, {}, [])
    with pytest.raises(CheckpointError):
        CheckpointStore(tmp_path / "file").newest_verified()


def test_a_step_whose_replacement_never_arrived_stays_loadable_through_the_next_attempt(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 2).rename(tmp_path / ".replaced_step_00000002")  # died between moving it aside and the new one in
    assert store.steps() == [2] and contents(store.newest_verified().folder) == FILES
    store.begin(2)  # and dies again
    assert contents(store.newest_verified().folder) == FILES and store.newest_verified().skipped == []


def save_whole(store: CheckpointStore, step: int, files: dict[str, bytes], save_id: str = "a") -> Path:
    """A checkpoint whose files a critic has, too."""
    part = PartStore(store.root, "critic")
    part.commit(step, {"save_id": save_id}, written(part.begin(step), files))
    return store.commit(step, {"save_id": save_id}, written(store.begin(step, ["critic"]), files))


def test_a_part_counts_with_the_checkpoint_that_takes_it_in(tmp_path):
    store = CheckpointStore(tmp_path)
    part = PartStore(tmp_path, "critic")
    part.begin(1)
    part.commit(1, {}, [])
    assert store.steps() == []
    folder = save_whole(store, 2, FILES)
    assert names(tmp_path) == [LATEST, folder.name], "the other part was left by a save that died"
    manifest = store.newest_verified().manifest
    assert manifest.parts == ("critic",) and contents(folder / "critic") == FILES
    assert [found.files for found in part.manifests()] == [store.manifest_of(folder / "critic").files]


def test_a_part_of_another_save_is_not_taken_in(tmp_path):
    store, part = CheckpointStore(tmp_path), PartStore(tmp_path, "critic")
    part.begin(3)
    part.commit(3, {"save_id": "a"}, [])
    store.begin(3, ["critic"])
    with refused(CheckpointError, "critic"):
        store.commit(3, {"save_id": "b"}, [])
    with refused(CheckpointError, "run.dir"):
        store.begin(3, ["critic"])  # which is gone with that attempt
    assert store.steps() == []


@pytest.mark.parametrize("name", ["a.bin", MANIFEST, "surplus", "missing", "."])
def test_a_checkpoint_whose_part_is_damaged_is_passed_over(tmp_path, name):
    store = CheckpointStore(tmp_path)
    save_whole(store, 1, FILES)
    part = save_whole(store, 2, FILES) / "critic"
    if name == ".":
        part.rename(tmp_path / "elsewhere")
        part.symlink_to(tmp_path / "elsewhere")
    elif name == "surplus":
        (part / name).write_bytes(b"")
    elif name == "missing":
        (part / "empty").unlink()
    elif name == MANIFEST:  # of another save of the same step, whole in itself
        other = save_whole(CheckpointStore(tmp_path / "other"), 2, FILES, "b") / "critic"
        (part / name).write_bytes((other / name).read_bytes())
    else:
        content = bytearray((part / name).read_bytes())
        content[-1] ^= 1
        (part / name).write_bytes(content)
    chosen = store.newest_verified()
    assert chosen.folder == store.path_of(1) and "step_00000002/critic" in str(chosen.skipped[0])


class Killed(BaseException):
    """Stands for the process's end: nothing may catch it."""


@pytest.mark.parametrize("save", [save, save_whole])
@pytest.mark.parametrize("earlier", [[], [1], [1, 2], [2]], ids=str)
def test_a_save_killed_before_any_of_its_disk_operations_leaves_the_old_or_the_new_checkpoint(
    tmp_path, monkeypatch, earlier, save
):
    outcomes = set()
    for kill_at in range(1, 100):
        store = CheckpointStore(tmp_path / str(kill_at))
        for step in earlier:
            save(store, step, {"old": b"old"})
        left = kill_at

        def dying(real):
            def operation(*args, **kwargs):
                nonlocal left
                left -= 1
                if left <= 0:
                    raise Killed
                return real(*args, **kwargs)

            return operation

        with monkeypatch.context() as patched:
            for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir"):
                patched.setattr(os, name, dying(getattr(os, name)))
            try:
                save(store, 2, {"new": b"new"})
            except Killed:
                survived = False
            else:
                survived = True
        if earlier or store.steps():
            outcomes.add(tuple(contents(store.newest_verified().folder)))
        save(store, 2, {"again": b"again"})
        assert contents(store.newest_verified().folder) == {"again": b"again"}
        assert store.steps() == sorted({*earlier, 2})
        assert len(names(store.root)) == len({*earlier, 2}) + 1
        if survived:
            break
    assert survived and kill_at > 8  # the loop reached the end of an undisturbed save
    assert outcomes == ({("old",), ("new",)} if earlier else {("new",)})


def test_a_linked_or_misnamed_entry_neither_stops_a_save_nor_is_followed(tmp_path):
    root, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    store = CheckpointStore(root)
    save(store, 1)
    (root / "step_00000001").rename(elsewhere)
    (root / "step_00000001").symlink_to(elsewhere)
    assert store.newest_verified().manifest.step == 1  # a checkpoint of another run, to start from
    (root / "step_00000009").write_text("a file")
    (root / ".tmp_step_00000004").symlink_to(elsewhere)
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (root / f".{LATEST}.tmp").symlink_to(victim)
    save(store, 2)
    save(store, 3)
    assert store.prune(1) == [1, 2] and store.steps() == [3]
    assert store.verify(elsewhere).step == 1  # what the link led to is still there
    assert victim.read_text() == "untouched" and (root / LATEST).read_text() == "step_00000003\n"


def test_a_pointer_that_is_a_pipe_is_passed_over_and_one_that_is_a_folder_refuses_the_save(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    (tmp_path / LATEST).unlink()
    os.mkfifo(tmp_path / LATEST)
    manifest, _, skipped = store.newest_verified()
    step = manifest.step
    assert step == 1 and [error.field for error in skipped] == [LATEST]
    (tmp_path / LATEST).unlink()
    (tmp_path / LATEST).mkdir()
    with refused(CheckpointError, LATEST, tmp_path / LATEST):
        store.begin(2)


def test_a_lock_that_is_a_link_is_not_written_through(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / LOCK).symlink_to(victim)
    with refused(CheckpointError, "run.dir", tmp_path / "store" / LOCK):
        CheckpointStore(tmp_path / "store").lock()
    assert victim.read_text() == "untouched"


def test_a_strangers_file_is_named_and_what_nfs_leaves_is_not_counted(tmp_path):
    store = CheckpointStore(tmp_path)
    for name in ("a b", ".nfs0001"):
        records = written(store.begin(1), {"a.bin": b"x"})
        (store.temporary_path(1) / name).write_text("x")
        if name == "a b":
            with refused(CheckpointError, "a b", store.temporary_path(1) / "a b"):
                store.commit(1, {}, records)
        else:
            assert store.verify(store.commit(1, {}, records)).step == 1
