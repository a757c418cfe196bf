"""Chosen updates leave traces and a table of shares, on all ranks and by the run's count; the others leave nothing."""

from __future__ import annotations

import gzip
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slimefsdp.config import RunConfig
from slimefsdp.monitoring.profiler import Shares, UpdateProfiler, shares_of_trace, shares_table
from slimefsdp.trainer import Trainer
from tests.support.rank_pool import RankPool
from tests.support.trainers import CPU, fingerprint, fresh_batch, settings


def event(name: str, start: int, end: int, category: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": 1000.0 + start, "dur": float(end - start)}


UPDATE = event("update 3", 10, 110, "user_annotation")


def by_microsecond(work: list[tuple[int, int]], messages: list[tuple[int, int]]) -> Shares:
    """The same, one microsecond of [10, 110) after the other."""
    at_work, sending = (
        np.array([any(start <= time < end for start, end in spans) for time in range(10, 110)])
        for spans in (work, messages)
    )
    return Shares(100e-6, at_work.sum() / 1e6, sending.sum() / 1e6, (sending & ~at_work).sum() / 1e6)


def assert_equal(found: Shares, expected: Shares) -> None:
    for name in ("seconds", "compute", "communication", "exposed", "idle"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), abs=1e-9), name


@pytest.mark.parametrize("seed", range(20))
def test_shares_on_a_cpu_are_those_of_every_microsecond(seed: int) -> None:
    rng = np.random.default_rng(seed)
    work, messages = (
        [
            (int(start), int(start + length))
            for start, length in zip(rng.integers(0, 120, n), rng.integers(1, 30, n), strict=True)
        ]
        for n in rng.integers(0, 5, 2)
    )
    names = ["gloo:all_gather", "c10d::allreduce_", "_c10d_functional::wait_tensor", "nccl:send"]
    trace = [
        UPDATE,
        {"ph": "M", "name": "process_name"},
        # neither operators nor messages, though they last
        event("FSDP::post_backward_reduce (1)", 0, 120, "user_annotation"),
        event("autograd::engine::evaluate_function: MmBackward0", 0, 120),
        event("MmBackward0", 0, 120),
        *(event("aten::mm", *span) for span in work),
        *(event(names[index % 4], *span) for index, span in enumerate(messages)),
    ]
    found = shares_of_trace([trace[index] for index in rng.permutation(len(trace))], "update 3")
    assert_equal(found, by_microsecond(work, messages))


def test_on_a_gpu_kernels_count_and_not_the_host_that_starts_them() -> None:
    kernels = [(20, 50), (60, 70)]
    trace = [
        UPDATE,
        event("update 3", 10, 110, "gpu_user_annotation"),
        event("aten::mm", 10, 110),
        event("c10d::allreduce_", 10, 110),
        event("sm90_gemm", *kernels[0], "kernel"),
        event("Memcpy HtoD", *kernels[1], "gpu_memcpy"),
        event("ncclDevKernel_AllGather_RING_LL", 40, 65, "kernel"),
    ]
    assert_equal(shares_of_trace(trace, "update 3"), by_microsecond(kernels, [(40, 65)]))


def test_communication_is_counted_in_the_phase_that_begins_it_and_what_overlaps_of_one_kind_once() -> None:
    phases = [("forward", 10, 40), ("backward", 40, 80), ("optimizer", 80, 100)]
    trace = [
        UPDATE,
        *(event(f"slimefsdp::{name}", start, end, "user_annotation") for name, start, end in phases),
        event("c10d::_allgather_base_", 20, 22),
        event("gloo:all_gather", 21, 31),
        event("gloo:reduce_scatter", 75, 85),  # its end is awaited in the next phase
        event("gloo:all_gather", 45, 50),
        event("gloo:all_reduce", 90, 95),
        event("gloo:all_reduce", 105, 130),  # goes on beyond the update
    ]
    expected = {
        ("forward", "all-gather"): 11e-6, ("backward", "all-gather"): 5e-6, ("backward", "reduce-scatter"): 10e-6,
        ("optimizer", "all-reduce"): 5e-6, ("other", "all-reduce"): 5e-6,
    }  # fmt: skip
    shares = shares_of_trace(trace, "update 3")
    assert shares.by_phase == pytest.approx(expected)
    *_, forward, backward, optimizer, other = shares_table("update 3", [shares, shares]).splitlines()
    assert forward.split(": ")[1] == "all-gather 11.0 %"
    assert backward.split(": ")[1] == "reduce-scatter 10.0 %, all-gather 5.0 %"
    assert [line.split(":")[0].strip() for line in (optimizer, other)] == ["optimizer", "other"]


def memory(time: int, total: int, change: int, device: int) -> dict[str, Any]:
    args = {"Total Allocated": total, "Bytes": change, "Device Type": device}
    return {"ph": "i", "name": "[memory]", "ts": 1000.0 + time, "args": args}


def test_the_peak_is_that_of_the_device_that_computes_and_on_a_cpu_of_what_the_update_made() -> None:
    on_cpu = [memory(30, 800, 400, 0), memory(20, 400, 100, 0), memory(40, 500, -300, 0)]  # 300 were there before
    on_gpu = [memory(20, 900, 100, 1), memory(30, 200, -700, 1)]
    assert shares_of_trace([UPDATE, *on_cpu, *on_gpu], "update 3").peak_bytes == 500
    kernel = event("gemm", 20, 30, "kernel")
    assert shares_of_trace([UPDATE, kernel, *on_cpu, *on_gpu], "update 3").peak_bytes == 900
    assert shares_of_trace([UPDATE, kernel], "update 3").peak_bytes is None


