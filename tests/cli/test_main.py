"""The command line: mistakes are answered in three lines, with the exit status of their class, and at once."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from transformers import AutoModelForCausalLM

import slimefsdp
from actors.cli import main as cli
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import ModelError
from slimefsdp.estimate.hardware import Rates, write_calibration
from tests.support.runs import startable
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
# what the console script does, and then a look at what that has imported
WATCHED = """
import sys
from actors.cli.main import main
code = main(sys.argv[1:])
heavy = {"torch", "ray", "transformers"} & set(sys.modules)
sys.exit(f"imported {sorted(heavy)}" if heavy else code)
"""


def run(*arguments: Any, watched: bool = False, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a command line in this process; or in one of its own, which fails if it imports anything heavy."""
    words = [str(word) for word in arguments]
    if watched:
        command = [sys.executable, "-c", WATCHED, *words]
        return subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE_S)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder or "."), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(words)
    return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())


@pytest.fixture
def config(example: Path, tmp_path: Path) -> Path:
    """A YAML file with which `train` would start."""
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(startable(example, tmp_path)))
    return file


def test_a_mistake_is_answered_in_three_lines_without_heavy_imports(config: Path) -> None:
    done = run("train", config, "model.path=nowhere", watched=True, folder=config.parent)
    # on a slow machine a stage that lasts has a line of its own
    first, *others = [line for line in done.stderr.splitlines() if not line.startswith("[")]
    assert done.returncode == ModelError.exit_code and done.stdout == ""
    assert first.startswith("error [model]") and "'nowhere'" in first
    assert others[0] == "  field: model.path" and others[1].startswith("  hint:  ") and len(others) == 2


def test_the_version_is_printed_and_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0 and capsys.readouterr().out.split() == ["slimefsdp", slimefsdp.__version__]
    for words in ([], ["--help"]):
        assert cli.main(words) == 0
        commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
        assert len(commands) <= 10 and commands.keys() <= set(capsys.readouterr().out.split())


