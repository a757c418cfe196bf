"""The kernel checks of a GPU run on a CPU, where they pass; and what is wrong does not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import smoke
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


def test_a_head_that_is_wrong_fails_its_checks_and_with_them_the_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = smoke.token_log_probs

    def too_high(*inputs: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        log_probs, entropy = right(*inputs, **options)
        return log_probs + 0.01, entropy

    monkeypatch.setattr(smoke, "token_log_probs", too_high)
    assert smoke.main(["--device", "cpu", "--only", "head/softcap", "sleep/*"]) == 1
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["FAIL", "head/softcap"],
        ["PASS", "sleep/storages"],
    ]


def test_a_rank_of_the_ring_that_fails_is_the_error_that_is_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(self: smoke.QueueComm, held: torch.Tensor, rows: int) -> smoke.QueueTransfer:
        if self.rank == 1:
            raise RuntimeError("rank 1 sends nothing")
        return send(self, held, rows)

    send = smoke.QueueComm.pass_on
    monkeypatch.setattr(smoke.QueueComm, "pass_on", refuses)
    monkeypatch.setattr(smoke, "MESSAGE_TIMEOUT_S", 0.1)
    assert smoke.main(["--device", "cpu", "--only", "ring/cp2_two_samples"]) == 1
    assert "FAIL ring/cp2_two_samples RuntimeError: rank 1 sends nothing" in capsys.readouterr().out