def profiled_run(rank: int, config: RunConfig, resumed: RunConfig) -> list[str]:
    """Two steps of two updates, a checkpoint, and the same again as a run that resumes; digests of the weights."""
    batch = fresh_batch()
    trainer = Trainer(config, device=CPU)
    for _ in range(2):
        assert trainer.train_step(batch)["updates"] == 2
    digests = [fingerprint(trainer.policy)]
    trainer.save(1)
    trainer.finish_save()
    other = Trainer(resumed, device=CPU)
    other.load(1)
    other.train_step(batch)
    return [*digests, fingerprint(other.policy)]


def test_ranks_profile_the_updates_that_were_chosen_and_a_resumed_run_counts_on(
    ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    half = fresh_batch().num_samples // 2
    runs = {}
    for name, chosen in (("plain", None), ("profiled", {"updates": [2, 6], "details": ["memory"]})):
        sections: dict[str, Any] = {"run": {"dir": str(tmp_path / name)}, "batch": {"samples_per_update": half}}
        sections["loss"] = {"max_kl": 1e9}  # so that no sample is left out
        config = settings(folder, mesh={"dp": 2}, **sections, **({"profile": chosen} if chosen else {}))
        runs[name] = ranks.run(2, profiled_run, config, config)
    assert runs["plain"] == runs["profiled"], "what is profiled is what trains otherwise, to the bit"
    assert not (tmp_path / "plain" / "profile").exists()
    written = sorted(file.name for file in (tmp_path / "profiled" / "profile").iterdir())
    of_rank = ["_rank0.json.gz", "_rank1.json.gz"]
    assert written == sorted(f"update_{n:06d}{end}" for n in (2, 6) for end in [".txt", *of_rank])
    table = (tmp_path / "profiled" / "profile" / "update_000006.txt").read_text()
    rows = []
    for rank in range(2):
        trace = tmp_path / "profiled" / "profile" / f"update_000006_rank{rank}.json.gz"
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        shares = shares_of_trace(events, "update 6")
        assert {("forward", "all-gather"), ("backward", "reduce-scatter"), ("optimizer", "all-reduce")} <= set(
            shares.by_phase
        )
        assert shares.communication > 0 and 0 < shares.compute < shares.seconds and shares.idle >= 0
        rows.append(shares)
        assert shares.peak_bytes is not None and shares.peak_bytes > 0
    assert table == shares_table("update 6", rows) + "\n"


def failing_profile(rank: int, config: RunConfig, failing: str) -> tuple[list[str], str]:
    """The warnings of a step whose profile one rank cannot write, and a digest of the weights after it."""
    trainer = Trainer(config, device=CPU)
    folder = config.run.dir / "profile" if config.run.dir else Path()
    if rank == 1 and failing:
        assert isinstance(trainer._state.profiler, UpdateProfiler)
        if failing == "folder":
            trainer._state.profiler._folder = Path(__file__) / "not_a_folder"
        else:  # the plain trace is there already when its packed form is refused
            (folder / "update_000001_rank1.json.gz").mkdir(parents=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert trainer.train_step(fresh_batch())["updates"] == 1
    return [str(one.message) for one in caught if "profile" in str(one.message)], fingerprint(trainer.policy)


@pytest.mark.parametrize("failing", ["folder", "packed trace"])
def test_a_trace_that_one_rank_cannot_write_is_a_warning_leaves_nothing_half_and_training_goes_on(
    ranks: RankPool, folder: Path, tmp_path: Path, failing: str
) -> None:
    plain = settings(folder, mesh={"dp": 2}, run={"dir": str(tmp_path / "plain")})
    config = settings(folder, mesh={"dp": 2}, run={"dir": str(tmp_path)}, profile={"updates": [1]})
    undisturbed = ranks.run(2, failing_profile, plain, "")
    (told, first), (untold, second) = ranks.run(2, failing_profile, config, failing)
    assert [first, second] == [weights for _, weights in undisturbed]
    assert len(told) == 1 and "update 1" in told[0] and "rank 1:" in told[0] and "profile.updates" in told[0]
    assert untold == []
    left = {file.name for file in (tmp_path / "profile").iterdir() if file.is_file()}
    assert left == {"update_000001_rank0.json.gz"}, "no plain trace, and no table without the other rank"


def update_that_fails(rank: int, config: RunConfig) -> bool:
    trainer = Trainer(config, device=CPU)
    profiler = trainer._state.profiler
    with pytest.raises(ZeroDivisionError), profiler.profiled(1):
        raise ZeroDivisionError
    with profiler.profiled(1):  # the profiler of the failed one is stopped
        torch.ones(3).sum()
    return True


def test_an_update_that_fails_leaves_no_profile_and_no_profiler_at_work(
    ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    config = settings(folder, run={"dir": str(tmp_path)}, profile={"updates": [1], "details": ["stacks", "shapes"]})
    assert ranks.run(1, update_that_fails, config) == [True]
    assert len(list((tmp_path / "profile").iterdir())) == 2
    trace = gzip.decompress((tmp_path / "profile" / "update_000001_rank0.json.gz").read_bytes())
    events = json.loads(trace)["traceEvents"]
    frames = [one["name"] for one in events if one.get("cat") == "python_function"]
    assert any("update_that_fails" in name for name in frames), "of those that call operators"
    assert [3] in [one["args"]["Input Dims"][0] for one in events if one["name"] == "aten::sum"]
