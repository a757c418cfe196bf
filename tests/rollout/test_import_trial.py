"""Modules of the user's own that hang or end the process where they are imported are refused before anything starts."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from actors.rollout.import_trial import try_imports
from actors.startup import reporting
from slimefsdp.errors import ConfigError
from tests.support.refusals import refused


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where modules are looked for."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "trial_fine.py").write_text("def score(): ...")
    return tmp_path


@pytest.mark.parametrize(
    ("code", "timeout_s", "values"),
    [
        ("import time; time.sleep(600)", 2.0, ["cluster.launch_timeout_s=2"]),
        ("import os, sys; print('leaving', flush=True); os._exit(0)", 600.0, [0, "leaving"]),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 600.0, [-9]),
    ],
    ids=["hangs", "ends", "is killed"],
)
def test_an_import_that_does_not_come_back_is_refused(
    folder: Path, code: str, timeout_s: float, values: list[object]
) -> None:
    (folder / "trial_wrong.py").write_text(code)
    named = {"rollout.filter": "trial_fine:score", "rollout.reward": "trial_wrong:score"}
    if timeout_s < 600:  # which module of several it is is known only where there was time to begin
        del named["rollout.filter"]
    terminal = _Terminal()
    with reporting(terminal), refused(ConfigError, "rollout.reward", "trial_wrong", *values):
        try_imports(named, timeout_s)
    assert "trial_wrong" in terminal.getvalue()  # so that nobody waits without a word


def test_what_comes_back_or_raises_is_left_to_whoever_imports_it(folder: Path) -> None:
    (folder / "trial_raises.py").write_text("raise SystemExit(3)")
    named = {"rollout.reward": "trial_fine:score", "rollout.filter": "trial_raises:score"}
    named |= {"rollout.environment": "nowhere_at_all:Class", "advantage.estimator": "rloo"}
    try_imports(named, 600.0)
    assert not {"trial_fine", "trial_raises"} & sys.modules.keys()
    try_imports({"rollout.reward": "http://127.0.0.1:1/score", "loss.policy": "actors.no_such:f"}, 1e-9)  # none is ours
