"""`slimefsdp calibrate` refuses what the machine cannot run before it starts a process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from actors.cli.main import main
from slimefsdp.errors import ResourceError


def test_more_ranks_than_the_cores_may_run_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cap = 4 * (os.cpu_count() or 1)  # the default of cluster.max_ranks_per_core
    out = tmp_path / "rates.json"
    assert main(["calibrate", "--device", "cpu", "--ranks", str(cap + 1), "--out", str(out)]) == ResourceError.exit_code
    printed = capsys.readouterr().err
    assert "field: --ranks" in printed and str(cap + 1) in printed and str(cap) in printed
    assert not out.exists()
