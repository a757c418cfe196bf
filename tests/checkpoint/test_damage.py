"""Whatever is done to a checkpoint's files: never a wrong load, never code run, the newest good one instead."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import pickle
import random
import resource
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from slimefsdp.checkpoint.manifest import MANIFEST
from slimefsdp.checkpoint.store import LATEST
from slimefsdp.config import RunConfig
from slimefsdp.errors import CheckpointError
from slimefsdp.trainer import Trainer
from tests.support.checkpoints import forge_index, forge_info, reseal
from tests.support.rank_pool import RankPool
from tests.support.refusals import assert_refusal
from tests.support.tiny_models import TinyFolder
from tests.support.trainers import CPU, error_of, fresh_batch, settings

NEWEST, OTHER = 2, 1
Damage = tuple[str, str, Callable[[Path], object]]  # what is done, to which file of the store, how


@pytest.fixture(scope="module")
def folder(tiny_folder: TinyFolder) -> Path:
    return tiny_folder()


def digest(trainer: Trainer) -> str:
    """Every bit of what a load fills on this rank: weights, moments, counters."""
    found = hashlib.sha256(repr(trainer.updater.progress()).encode())
    values = [*trainer.policy.parameters()]
    values += [value for state in trainer.updater.optimizer.state.values() for value in state.values()]
    for value in values:
        local = value.to_local() if isinstance(value, DTensor) else value
        found.update(local.detach().clone().numpy().tobytes())
    return found.hexdigest()


def forget(trainer: Trainer) -> None:
    """A load that fills nothing would leave these."""
    with torch.no_grad():
        for parameter in trainer.policy.parameters():
            parameter.fill_(7.0)


def outcomes(rank: int, config: RunConfig, store: Path, damages: Callable[[Path], Iterator[Damage]]) -> dict[str, Any]:
    """Saves two steps, and loads "latest" after each damage to the newer one, which is undone afterwards."""
    trainer = Trainer(config, device=CPU)
    good = {}
    for step in (OTHER, NEWEST):
        trainer.train_step(fresh_batch(step))
        trainer.save(step)
        good[step] = digest(trainer)
    before = store.with_name("before")
    if rank == 0:
        shutil.copytree(store, before)
    torch.distributed.barrier()
    count, wrong = 0, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for what, name, damage in damages(before):
            if rank == 0:
                damage(store / name)
            torch.distributed.barrier()
            forget(trainer)
            trainer.load()
            restored = trainer.restored()
            assert restored is not None
            # the pointer is no data: without it the newest is found all the same
            expected = NEWEST if name == LATEST else OTHER
            is_named = name == LATEST or any(Path(name).name in reason for reason in restored.skipped)
            if restored.step != expected or digest(trainer) != good[expected] or not is_named:
                wrong.append((what, name, restored.step, restored.skipped))
            count += 1
            torch.distributed.barrier()
            if rank == 0:
                for path in store.rglob("*"):
                    if not (before / path.relative_to(store)).exists():
                        path.unlink()
                shutil.copy2(before / name, store / name) if (before / name).exists() else None
            torch.distributed.barrier()
        trainer.load()
        restored = trainer.restored()
        assert restored is not None and restored.step == NEWEST and not restored.skipped  # the damages were undone
    return {"count": count, "wrong": wrong}


def files(before: Path) -> list[str]:
    """Of the newest checkpoint, and the pointer."""
    return [*sorted(f"step_{NEWEST:08d}/{path.name}" for path in (before / f"step_{NEWEST:08d}").iterdir()), LATEST]


def truncations(before: Path) -> Iterator[Damage]:
    for name in files(before):
        whole = (before / name).read_bytes()
        for percent in range(0, 100, 10):
            kept = whole[: len(whole) * percent // 100]
            yield f"{percent} %", name, lambda path, kept=kept: path.write_bytes(kept)


def flipped_bits(before: Path) -> Iterator[Damage]:
    rng = random.Random(0)
    for _ in range(60):
        name = rng.choice(files(before))
        altered = bytearray((before / name).read_bytes())
        bit = rng.randrange(len(altered) * 8)
        altered[bit // 8] ^= 1 << bit % 8
        yield f"bit {bit}", name, lambda path, altered=altered: path.write_bytes(altered)


def fifteen_flipped_bits(before: Path) -> Iterator[Damage]:
    yield from itertools.islice(flipped_bits(before), 15)


def missing_and_surplus_files(before: Path) -> Iterator[Damage]:
    for name in files(before):
        yield "missing", name, Path.unlink
    for surplus in ("rank_00009.safetensors", "rank_00001.json.sha256", ".hidden", "rank_00000.bak"):
        yield "surplus", f"step_{NEWEST:08d}/{surplus}", lambda path: path.write_bytes(b"x")


class Payload:
    """Touches a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


def hostile_pickles(before: Path) -> Iterator[Damage]:
    hostile = pickle.dumps(Payload(before.with_name("code_was_run")))
    for name in (".metadata", "optimizer.pt", "rank_00000.safetensors", "rank_00000.json", MANIFEST):
        yield "pickle", f"step_{NEWEST:08d}/{name}", lambda path: path.write_bytes(hostile)
    yield "pickle", LATEST, lambda path: path.write_bytes(hostile)


