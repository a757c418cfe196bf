"""A run whose processes were all killed goes on from its own records as if nothing had happened, on any mesh."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors import loop
from actors.loop import train
from actors.rollout.demonstrations import Demonstration
from actors.rollout.prompt_files import Prompts
from actors.rollout.records import Record
from actors.run_dir import RecordedBatches, settings_text
from actors.signals import Interrupts
from slimefsdp.config import RunConfig, load_config
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import CheckpointError, ConfigError, SlimeError
from slimefsdp.results import LoadReport
from tests.support.refusals import names, refused
from tests.support.runs import bits, rows_of
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
STEPS, INTERVAL, BROKEN_IN = 7, 3, 5  # the process dies in step 5, counted from 0: steps 3 and 4 are on record
SAMPLES = 16  # of a step
JUDGE = '''
import os, time
from pathlib import Path

def variety(record, response, finished):
    """Counts its calls in a file, and stands still at one of them if asked to."""
    # a worker in a cluster that was there before the test does not have the variable
    calls = Path(os.environ.get("JUDGE_CALLS", Path(__file__).with_name("here.calls")))
    with calls.open("a") as file:
        file.write(".")
    if str(calls.stat().st_size) == os.environ.get("JUDGE_STOPS_AT"):
        calls.with_suffix(".stopped").touch()
        time.sleep(600)
    return {"reward": len(set(response)) / 10, "exact": float(response == record["answer"])}
'''


class Runs:
    """Runs of one file of settings, each in a folder of its own."""

    def __init__(self, folder: Path, make_config: Any, example: Path) -> None:
        self.folder = folder
        (folder / "judge.py").write_text(JUDGE)
        lines = (example / "heldout.jsonl").read_text().splitlines()
        (folder / "first.jsonl").write_text("\n".join(lines[:5]))
        (folder / "others.jsonl").write_text("\n".join(lines[5:8]))
        config = make_config(
            run={"steps": STEPS, "seed": 5},
            batch={"samples_per_update": 8},
            optim={"schedule": "cosine", "warmup_updates": 3, "total_updates": 2 * STEPS},
            loss={"kl_coefficient": 0.1},
            reference={"update_interval_steps": 2},
            data={
                "train": str(example / "train.jsonl"),
                "heldout": {name: str(folder / f"{name}.jsonl") for name in ("first", "others")},
            },
            rollout={
                "prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 6, "engines": 1,
                "reward": "judge:variety",
            },
            evaluation={"interval_steps": 4},
            checkpoint={"interval_steps": INTERVAL},
        )  # fmt: skip
        (folder / "run.yaml").write_text(settings_text(config))

    def config(self, name: str, *overrides: str) -> RunConfig:
        own = [f"run.dir={self.folder / name}", f"run.export_dir={self.folder / name / 'model'}"]
        return load_config(self.folder / "run.yaml", [*own, *overrides])

    def start(self, name: str, *overrides: str, **environment: str) -> subprocess.Popen[str]:
        """`slimefsdp train` in processes of its own: driver and Ray in one group, without which no rank lives on."""
        command = [sys.executable, "-m", "actors.cli", "train", str(self.folder / "run.yaml")]
        command += [f"run.dir={self.folder / name}", f"run.export_dir={self.folder / name / 'model'}", *overrides]
        path = os.pathsep.join(map(str, (self.folder, ROOT)))
        calls = {"JUDGE_CALLS": str(self.folder / f"{name}.calls")}
        return subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": path, **calls, **environment}, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def model(self, name: str) -> str:
        return hashlib.sha256((self.folder / name / "model" / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def runs(make_config: Any, example: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        runs = Runs(tmp_path_factory.mktemp("resume"), make_config, example)
        patch.syspath_prepend(str(runs.folder))
        yield runs


@pytest.fixture(scope="module")
def doomed(runs: Runs) -> Iterator[subprocess.Popen[str]]:
    """A run that will stand still while it judges a batch; its cluster is its own, and it begins before the others."""
    # the trial before the start, held-out prompts before the run and after step 4, and whole steps
    calls_before = 1 + 8 + SAMPLES * BROKEN_IN + 8
    process = runs.start("killed", JUDGE_STOPS_AT=str(calls_before + 3))
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def straight(cluster: None, runs: Runs, doomed: subprocess.Popen[str]) -> list[dict[str, float]]:
    """The rows of a run without interruption."""
    config = runs.config("straight")
    train(config)
    return rows_of(config)


@pytest.fixture(scope="module")
def killed(runs: Runs, doomed: subprocess.Popen[str]) -> Path:
    """The folder of a run whose processes were killed while a batch was being judged."""
    stopped = runs.folder / "killed.stopped"
    wait_until(lambda: stopped.exists() or doomed.poll() is not None)
    os.killpg(doomed.pid, signal.SIGKILL)
    printed = doomed.communicate()[0]
    assert stopped.exists(), printed
    return runs.folder / "killed"


def copy_of(killed: Path, name: str) -> None:
    shutil.copytree(killed, killed.parent / name)


def after(step: int, rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [row for row in rows if row["step"] > step]


def test_a_killed_run_goes_on_to_the_same_losses_and_the_same_model(
    runs: Runs, straight: list[dict[str, float]], killed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = [bits(row) for row in straight]
    assert [row["reference_updated"] for row in straight[1:]] == [0, 1, 0, 1, 0, 1, 0]
    evaluated = [{name for name in row if name.startswith("eval/")} for row in straight]
    both = {f"eval/{name}/{score}" for name in ("first", "others") for score in ("reward", "exact")}
    assert evaluated == [both if step in (0, 4, STEPS) else set() for step in range(STEPS + 1)]
    rows = [json.loads(line) for line in (killed / "metrics.jsonl").read_text().splitlines()]
    assert [bits(row) for row in rows] == expected[: BROKEN_IN + 1]
    assert sorted(path.name for path in (killed / "batches").glob("step_*")) == [f"step_{n:08d}" for n in range(5)]
    assert sorted(path.name for path in (killed / "checkpoints").glob("step_*")) == ["step_00000000", "step_00000003"]
    copy_of(killed, "resumed")
    calls = runs.folder / "here.calls"
    calls_before = calls.stat().st_size
    config = runs.config("resumed", "checkpoint.resume=true")
    train(config)
    printed = capsys.readouterr().err
    assert f"resuming at step {INTERVAL} of {STEPS}" in printed and "step_00000003" in printed
    assert [bits(row) for row in rows_of(config)] == expected
    assert runs.model("resumed") == runs.model("straight")
    # the recorded steps were not judged again: two steps and two evaluations were
    assert calls.stat().st_size - calls_before == (STEPS - BROKEN_IN) * SAMPLES + 2 * 8
    kept = sorted(path.name for path in (runs.folder / "resumed" / "checkpoints").glob("step_*"))
    assert kept == ["step_00000006", "step_00000007"]
    assert [path.name for path in (runs.folder / "resumed" / "batches").glob("step_*")] == ["step_00000006"]


def test_another_mesh_trains_on_the_same_batches(runs: Runs, straight: list[dict[str, float]], killed: Path) -> None:
    copy_of(killed, "elsewhere")
    config = runs.config("elsewhere", "mesh.dp=1", "mesh.cp=2", "checkpoint.resume=true", f"run.steps={BROKEN_IN}")
    train(config)
    found, expected = after(INTERVAL, rows_of(config)), after(INTERVAL, straight)[: BROKEN_IN - INTERVAL]
    for row, same in zip(found, expected, strict=True):
        assert row["rollout/reward"] == same["rollout/reward"] and row["weight_version"] == same["weight_version"]
        for metric in ("loss", "grad_norm", "kl_ref", "entropy"):
            assert row[metric] == pytest.approx(same[metric], rel=1e-5, abs=1e-7), metric
    assert any(row["loss"] != same["loss"] for row, same in zip(found, expected, strict=True)), "another mesh indeed"


def test_what_is_damaged_is_passed_over_and_sampled_anew_to_the_same_losses(
    runs: Runs, straight: list[dict[str, float]], killed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_of(killed, "damaged")
    for name in ("batches/step_00000004/batch.safetensors", "checkpoints/step_00000003/rank_00000.safetensors"):
        file = runs.folder / "damaged" / name
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    # and what was recorded of other weights is no batch of this step
    recorded = RecordedBatches(runs.folder / "damaged" / "batches")
    found = recorded.read(3)
    assert found is not None and isinstance(found[0], RolloutBatch)
    recorded.write(3, found[0].replace(weight_version=99), found[1])
    with pytest.warns(UserWarning) as caught:
        train(runs.config("damaged", "checkpoint.resume=true"))
    printed = capsys.readouterr().err
    assert "step_00000003" in printed and names(printed, f"step 0 of {STEPS}")
    warned = [str(warning.message) for warning in caught if "recorded batch" in str(warning.message)]
    assert len(warned) == 2 and "step 3" in warned[0] and "step_00000004" in warned[1], warned
    assert [bits(row) for row in rows_of(runs.config("damaged"))] == [bits(row) for row in straight]
    assert runs.model("damaged") == runs.model("straight")


@pytest.mark.parametrize(
    ("state", "error", "field", "values"),
    [
        ({"step": 14, "prompts": {}}, ConfigError, "run.steps", ["run.steps=12", 14]),
        ({"cursor": 14}, CheckpointError, "run.dir", ["loop_state"]),
    ],
)
def test_a_checkpoint_from_elsewhere_or_beyond_the_end_is_refused(
    make_config: Any, tmp_path: Path, state: dict[str, Any], error: type[SlimeError], field: str, values: list[object]
) -> None:
    config = make_config(run={"dir": str(tmp_path), "steps": 12}, checkpoint={"resume": True})
    restored = LoadReport(14, "step_00000014", (), 2, {}, ("optim.lr is 1 (saved: 2)",))
    group: Any = SimpleNamespace(load=lambda step: state, restored=lambda: restored)
    with refused(error, field, *values):
        loop._resume(config, group, None, None)  # type: ignore[arg-type]


def test_a_refused_resume_leaves_the_settings_of_the_run(example: Path, tmp_path: Path) -> None:
    def load(step: object) -> None:
        raise CheckpointError("lora.rank is 8", field="lora.rank", hint="")

    run = [f"run.dir={tmp_path}", f"model.path={example / 'model'}", "mesh.dp=1"]
    config = load_config(ROOT / "configs" / "sort_digits_sft.yaml", [*run, "checkpoint.resume=true"])
    file = tmp_path / "settings.yaml"
    file.write_text("run: {steps: 3}")
    prompts = Prompts([Record({}, "")], {}, demonstrations=[Demonstration(np.array([1, 2]), 1)])
    group: Any = SimpleNamespace(load=load, config=config, shutdown=lambda: None)
    with ExitStack() as stack:
        started = loop.Run(config, Interrupts(), prompts, lambda _: group, stack)
        with pytest.raises(CheckpointError):
            started.begin()
    assert file.read_text() == "run: {steps: 3}"
    assert not list(tmp_path.glob("settings.*.yaml"))
