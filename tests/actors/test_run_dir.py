"""A run's folder: one process writes there, its settings start the run again, and no damaged batch is trained on."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from actors.run_dir import RecordedBatches, RunFolder, check_folders, settings_text
from slimefsdp.checkpoint.store import CheckpointStore
from slimefsdp.config import RunConfig, config_from_dict, load_config
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import CheckpointError, ConfigError
from tests.support.refusals import refused
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
LEAST = {"model": {"path": "a: 'model' # \u00e9"}, "optim": {"total_updates": 10}}
NOTES = {"metrics": {"rollout/reward": 0.1 + 0.2}, "prompts": {"offset": 3}}

HOLDER = """
import sys, time
from pathlib import Path
from actors.run_dir import RunFolder
with RunFolder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def environment(*more: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*more, ROOT))), "OMP_NUM_THREADS": "1"}


def small_batch() -> RolloutBatch:
    samples = [{"tokens": [1, 2, 3 + i], "response_length": 2, "reward": float(i), "group_id": 0} for i in range(2)]
    return RolloutBatch.from_samples(samples, temperature=0.7, weight_version=5)


# ---------------------------------------------------------------------- settings

TREES: dict[str, Any] = {
    "the least": LEAST,
    "patterns and paths": {
        **LEAST, "model": {"path": "m", "frozen": ["*.mlp.*", "a b"]}, "run": {"dir": "r u n", "steps": 3, "seed": 0}
    },
    "a model in run.dir": {**LEAST, "run": {"dir": "runs/$$one", "export_dir": "auto"}},
    "a rule about what is given": {**LEAST, "algorithm": "sft", "batch": {"samples_per_update": 4}},
}  # fmt: skip


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_the_settings_file_gives_the_same_settings_and_shows_all(tmp_path: Path, tree: dict[str, Any]) -> None:
    config = config_from_dict(tree)
    (tmp_path / "settings.yaml").write_text(settings_text(config))
    again = load_config(tmp_path / "settings.yaml")
    assert again == config and again.model_dump(exclude_unset=True) == config.model_dump(exclude_unset=True)
    assert_shows_all(settings_text(config), config)