FORGERIES: dict[str, tuple[Callable[[Path], object], str]] = {
    **{f"no {name}": (partial(forge_info, name=name, value=None), name) for name in ("identity", "mesh", "config")},
    "identity is a list": (partial(forge_info, name="identity", value=[1]), "identity"),
    "updates are text": (partial(forge_info, name="updates_taken", value="3"), "updates_taken"),
    "rows without end": (
        lambda folder: forge_index(folder, lambda index: next(iter(index["tensors"].values())).update(rows=1e999)),
        "rank_00000.json",
    ),
    "rows before the first": (
        lambda folder: forge_index(folder, lambda index: next(iter(index["tensors"].values())).update(start=-4)),
        "rank_00000.json",
    ),
    "a generator of another kind": (
        lambda folder: forge_index(folder, lambda index: index["state"]["generators"].update(numpy=["MT19937"])),
        "generators",
    ),
}


def load_forgeries(rank: int, config: RunConfig, store: Path) -> dict[str, tuple[Any, bool]]:
    """What each forgery of the only checkpoint leads to, and whether the trainer goes on as if nothing had been."""
    trainer = Trainer(config, device=CPU)
    trainer.train_step(fresh_batch())
    trainer.save(NEWEST)
    newest, found = store / f"step_{NEWEST:08d}", {}
    before = {path.name: path.read_bytes() for path in newest.iterdir()}
    trainer.train_step(fresh_batch())  # so that a load would change something
    for name, (forge, _) in FORGERIES.items():
        weights = digest(trainer)
        if rank == 0:
            forge(newest)
        torch.distributed.barrier()
        found[name] = error_of(trainer.load), digest(trainer) == weights
        torch.distributed.barrier()
        if rank == 0:
            for file, data in before.items():
                (newest / file).write_bytes(data)
        torch.distributed.barrier()
    trainer.load()
    return found


def test_a_well_sealed_forgery_is_a_typed_error_on_all_ranks_that_changes_no_weight(
    folder: Path, ranks: RankPool, tmp_path: Path
) -> None:
    config = settings(folder, mesh={"dp": 2}, run={"dir": str(tmp_path)})
    for found in ranks.run(2, load_forgeries, config, tmp_path / "checkpoints"):
        for name, (error, unchanged) in found.items():
            assert isinstance(error, CheckpointError) and FORGERIES[name][1] in str(error) and unchanged, (name, error)


@pytest.mark.parametrize(
    ("dp", "damages", "count"),
    [
        (1, truncations, 40),
        (1, flipped_bits, 60),
        (1, missing_and_surplus_files, 8),
        (1, hostile_pickles, 6),
        (2, missing_and_surplus_files, 10),
        (2, fifteen_flipped_bits, 15),  # each rank rereads a part of the bytes
    ],
)
def test_the_damage_is_named_and_the_other_checkpoint_is_loaded_bit_for_bit(
    folder: Path, ranks: RankPool, tmp_path: Path, dp: int, damages: Any, count: int
) -> None:
    config = settings(folder, mesh={"dp": dp}, run={"dir": str(tmp_path)})
    for result in ranks.run(dp, outcomes, config, tmp_path / "checkpoints", damages):
        assert result == {"count": count, "wrong": []}
    assert not (tmp_path / "code_was_run").exists()
    pickle.loads(pickle.dumps(Payload(tmp_path / "code_was_run")))
    assert (tmp_path / "code_was_run").exists()  # what the pickles would have done


def load_what_an_attacker_wrote(rank: int, config: RunConfig, store: Path) -> tuple[Any, bool]:
    """The newest checkpoint has a pickle for tensors, and a manifest that says it belongs there."""
    trainer = Trainer(config, device=CPU)
    trainer.save(NEWEST)
    before = digest(trainer)
    if rank == 0:
        newest = store / f"step_{NEWEST:08d}"
        hostile = pickle.dumps(Payload(store.with_name("code_was_run")))
        (newest / "rank_00000.safetensors").write_bytes(hostile)
        reseal(newest)
    torch.distributed.barrier()
    return error_of(trainer.load), digest(trainer) == before


def test_a_pickle_that_a_forged_manifest_vouches_for_is_refused_and_changes_nothing(
    folder: Path, ranks: RankPool, tmp_path: Path
) -> None:
    config = settings(folder, mesh={"dp": 2}, run={"dir": str(tmp_path)})
    for error, unchanged in ranks.run(2, load_what_an_attacker_wrote, config, tmp_path / "checkpoints"):
        assert_refusal(error, CheckpointError, "tensors", "rank_00000.safetensors")
        assert unchanged
    assert not (tmp_path / "code_was_run").exists()


