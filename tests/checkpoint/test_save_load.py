"""What a save costs the group, what one in the background sees, and which checkpoints a run takes."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slimefsdp.checkpoint import save_load
from slimefsdp.checkpoint.save_load import BackgroundSave
from slimefsdp.checkpoint.store import LATEST, CheckpointStore
from slimefsdp.config import RunConfig
from slimefsdp.errors import CheckpointError
from slimefsdp.io.files import LOCK, FolderLock
from slimefsdp.results import LoadReport
from slimefsdp.trainer import Trainer
from tests.support.disk_points import watch_disk
from tests.support.fresh_ranks import run_fresh
from tests.support.rank_pool import RankPool
from tests.support.refusals import assert_refusal, names, refused
from tests.support.tiny_models import TinyFolder, save_tiny_model
from tests.support.trainers import CPU, error_of, fingerprint, fresh_batch, settings


@pytest.fixture(scope="module")
def folder(tiny_folder: TinyFolder) -> Path:
    return tiny_folder()


def warnings_of(call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught]


# ---------------------------------------------------------------------- what travels


class Collectives(TorchDispatchMode):
    """(operation, dtypes, bytes) of every collective in the thread."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, set[torch.dtype], int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.seen.append((str(func), {t.dtype for t in tensors}, sum(t.nbytes for t in tensors)))
        return func(*args, **(kwargs or {}))


def collectives_of_a_save(rank: int, config: RunConfig) -> tuple[list[Any], list[Any]]:
    trainer = Trainer(config, device=CPU)
    trainer.train_step(fresh_batch())
    start = BackgroundSave.start
    with Collectives() as gathers:  # the control: this does gather
        fingerprint(trainer.policy)
    with Collectives() as here:
        background = Collectives()

        def start_watched(save: BackgroundSave, write: Callable[[], Path]) -> None:
            def watched() -> Path:
                with background:  # a mode is of one thread
                    return write()

            start(save, watched)

        BackgroundSave.start = start_watched  # type: ignore[method-assign]
        trainer.save(1)
        trainer.finish_save()
        BackgroundSave.start = start  # type: ignore[method-assign]
    assert sum(size for _, _, size in gathers.seen) > 100_000
    return here.seen, background.seen


@pytest.mark.parametrize(("dp", "async_save"), [(2, True), (4, False)])
def test_a_save_gathers_no_parameter(folder: Path, ranks: RankPool, tmp_path: Path, dp: int, async_save: bool) -> None:
    checkpoint = {"async_save": async_save}
    config = settings(folder, mesh={"dp": dp}, run={"dir": str(tmp_path)}, checkpoint=checkpoint)
    for here, background in ranks.run(dp, collectives_of_a_save, config):
        assert here and bool(background) == async_save
        for operation, dtypes, size in [*here, *background]:  # pickled answers, and their sizes
            assert dtypes <= {torch.uint8, torch.int64} and size < 4096 * dp, operation


# ---------------------------------------------------------------------- in the background