@pytest.mark.parametrize("preset", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_so_it_does_of_every_preset(tmp_path: Path, preset: Path) -> None:
    config = load_config(preset, ["mesh.dp=auto", "mesh.cp=1", "mesh.tp=1", "mesh.dp_replicate=1"]).with_ranks(64)
    (tmp_path / "settings.yaml").write_text(settings_text(config))
    again = load_config(tmp_path / "settings.yaml")
    assert again == config and again.mesh.dp == 64
    assert_shows_all(settings_text(config), config)


@pytest.mark.parametrize(
    ("written", "meant"), [("auto", "here/model"), ("model", "model"), ("/x/model", "/x/model"), ("null", None)]
)
def test_a_model_goes_into_run_dir_under_auto_and_else_where_its_path_says(written: str, meant: str | None) -> None:
    config = load_config(ROOT / "configs/sort_digits_sft.yaml", [f"run.export_dir={written}", "run.dir=here"])
    assert config.run.export_dir == (None if meant is None else Path(meant))


def test_stored_settings_with_another_run_dir_leave_the_model_of_the_first_run(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text(settings_text(load_config(ROOT / "configs/sort_digits_sft.yaml")))
    assert load_config(tmp_path / "settings.yaml", ["run.dir=other"]).run.export_dir == Path("other/model")
    assert load_config(tmp_path / "settings.yaml", ["run.dir=null"]).run.export_dir is None


def test_a_resumed_run_that_would_end_before_its_newest_checkpoint_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore.of_run(tmp_path)
    for step in (2, 4):
        store.begin(step)
        store.commit(step, {}, [])
    for steps in (3, 4):
        run = {"dir": str(tmp_path), "steps": steps}
        config = config_from_dict({**LEAST, "run": run, "checkpoint": {"resume": True}})
        with refused(ConfigError, "run.steps", "run.steps=3", 4) if steps == 3 else nullcontext():
            check_folders(config)


def assert_shows_all(text: str, config: RunConfig) -> None:
    uncommented = [line.removeprefix("# ") for line in text.splitlines()[1:]]
    names = [line.partition(":")[0] for line in uncommented]
    expected = []
    for name, value in config.model_dump().items():
        expected += [name, *(f"  {key}" for key in value)] if isinstance(value, dict) else [name]
    assert names == expected


def test_settings_of_earlier_starts_are_kept_unless_they_are_the_same(tmp_path: Path) -> None:
    configs = [config_from_dict({**LEAST, "run": {"seed": seed}}) for seed in (1, 2, 2, 3)]
    for config in configs:
        RunFolder(tmp_path).write_settings(config)
    found = {file.name: load_config(file).run.seed for file in tmp_path.iterdir()}
    assert found == {"settings.yaml": 3, "settings.1.yaml": 1, "settings.2.yaml": 2}


# ---------------------------------------------------------------------- one run at a time


def test_a_second_run_is_refused_before_ray_is_loaded_until_the_first_is_killed(example: Path, tmp_path: Path) -> None:
    folder, without_ray = tmp_path / "run", tmp_path / "without_ray"
    without_ray.mkdir()
    (without_ray / "ray.py").write_text("raise SystemExit('ray is loaded')")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    overrides = [f"model.path={example / 'model'}", f"data.train={example / 'sft.jsonl'}", f"run.dir={folder}"]
    overrides += [f"run.export_dir={tmp_path / 'export'}"]
    command = [sys.executable, "-m", "actors.cli", "train", ROOT / "configs/sort_digits_sft.yaml", *overrides]

    def start() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=environment(without_ray), capture_output=True, text=True, timeout=PATIENCE_S)

    second = start()
    assert second.returncode == CheckpointError.exit_code and "run.dir" in second.stderr, second.stderr
    assert str(holder.pid) in second.stderr and socket.gethostname() in second.stderr
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert "ray is loaded" in start().stderr, "nothing is in the way any more"


def test_the_lock_ends_with_the_block(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder, RunFolder(tmp_path / "other"):
        folder.batches.write(0, small_batch(), NOTES)
    other = HOLDER.replace("time.sleep(600)", "FolderLock(Path(sys.argv[1]) / 'batches').acquire()")
    other = "from slimefsdp.io.files import FolderLock" + other
    subprocess.run([sys.executable, "-c", other, str(tmp_path)], env=environment(), check=True, timeout=PATIENCE_S)


# ---------------------------------------------------------------------- batches


def test_a_recorded_batch_comes_back_as_it_was(tmp_path: Path) -> None:
    batches, batch = RecordedBatches(tmp_path), small_batch()
    batches.write(7, batch, NOTES)
    found = batches.read(7)
    assert found is not None and found[0].same_as(batch) and found[1] == NOTES
    assert batches.read(6) is None and RecordedBatches(tmp_path / "none").read(7) is None


def test_a_step_that_is_repeated_replaces_its_batch(tmp_path: Path) -> None:
    batches, batch = RecordedBatches(tmp_path), small_batch()
    batches.write(7, batch, NOTES)
    batches.write(8, batch, NOTES)
    batches.write(7, batch.replace(rewards=batch.rewards + 1), {})
    (first, notes), second = batches.read(7) or ((), {}), batches.read(8)
    assert first.rewards.tolist() == [1.0, 2.0] and notes == {} and second is not None and second[0].same_as(batch)


@pytest.mark.parametrize("name", ["batch.safetensors", "manifest.json"])
@pytest.mark.parametrize("how", ["one bit", "cut", "gone"])
def test_a_damaged_batch_is_passed_over_by_name(tmp_path: Path, name: str, how: str) -> None:
    batches = RecordedBatches(tmp_path)
    batches.write(7, small_batch(), NOTES)
    file = tmp_path / "step_00000007" / name
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content if how == "one bit" else content[:-20])
    if how == "gone":
        file.unlink()
    with pytest.warns(UserWarning, match=re.escape(name)):
        assert batches.read(7) is None
    batches.write(7, small_batch(), NOTES)
    assert batches.read(7) is not None


def test_what_no_checkpoint_can_go_back_to_is_removed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in range(6):
        folder.batches.write(step, small_batch(), NOTES)
    folder.forget_old_batches()
    assert folder.checkpoint_steps == [] and folder.batches.read(0) is not None
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (2, 4):
        store.begin(step)
        store.commit(step, {}, [])
    folder.forget_old_batches()
    assert folder.checkpoint_steps == [2, 4]
    assert [step for step in range(6) if folder.batches.read(step) is not None] == [2, 3, 4, 5]
