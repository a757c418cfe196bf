"""The benchmark of weight updates counts what it says it counts, and runs at a small size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.weight_updates import TRANSPORTS, summary
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]


def test_the_engines_own_time_is_left_out_where_the_raw_copy_has_no_such_part() -> None:
    rounds = [{"update_s": 2.0, "engine_s": 1.0, "raw_s": raw_s} for raw_s in (0.5, 1.0, 3.0)]
    assert summary("broadcast", rounds) == {"update_s": 2.0, "engine_s": 1.0, "raw_s": 1.0, "share": 1.0}
    assert summary("ipc", rounds)["share"] == 0.5


def test_it_runs_by_every_transport_and_sends_little_more_than_the_model(tmp_path: Path) -> None:
    command = ["--hidden", "128", "--layers", "2", "--rounds", "1", "--json", str(tmp_path / "found.json")]
    subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "weight_updates.py"), *command],
        check=True, cwd=ROOT, timeout=PATIENCE_S, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    found = json.loads((tmp_path / "found.json").read_text())["results"]
    assert found["transports"].keys() == {*TRANSPORTS} and len(found["rounds"]) == 1
    for one in found["transports"].values():
        assert 0 <= one["bytes_over_model"] <= 0.01 and one["update_s"] > 0 and one["raw_s"] > 0
        assert one["share"] > 0