def save_then_go_on(rank: int, config: RunConfig, first: str) -> dict[str, Any]:
    """Copying begins late, and nothing is written before everything that could disturb it has happened."""
    copy = BackgroundSave.copy
    may_copy, is_copied = threading.Event(), threading.Event()

    def late_copy(*args: Any) -> None:
        may_copy.wait(60)
        time.sleep(0.3)  # whoever does not wait for the copy is now ahead of it; a slow machine hides that at worst
        copy(*args)
        is_copied.set()

    trainer = Trainer(config, device=CPU)
    if trainer.reference is not None:
        may_copy.set()
    trainer.train_step(fresh_batch(1))
    if trainer.reference is not None:
        trainer.update_ref()

    def state() -> list[str]:
        models = [trainer.policy, *([] if trainer.reference is None else [trainer.reference])]
        trainer.wake_up()
        return [fingerprint(model) for model in models]

    may_write = threading.Event()
    # the thread of the save waits, this one does not
    end_watching = watch_disk(
        lambda _: may_write.wait(60) if threading.current_thread().name.startswith("save") else None
    )
    random.seed(rank)
    np.random.seed(rank)
    loop_state = {"cursor": 1}
    at_save = state()
    BackgroundSave.copy = late_copy
    resting = trainer.memory().host_buffers
    path = trainer.save(1, loop_state)
    # a reference that followed goes to rest when the call ends, so it is copied by then
    at_once = is_copied.is_set() == (trainer.reference is not None)
    may_copy.set()
    drawn = [torch.rand(1).item(), random.random(), np.random.rand()]
    loop_state["cursor"] = 2
    too_early = path.exists()
    buffers = trainer.memory().host_buffers - resting
    moments = sum(
        p.to_local().nbytes * 3 if p.requires_grad else p.to_local().nbytes for p in trainer.policy.parameters()
    )
    copied = buffers >= moments if trainer.mesh.is_first_copy else buffers == 0
    if first == "sleep":
        trainer.sleep()
        trainer.wake_up()
    loss = trainer.train_step(fresh_batch(2))["loss"]
    if trainer.reference is not None:
        trainer.update_ref()
    later = state()
    may_write.set()
    finished = [trainer.finish_save(), trainer.finish_save()]
    end_watching()
    BackgroundSave.copy = copy
    trainer.save(2)
    restored_state = trainer.load(1)  # waits for the save of step 2
    again = [torch.rand(1).item(), random.random(), np.random.rand()]
    return {"too_early": too_early, "copied": copied, "at_once": at_once,
            "finished": finished == [path, None],
            "moved_on": later != at_save, "restored": state() == at_save,
            "loop_state": restored_state, "drawn": drawn == again, "draws": drawn, "loss": loss,
            "loss_again": trainer.train_step(fresh_batch(2))["loss"]}  # fmt: skip


