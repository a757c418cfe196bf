"""`slimefsdp eval`: a model folder answers held-out prompts, and nothing is trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from actors.cli import main as cli
from actors.cluster import connect
from slimefsdp.errors import CheckpointError, ConfigError
from tests.support.waiting import PATIENCE_S

PROMPTS = 12
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def asked(example: Path, tmp_path: Path) -> list[str]:
    """The arguments that say all that has to be said."""
    lines = (example / "heldout.jsonl").read_text().splitlines()[:PROMPTS]
    (tmp_path / "heldout.jsonl").write_text("\n".join(lines))
    return [
        "eval", str(example / "model"),
        f"data.heldout={tmp_path / 'heldout.jsonl'}", "rollout.reward=actors.rollout.rewards:sorted_digits",
        *("mesh.device=cpu", "precision.compute_dtype=float32", "rollout.max_new_tokens=8"),
    ]  # fmt: skip


def evaluation(*words: str) -> subprocess.CompletedProcess[str]:
    """The command with a cluster of its own, which is not for the process of the tests to join and to leave."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "actors.cli", *words],
        env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_responses_are_drawn_scored_and_left(asked: list[str], tmp_path: Path) -> None:
    output = tmp_path / "output"
    more = ["evaluation.samples_per_prompt=3", "mesh.dp=2"]
    done = evaluation(*asked, *more, "--output", str(output), "--json")
    assert done.returncode == 0, done.stderr
    metrics = json.loads(done.stdout)
    assert metrics == json.loads((output / "metrics.json").read_text())
    rows = [json.loads(line) for line in (output / "evaluations" / "step_00000000.jsonl").read_text().splitlines()]
    assert len(rows) == 3 * PROMPTS
    assert metrics["eval/exact"] == pytest.approx(sum(row["scores"]["exact"] for row in rows) / len(rows))
    assert {"eval/pass@1", "eval/pass@3", "eval/finished"} <= metrics.keys()
    assert cli.main([*asked, *more, "--output", str(output)]) == CheckpointError.exit_code, "it is there already"


@pytest.mark.slow
def test_the_settings_of_a_run_say_how_it_evaluates(asked: list[str], tmp_path: Path) -> None:
    tree = {
        "model": {"path": "elsewhere", "init": "random"},
        "algorithm": "ppo",
        "run": {"dir": str(tmp_path / "run"), "steps": 100},
        "optim": {"total_updates": 100},
        "rollout": {"reward": "actors.rollout.rewards:sorted_digits", "temperature": 0.5, "max_new_tokens": 8},
        "data": {"train": "nowhere.jsonl", "heldout": str(tmp_path / "heldout.jsonl")},
        "evaluation": {"interval_steps": 7, "samples_per_prompt": 2, "pass_at": [2]},
        "mesh": {"device": "cpu"},
        "precision": {"compute_dtype": "float32"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    done = evaluation(*asked[:2], "--config", str(tmp_path / "run.yaml"))
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert f"{PROMPTS} prompts" in said and "2 responses" in said and "0.5" in said and "pass@2" in said
    assert "95 % interval" in said and "pass@1 " not in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("left_out", "more", "kind", "named"),
    [
        ("data.heldout", [], ConfigError, "data.heldout"),
        ("rollout.reward", [], ConfigError, "rollout.reward"),
        ("rollout.reward", [], ConfigError, "rollout.environment=.."),
        ("data.heldout", ["data.heldout=no.jsonl"], ConfigError, "no.jsonl"),
        ("data.heldout", ["data.heldout.gone=no.jsonl"], ConfigError, "data.heldout.gone"),
        ("data.heldout", ["data.heldout={}"], ConfigError, "data.heldout"),
        ("", ["data.heldout.more=no.jsonl"], ConfigError, "data.heldout.more"),
        ("rollout.reward", ["rollout.reward=no_module:f"], ConfigError, "no_module"),
        ("", ["evaluation.samples_per_prompt=0"], ConfigError, "evaluation.samples_per_prompt"),
        ("", ["evaluation.pass_at=[8]"], ConfigError, "evaluation.pass_at"),
        ("", ["evaluation=3"], ConfigError, "evaluation"),
        ("", ["evaluation.interval_steps=3"], ConfigError, "evaluation.interval_steps"),
        ("", ["run=5"], ConfigError, "run"),
        ("", ["model=5"], ConfigError, "model"),
        ("", ["model.path=elsewhere"], ConfigError, "model.path"),
        ("", ["optim.lr=1e-6"], ConfigError, "optim.lr"),
        ("", ["--config", "no.yaml"], ConfigError, "no.yaml"),
        ("", ["rollout.max_new_token=3"], ConfigError, "max_new_tokens"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_anything_starts(
    asked: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    left_out: str, more: list[str], kind: type[ConfigError], named: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(connect, "connect", None)
    words = [word for word in asked if not left_out or not word.startswith(left_out)]
    assert cli.main([*words, *more]) == kind.exit_code
    assert named in capsys.readouterr().err