def save_on_a_full_disk(rank: int, config: RunConfig, full_rank: int, fills: bool = False) -> dict[str, Any]:
    """In one save out of three, the kernel refuses what `full_rank` writes.

    Args:
        fills: fill the disk up to its last 50 KB; else bytes of a file beyond so many are refused.
    """
    trainer = Trainer(config, device=CPU)
    losses, errors, steps = [], [], []
    for step in (1, 2, 3):
        losses.append(trainer.train_step(fresh_batch(step))["loss"].hex())
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        assert config.run.dir is not None
        filler = config.run.dir / "filler"
        if step == 2 and rank == full_rank:
            if fills:
                filler.write_bytes(b"x" * (shutil.disk_usage(config.run.dir).free - 50_000))
            else:
                resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        free = shutil.disk_usage(config.run.dir).free
        torch.distributed.barrier()

        def save(step: int = step) -> None:
            trainer.save(step)
            trainer.finish_save()

        errors.append(error_of(save))
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        steps.append(sorted(path.name for path in (config.run.dir / "checkpoints").glob("*step*")))
        given_back = shutil.disk_usage(config.run.dir).free == free
        torch.distributed.barrier()
        if step == 2 and rank == full_rank and fills:
            filler.unlink()
            assert given_back
        torch.distributed.barrier()
    trainer.load()
    return {"losses": losses, "errors": errors, "steps": steps, "restored": trainer.restored()}


@contextmanager
def mounted(folder: Path, *how: str) -> Iterator[None]:
    """A file system at an empty folder, where this process may mount any."""
    folder.mkdir()
    mounting = subprocess.run(["mount", *how, folder], capture_output=True, text=True)
    if mounting.returncode:
        pytest.skip(f"file systems cannot be mounted here: {mounting.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def check_full_disk(
    ranks: RankPool, folder: Path, run_dir: Path, full_rank: int, cause: list[str], *, async_save: bool, fills: bool
) -> None:
    names = [f"step_{step:08d}" for step in range(4)]
    undisturbed = settings(folder, mesh={"dp": 2}, run={"dir": str(run_dir / "undisturbed")})
    Path(undisturbed.run.dir or "").mkdir(parents=True)
    expected = ranks.run(2, save_on_a_full_disk, undisturbed, -1)[0]
    assert expected["errors"] == [None] * 3
    shutil.rmtree(run_dir / "undisturbed")
    (run_dir / "run").mkdir()
    config = settings(folder, mesh={"dp": 2}, run={"dir": str(run_dir / "run")}, checkpoint={"async_save": async_save})
    for result in ranks.run(2, save_on_a_full_disk, config, full_rank, fills):
        before, error, after = result["errors"]
        assert before is None and after is None
        assert_refusal(error, CheckpointError, "run.dir", *cause)
        assert result["steps"] == [names[1:2], names[1:2], [names[1], names[3]]]
        assert result["losses"] == expected["losses"] and result["restored"].step == 3


@pytest.mark.filterwarnings("ignore:the save in the background failed")
@pytest.mark.parametrize(("full_rank", "async_save"), [(0, False), (1, False), (1, True)])
def test_a_refused_write_fails_on_all_ranks_leaves_nothing_behind_and_training_goes_on_with_the_same_bits(
    folder: Path, ranks: RankPool, tmp_path: Path, full_rank: int, async_save: bool
) -> None:
    cause = [f"rank_0000{full_rank}.safetensors", os.strerror(errno.EFBIG)]
    check_full_disk(ranks, folder, tmp_path, full_rank, cause, async_save=async_save, fills=False)


def test_a_full_disk_gets_its_space_back(folder: Path, ranks: RankPool, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with mounted(disk, "-t", "tmpfs", "-o", "size=2m", "tmpfs"):
        check_full_disk(ranks, folder, disk, 0, [os.strerror(errno.ENOSPC)], async_save=False, fills=True)


def save_one_step(rank: int, config: RunConfig) -> str:
    trainer = Trainer(config, device=CPU)
    trainer.train_step(fresh_batch(1))
    trainer.save(1)
    return digest(trainer)


def load_where_nothing_can_be_written(rank: int, config: RunConfig) -> tuple[str, Any, bool]:
    trainer = Trainer(config, device=CPU)
    trainer.load()
    loaded = digest(trainer)
    error = error_of(lambda: trainer.save(2))
    return loaded, error, trainer.train_step(fresh_batch(2))["skipped_update"] == 0


def test_a_read_only_folder_can_be_loaded_from_and_refuses_a_save_without_harm(
    folder: Path, ranks: RankPool, tmp_path: Path
) -> None:
    written, read_only = tmp_path / "written", tmp_path / "read_only"
    saved = ranks.run(2, save_one_step, settings(folder, mesh={"dp": 2}, run={"dir": str(written)}))
    config = settings(folder, mesh={"dp": 2}, run={"dir": str(read_only)})
    with mounted(read_only, "--bind", str(written)):
        subprocess.run(["mount", "-o", "remount,ro,bind", read_only], check=True)
        results = ranks.run(2, load_where_nothing_can_be_written, config)
    for (loaded, error, trains), own in zip(results, saved, strict=True):
        assert loaded == own and trains
        assert_refusal(error, CheckpointError, "run.dir", read_only, os.strerror(errno.EROFS))