SPREADS: dict[str, dict[str, Any]] = {
    "one rank": {"mesh": {"dp": 1}},
    "two shards": {"mesh": {"dp": 2}},
    "two copies": {"mesh": {"dp_replicate": 2}},
    "on the host": {"mesh": {"dp": 2}, "fsdp": {"cpu_offload": True}},
    "a part is frozen": {
        "mesh": {"dp": 1, "cp": 2}, "model": {"frozen": ["*.mlp.*"]},
        "optim": {"total_updates": 10},
    },
    "a reference that followed": {"mesh": {"dp": 2}, "loss": {"kl_coefficient": 0.1}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("spread", "first"),
    [*((spread, "update") for spread in SPREADS), ("two copies", "sleep"), ("on the host", "sleep")],
)
def test_a_save_in_the_background_holds_the_moment_of_the_call(
    folder: Path, ranks: RankPool, tmp_path: Path, spread: str, first: str
) -> None:
    sections = {**SPREADS[spread], "model": {"path": str(folder), **SPREADS[spread].get("model", {})}}
    config = settings(folder, **sections, run={"dir": str(tmp_path)}, checkpoint={"async_save": True})
    results = ranks.run(config.ranks, save_then_go_on, config, first)
    for result in results:
        assert (
            result["copied"]
            and result["at_once"]
            and not result["too_early"]
            and result["finished"]
            and result["moved_on"]
            and result["restored"]
        )
        assert result["loop_state"] == {"cursor": 1} and result["drawn"]
        assert result["loss"] == result["loss_again"]
    assert len(results) == 1 or all(a != b for a, b in zip(results[0]["draws"], results[1]["draws"], strict=True))
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == [LOCK, LATEST, "step_00000001", "step_00000002"]


def failing_in_the_background(rank: int, config: RunConfig) -> dict[str, Any]:
    trainer = Trainer(config, device=CPU)
    write = save_load.write_shard
    errors: dict[str, Any] = {}
    for call in ("save", "finish_save", "load"):
        if rank == 1:
            save_load.write_shard = refuse
        trainer.save(1)
        loss = trainer.train_step(fresh_batch())["loss"]
        errors[call] = error_of((lambda: trainer.save(2)) if call == "save" else getattr(trainer, call))
        save_load.write_shard = write
    nothing = trainer.finish_save()
    trainer.save(3)
    return {"errors": errors, "nothing": nothing, "path": trainer.finish_save(), "loss": loss}


def refuse(*_: Any) -> None:
    raise CheckpointError("the disk is full")


@pytest.mark.filterwarnings("ignore:the save in the background failed")
def test_the_next_call_raises_the_error_of_the_save_before_alike_on_all_ranks(
    folder: Path, ranks: RankPool, tmp_path: Path
) -> None:
    config = settings(folder, mesh={"dp": 2}, run={"dir": str(tmp_path)}, checkpoint={"async_save": True})
    for result in ranks.run(2, failing_in_the_background, config):
        assert {(error.message, error.rank) for error in result["errors"].values()} == {("the disk is full", 1)}
        assert result["nothing"] is None and result["path"] == tmp_path / "checkpoints" / "step_00000003"
    assert [path.name for path in (tmp_path / "checkpoints").glob("*step*")] == ["step_00000003"]


SAVE_AND_END = """
import sys, torch
from slimefsdp.config import load_config
from slimefsdp.distributed.mesh import start_process_group_from_environment
from slimefsdp.trainer import Trainer
cpu = torch.device("cpu")
start_process_group_from_environment(cpu, timeout_s=60)
Trainer(load_config(sys.argv[1]), device=cpu).save(1)
"""


def test_a_process_that_ends_at_once_still_writes_its_save(folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model: {{path: {folder}}}\nmesh: {{device: cpu}}\noptim: {{total_updates: 9}}\n"
        f"run: {{dir: {tmp_path}}}\ncheckpoint: {{async_save: true}}\n"
    )
    ended = subprocess.run([sys.executable, "-c", SAVE_AND_END, str(config)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert CheckpointStore(tmp_path / "checkpoints").newest_verified().manifest.step == 1


# ---------------------------------------------------------------------- what a run takes


def save_two_steps(rank: int, config: RunConfig) -> None:
    trainer = Trainer(config, device=CPU)
    trainer.train_step(fresh_batch())
    trainer.save(1)
    trainer.save(2)


def load_elsewhere(rank: int, config: RunConfig) -> dict[str, Any]:
    trainer = Trainer(config, device=CPU)
    before = fingerprint(trainer.policy), trainer.updates_taken
    torch.manual_seed(1000 + rank)
    error: list[Any] = []
    said = warnings_of(lambda: error.append(error_of(trainer.load)))
    unchanged = (fingerprint(trainer.policy), trainer.updates_taken) == before
    drawn = torch.rand(1).item()
    torch.manual_seed(1000 + rank)
    return {"error": error[0], "said": said, "unchanged": unchanged, "restored": trainer.restored(),
            "own_draws": drawn == torch.rand(1).item(), "next_lr": trainer.updater.next_lr}  # fmt: skip


def test_what_was_restored_and_from_which_mesh(folder: Path, ranks: RankPool, tmp_path: Path) -> None:
    run = {"dir": str(tmp_path)}
    ranks.run(2, save_two_steps, settings(folder, mesh={"cp": 2}, run=run))
    store = tmp_path / "checkpoints"
    (store / "step_00000002" / "rank_00001.json").unlink()  # the second rank's generators
    expected = LoadReport(1, str(store / "step_00000001"), (), 2, {"dp_replicate": 1, "dp": 1, "cp": 2}, ())
    for sections, world in (({"cp": 2}, 2), ({"dp": 2}, 2), ({"dp": 1}, 1)):
        results = ranks.run(world, load_elsewhere, settings(folder, mesh=sections, run=run))
        for result in results:
            (reason,) = result["restored"].skipped
            assert names(reason, store / "step_00000002" / "rank_00001.json")
            assert result["own_draws"] == (sections != {"cp": 2})
            said = result["restored"].differences
            assert len(said) == (sections != {"cp": 2}) and all(
                names(text, value) for text in said for value in ("mesh.cp", 1, 2)
            )
            assert result["restored"] == replace(expected, skipped=(reason,), differences=said)
        assert set(said) <= set(results[0]["said"])  # rank 0 warns, too


def test_the_runs_own_schedule_holds_and_every_difference_is_named_once(
    folder: Path, ranks: RankPool, tmp_path: Path
) -> None:
    run = {"dir": str(tmp_path)}
    optim = {"schedule": "linear", "warmup_updates": 2, "total_updates": 10, "lr": 0.01}
    ranks.run(1, save_two_steps, settings(folder, run=run, optim=optim))
    (same,) = ranks.run(1, load_elsewhere, settings(folder, run=run, optim=optim))
    assert not same["said"] and same["error"] is None
    other = {**optim, "lr": 0.02, "warmup_updates": 4, "betas": [0.8, 0.95]}
    (result,) = ranks.run(1, load_elsewhere, settings(folder, run=run, optim=other))
    (said,) = result["said"]
    for value in ("optim.lr", 0.02, 0.01, "optim.warmup_updates", 4, 2, "optim.betas", [0.8, 0.95]):
        assert names(said, value), value
    assert "total_updates" not in said
    assert result["next_lr"] == pytest.approx(0.02 * 2 / 4) and same["next_lr"] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("sections", "model", "field", "values"),
    [
        ({}, {"vocab_size": 128}, "vocab_size", ("96", "128")),
        ({}, {"rms_norm_eps": 1e-3}, "rms_norm_eps", ("1e-06", "0.001")),
        ({}, {"kind": "llama"}, "model_type", ("qwen3", "llama")),
        ({"precision": {"compute_dtype": "float64"}}, {}, "master_dtype", ("float32", "float64")),
        ({"optim": {"name": "sgd"}}, {}, "optim.name", ("adamw", "sgd")),
    ],
)
def test_a_checkpoint_of_something_else_is_refused_by_field_values_and_file(
    folder: Path, ranks: RankPool, tmp_path: Path, sections: Any, model: Any, field: str, values: tuple[str, str]
) -> None:
    run = {"dir": str(tmp_path)}
    ranks.run(2, save_two_steps, settings(folder, mesh={"dp": 2}, run=run))
    other = save_tiny_model(tmp_path / "other", **model) if model else folder
    for result in ranks.run(2, load_elsewhere, settings(other, mesh={"dp": 2}, run=run, **sections)):
        error = result["error"]
        assert_refusal(error, CheckpointError, field, field, *values, tmp_path, "step_00000002")
        assert result["unchanged"] and result["restored"] is None


def save_beside_another_run(rank: int, send: Any, config: RunConfig, loads: bool) -> None:
    trainer = Trainer(config, device=CPU)
    send((error_of(lambda: trainer.save(3)), error_of(trainer.load) if loads else None))


def test_a_second_run_may_load_but_not_write(folder: Path, ranks: RankPool, tmp_path: Path) -> None:
    config = settings(folder, run={"dir": str(tmp_path)})
    ranks.run(1, save_two_steps, config)  # in a process that lives on, and so does its lock
    for async_save in (False, True):
        second = settings(folder, run={"dir": str(tmp_path)}, checkpoint={"async_save": async_save})
        (((error, loaded),), code), *_ = run_fresh(1, save_beside_another_run, second, True)
        assert_refusal(error, CheckpointError, "run.dir", "process ", tmp_path / "checkpoints")
        assert loaded is None and code == 0
    with refused(CheckpointError, "run.dir", "process ", tmp_path / "checkpoints"):
        FolderLock(tmp_path / "checkpoints").acquire()
