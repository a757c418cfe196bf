"""`slimefsdp curves` draws a run from what it has written so far, whether it still goes on or has ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from actors.cli.main import main
from slimefsdp.errors import CheckpointError, ConfigError
from slimefsdp.monitoring import curves
from tests.support.runs import startable


@pytest.fixture
def run_dir(example: Path, tmp_path: Path) -> Path:
    """The folder of a run that goes on: its settings, two steps and the beginning of a third row."""
    folder = tmp_path / "run"
    folder.mkdir()
    tree = startable(example, tmp_path)
    tree["data"]["heldout"] = {"maths": "heldout.jsonl"}
    (folder / "settings.yaml").write_text(yaml.safe_dump(tree))
    rows = [{"step": step, "time": 0.0, "loss": 1.0, "eval/maths/exact": 0.5} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "lo')
    return folder


def test_a_run_that_goes_on_is_drawn_by_its_settings(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    draw = curves.draw_curves
    monkeypatch.setattr(curves, "draw_curves", lambda *args, **named: (drawn.append(named), draw(*args, **named)))
    assert main(["curves", str(run_dir)]) == 0
    assert (run_dir / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert drawn == [{"title": "run: GRPO", "heldout_sets": ("maths",)}]
    assert str(run_dir / "curves.png") in capsys.readouterr().out


def test_a_folder_without_metrics_or_that_cannot_be_written_is_refused(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["curves", str(tmp_path / "nowhere")]) == ConfigError.exit_code
    (run_dir / "curves.png").mkdir()
    assert main(["curves", str(run_dir)]) == CheckpointError.exit_code
    (run_dir / "metrics.jsonl").write_text("")
    assert main(["curves", str(run_dir)]) == ConfigError.exit_code
    assert all("Traceback" not in text for text in capsys.readouterr())
