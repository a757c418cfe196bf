"""The kernel checks of a GPU run on a CPU, where they pass; and what is wrong does not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.support.gpu_scripts import run_gpu_script

NEED_CUDA = {"head/host_syncs", "large/head_chunks", "large/product_added_in_place"}


def test_every_check_passes_on_a_cpu_but_those_that_need_a_gpu(tmp_path: Path) -> None:
    ran = run_gpu_script("smoke.py", tmp_path, without=("pydantic", "ray", "trl"))
    assert ran.status == 0, ran.printed + ran.errors
    verdicts = {row["name"]: row["verdict"] for row in ran.record["results"]["checks"]}
    assert verdicts == {name: "SKIP" if name in NEED_CUDA else "PASS" for name in verdicts}
    kinds = Counter(name.partition("/")[0] for name in verdicts)
    assert kinds == {"attention": 14, "ring": 3, "head": 7, "sleep": 1, "large": 2}
    assert [line.split()[:2] for line in ran.printed.splitlines()[1:]] == [[v, n] for n, v in verdicts.items()]