def test_a_shell_completes_names_of_commands_and_ctrl_c_ends_one_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = [sys.executable, "-c", "import sys; sys.argv = ['slimefsdp']; import actors.cli.main as cli; cli.main()"]
    asked = {"_SLIMEFSDP_COMPLETE": "complete_bash", "COMP_WORDS": "slimefsdp gr", "COMP_CWORD": "1"}
    done = subprocess.run(program, env=ENVIRONMENT | asked, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.split() == ["groups"]

    def interrupted(*_: Any, **__: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("actors.cli.check.check_command", interrupted)
    assert cli.main(["check"]) == 130 and capsys.readouterr().err == "interrupted\n"


@pytest.fixture
def long_context(config: Path) -> Path:
    """A YAML file for a cluster, with a model folder that holds config.json alone."""
    model = config.parent / "big"
    model.mkdir()
    sizes = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
    described = {"model_type": "llama", "vocab_size": 1000, "head_dim": 64, "intermediate_size": 8192, **sizes}
    (model / "config.json").write_text(json.dumps(described))
    tree = {
        "model": {"path": str(model)},
        "mesh": {"dp": "auto", "cp": 8, "dp_replicate": 2},
        "optim": {"total_updates": 10},
        "batch": {"samples_per_update": 64},
        "fsdp": {"sharding": "keep_parameters"},
        "rollout": {"prompts_per_step": 16, "samples_per_prompt": 8, "max_new_tokens": 8192},
    }
    config.write_text(yaml.safe_dump(tree))
    return config


def test_plan_answers_without_torch_ray_transformers_or_weights(long_context: Path) -> None:
    done = run("plan", long_context, "--ranks", 64, "--lengths", "lognormal(4000, 1.0, 16, 60000)", watched=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "mesh      64 ranks = dp_replicate 2 x dp 4 x cp 8; packs of at most 65,536 tokens"
    assert any(line.startswith("schedule  2 updates of 64 samples, micro-batches per data rank: ") for line in lines)
    for level in ("full", "keep_parameters *", "replicate"):
        assert any(line.startswith(f"  {level} ") for line in lines), level
    assert [line.split()[0] for line in lines if line.startswith(("  ring", "  ulysses", "  all_gather"))] == [
        "ring", "ulysses", "all_gather"
    ]  # fmt: skip
    assert not any("a guess: give --lengths" in line for line in lines) and max(map(len, lines)) <= 140
    assert any(line.startswith("least time of an update if nothing overlaps, by a guess for H100: ") for line in lines)
    assert lines[-1].startswith(("  recommended: ", "    "))
    assert "batch.share_prefixes=auto may compute less" in done.stdout
    done = run("plan", long_context, "--ranks", 64, "batch.share_prefixes=never")
    assert done.returncode == 0 and "share_prefixes" not in done.stdout


def test_plan_as_json_says_the_same_and_settings_change_it(long_context: Path) -> None:
    def found(*overrides: Any) -> Any:
        done = run("plan", long_context, "--json", "--ranks", 64, *overrides)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    plain = found()
    assert plain["mesh"] == {"dp_replicate": 2, "dp": 4, "cp": 8, "tp": 1, "ep": 1} and plain["samples"] == 128
    assert plain["lengths"] == "lognormal(4096, 0.8, 2, 16384)" and plain["strategy"] == "ulysses"
    assert plain["parameters"] == 16 * (2 * 2048 * 40 * 64 + 3 * 2048 * 8192) + 2 * 1000 * 2048
    assert plain["imbalance"]["cp"]["tokens"] <= 1.05 and plain["imbalance"]["cp"]["work"] <= 1.05
    full = found("fsdp.sharding=full")
    assert full["sharding"]["all_gather"] > 1.9 * plain["sharding"]["all_gather"]
    recomputed = found("model.activation_checkpointing=full")
    for name, sent in recomputed["comm"].items():
        assert sent["forward"] == pytest.approx(2 * plain["comm"][name]["forward"])
    wide = found("precision.compute_dtype=float32", "precision.reduce_dtype=float64", "optim.name=sgd")
    assert wide["sharding"]["reduce_scatter"] == pytest.approx(2 * plain["sharding"]["reduce_scatter"])
    assert wide["memory"]["full"]["optimizer"] * 2 == plain["memory"]["full"]["optimizer"]
    assert wide["memory"]["full"]["activations"] > 1.4 * plain["memory"]["full"]["activations"]
    for level, held in plain["memory"].items():
        parts = [value for name, value in held.items() if name not in ("host", "total")]
        assert held["total"] == sum(parts), level
    estimate = plain["estimate"]
    assert estimate["chosen"]["memory"] == plain["memory"]["keep_parameters"]
    assert estimate["candidates"][0] == estimate["recommended"] and estimate["recommended"]["fits"]
    frozen = found("model.frozen=['*.mlp.*']")["memory"]["full"]
    assert frozen["optimizer"] < 0.5 * plain["memory"]["full"]["optimizer"]
    assert found("mesh.cp=4", "mesh.dp=8", "attention.strategy=ring")["strategy"] == "ring"


def test_a_plan_takes_measured_rates_and_flags_over_guesses(long_context: Path, tmp_path: Path) -> None:
    rates = Rates("measured here", 100.0, 50.0, 1000.0, 10.0, 20.0)
    write_calibration(tmp_path / "rates.json", rates, {})

    def found(*arguments: Any) -> Any:
        done = run("plan", long_context, "--json", "--ranks", 64, *arguments)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["estimate"]

    measured = found(f"batch.cost_model={tmp_path / 'rates.json'}")
    assert measured["rates"] == asdict(rates)
    faster = found(f"batch.cost_model={tmp_path / 'rates.json'}", "--gbps", 20)
    assert faster["chosen"]["seconds"]["comm"] == pytest.approx(measured["chosen"]["seconds"]["comm"] / 2)
    done = run("plan", long_context, "--ranks", 64, "batch.cost_model=nowhere.json")
    assert done.returncode == 2 and "  field: batch.cost_model" in done.stderr


def test_replay_prints_one_json_object_and_leaves_a_model_and_no_process(
    config: Path, batch: RolloutBatch, tmp_path: Path
) -> None:
    batch.save(tmp_path / "batch.safetensors")
    started = subprocess.Popen(
        [
            *(sys.executable, "-m", "actors.cli", "replay", "config.yaml", "--batch", "batch.safetensors"),
            *("--export", "exported", "mesh.dp=2", "precision.compute_dtype=float32"),
        ],
        cwd=tmp_path,
        env={**ENVIRONMENT, "SLIMEFSDP_TEST": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    most = 0
    while started.poll() is None:
        most = max(most, len(processes_with(f"SLIMEFSDP_TEST={tmp_path}")))
        time.sleep(0.5)
    output, errors = started.communicate(timeout=PATIENCE_S)
    assert started.returncode == 0, errors
    assert most >= 5, "the driver, Ray's own and two ranks were there to be seen"
    assert not processes_with(f"SLIMEFSDP_TEST={tmp_path}")
    metrics = json.loads(output)
    assert output.count("\n") == 1
    assert metrics["updates"] == 1 and metrics["loss"] != 0 and metrics["grad_norm"] > 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "exported")


def processes_with(variable: str) -> list[str]:
    """Command lines of the living processes that were started with `variable` (NAME=value) in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:  # ended meanwhile, or another user's
            continue
    return found
