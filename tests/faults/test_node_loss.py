"""A node of the cluster goes, with every rank on it: the job goes on where Ray finds another place."""

from __future__ import annotations

from pathlib import Path

from tests.support.module_script import found_by


def test_ranks_of_a_lost_node_start_on_another_and_give_the_same_bits(tmp_path: Path) -> None:
    result = found_by("tests.support.node_loss", str(tmp_path))
    assert result["found"] == result["expected"] and len(set(result["found"])) > 1
    assert result["recoveries"] == [["worker_died", 2]]
