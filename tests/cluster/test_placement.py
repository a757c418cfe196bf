"""Which GPU a rank has, and which an engine."""

from __future__ import annotations

from pathlib import Path

from tests.support.module_script import found_by


def test_a_colocated_engine_has_the_gpu_of_its_rank_and_so_has_its_successor(example: Path) -> None:
    found = found_by("tests.support.logical_gpus", str(example / "model"))
    assert sorted(found["ranks"]) == [["0", "0"], ["1", "1"]]
    assert found["engines"] == found["engines, one new"] == found["ranks"]
