"""`slimefsdp bench`: what it trains on, that all systems compute the same, what it says of those that do not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from mmap import PAGESIZE, mmap
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.cli import bench
from actors.cli.main import main
from benchmarks.peers.measure import fill_packs, measured, pack_sizes, read_samples
from benchmarks.render_table import BEGIN, END, markdown, replaced
from benchmarks.step import harness
from benchmarks.step.workloads import DEFAULT_WORKLOADS, WORKLOADS, build_batch, padding, write_model
from slimefsdp.config import load_config
from slimefsdp.errors import ConfigError
from slimefsdp.training.advantages import response_advantages

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks/results/train_step.json"


# ---------------------------------------------------------------------- workloads


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_what_its_title_says_and_the_same_from_the_same_seed(name: str) -> None:
    workload = WORKLOADS[name]
    batch = build_batch(workload, seed=3)
    assert batch.same_as(build_batch(workload, seed=3)) and not batch.same_as(build_batch(workload, seed=4))
    assert batch.tokens.min() >= 0 and batch.tokens.max() < workload.vocab
    shapes = {
        "skewed": (64, None),
        "uniform": (64, {(160, 128)}),
        "prompt_heavy": (32, {(1152, 128)}),
        "vocab152k": (16, {(256, 128)}),
        "long": (1, {(8192, 8128)}),
        "smoke": (4, None),
    }
    samples, lengths = shapes[name]
    assert batch.num_samples == samples
    found = set(zip(batch.lengths.tolist(), batch.response_lengths.tolist(), strict=True))
    assert lengths is None or found == lengths


@pytest.mark.parametrize("seed", range(5))
def test_skewed_lengths_are_58_percent_padding(seed: int) -> None:
    batch = build_batch(WORKLOADS["skewed"], seed)
    assert padding(batch) == pytest.approx(0.58, abs=0.01)
    logarithms = np.log(batch.response_lengths)
    assert abs(np.mean((logarithms - logarithms.mean()) ** 3)) < 0.5 * logarithms.std() ** 3  # nearly symmetric


def test_groups_share_their_prompt_and_have_the_advantages_of_grpo() -> None:
    batch = build_batch(WORKLOADS["skewed"], seed=0)
    samples = batch.to_samples()
    for group in range(8):
        prompts = {tuple(s["tokens"][: -s["response_length"]]) for s in samples if s["group_id"] == group}
        assert len(prompts) == 1
    config = load_config(ROOT / "benchmarks/step/slimefsdp.yaml")
    own = response_advantages(config, batch.replace(advantages=None))
    np.testing.assert_allclose(batch.advantages, own, rtol=1e-5)


def test_the_model_is_a_whole_one_of_its_size(tmp_path: Path) -> None:
    write_model(tmp_path / "model", vocab=512, seed=0)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.num_parameters() == pytest.approx(0.85e6, rel=0.01) and model.config.tie_word_embeddings


# ---------------------------------------------------------------------- measuring


class Allocates:
    """A step that holds so many bytes for a moment, in pages of its own: malloc would hand out free resident memory."""

    def __init__(self, size: int) -> None:
        self.size, self.micro_batches, self.parameters = size, [1], 0

    def step(self, micro_batch: int) -> tuple[float, float]:
        with mmap(-1, self.size) as pages:
            for start in range(0, self.size, PAGESIZE):
                pages[start] = 1
        return float(self.size), 0.0


def test_the_peak_of_a_step_is_what_it_held_at_most_and_not_what_an_earlier_one_did() -> None:
    mib, peaks = 2**20, []
    for size in (256 * mib, 32 * mib):
        step = measured(Allocates(size), 1, torch.device("cpu"), with_memory=True)
        assert step["loss"] == size
        peaks.append(step["peak_extra_bytes"] / mib)
    assert peaks == pytest.approx([256, 32], abs=16)  # the kernel counts pages in batches


def test_packs_hold_every_sample_once_and_no_more_than_their_size(tmp_path: Path) -> None:
    batch = build_batch(WORKLOADS["skewed"], seed=0)
    batch.save(tmp_path / "batch")
    samples = read_samples(tmp_path / "batch", torch.device("cpu"))
    assert torch.equal(torch.cat([sample.tokens for sample in samples]), torch.from_numpy(batch.tokens.copy()))
    packs = fill_packs(samples, 512)
    assert sorted(id(sample) for pack in packs for sample in pack) == sorted(map(id, samples))
    assert max(sum(sample.length for sample in pack) for pack in packs) <= 512
    longest, total = int(batch.lengths.max()), batch.num_tokens
    assert pack_sizes(samples, 16, 1024, 10**6) == [longest, 1024, total]


@pytest.fixture
def peers(tmp_path: Path) -> Path:
    """A folder in which only the plain loops are installed: this environment runs them."""
    python = tmp_path / "peers/hugging_face/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return tmp_path / "peers"


@pytest.mark.slow  # five systems start one after another
def test_all_systems_compute_the_same_loss_and_gradient_and_one_not_installed_has_no_number(peers: Path) -> None:
    saved: list[dict[str, Any]] = []
    record = harness.run(
        tuple(harness.SYSTEMS), ["smoke"], rounds=2, peers=peers, device="cpu", save=lambda one: saved.append(one)
    )
    assert saved == [record]
    results = {one["system"]: one for one in record["results"]}
    absent_ones = [name for name, spec in harness.SYSTEMS.items() if spec.venv == "trl"]
    for name in absent_ones:
        absent = results.pop(name)
        assert absent["status"] == "absent" and "setup.sh" in absent["reason"] and "tokens_per_second" not in absent
    assert len(absent_ones) == 4 and results.keys() == harness.SYSTEMS.keys() - set(absent_ones)
    adapters = results.pop("lora")
    assert adapters["first_grad_norm"] != pytest.approx(results["slimefsdp"]["first_grad_norm"], rel=0.05)
    assert adapters["parameters"] < results["slimefsdp"]["parameters"] / 4 and adapters["of_all_weights"] > 0
    for one in results.values():
        assert one["status"] == "measured" and one["agrees_with_slimefsdp"] and len(one["steps"]) == 2, one
        assert one["first_grad_norm"] == pytest.approx(results["slimefsdp"]["first_grad_norm"], rel=1e-5)
        assert one["first_loss"] == pytest.approx(results["slimefsdp"]["first_loss"], rel=1e-5, abs=1e-6)
        # weights moved alike too
        assert one["steps"][-1]["grad_norm"] == pytest.approx(results["slimefsdp"]["steps"][-1]["grad_norm"], rel=0.05)
    assert "absent: bash" in harness.table(record) and "| absent |" in markdown(HEAD | record)


def test_a_system_that_crashes_has_failed_with_its_last_words(peers: Path) -> None:
    python = peers / "hugging_face/bin/python"
    python.write_text("#!/bin/sh\necho first >&2; echo 'no memory left' >&2; exit 1\n")
    (one,) = harness.run(["hf_padded"], ["smoke"], rounds=1, peers=peers)["results"]
    assert one == {"workload": "smoke", "system": "hf_padded", "status": "failed", "reason": "no memory left"}
    ends_and_reasons = {
        "printf '{'": "ended without an answer",
        "echo hello": "no answer but 'hello'",
        "echo loading >&2; kill -9 $$": "ended by signal 9",
    }
    for ends, reason in ends_and_reasons.items():
        python.write_text(f"#!/bin/sh\n{ends}\n")
        (one,) = harness.run(["hf_padded"], ["smoke"], rounds=1, peers=peers)["results"]
        assert (one["status"], one["reason"]) == ("failed", reason)


# a system that answers at once
ANSWERING = """#!{python}
import json, sys
print(json.dumps({{"parameters": 1, "micro_batches": [1, 2]}}), flush=True)
for line in sys.stdin:
    seconds = {{"user_s": 1.0, "system_s": 0.0, "wall_s": 1.0, "device_s": None, "peak_extra_bytes": 1}}
    print(json.dumps({{"loss": 1.0, "grad_norm": 1.0, **seconds}}), flush=True)
"""


def test_it_says_on_stderr_what_runs_and_for_how_long_and_prints_the_table_alone(
    peers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (peers / "hugging_face/bin/python").write_text(ANSWERING.format(python=sys.executable))
    systems = ["hf_padded", "trl", "hf_packed"]  # nobody has installed trl here
    main(["bench", "--systems", ",".join(systems), "--workloads", "smoke", "--rounds", "2", "--peers", str(peers)])
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert all(re.match(r"\d+:\d\d:\d\d .*\bsmoke\b", line) for line in lines), lines
    named = [
        (name[0], *map(int, re.findall(r"\d+", " ".join(re.findall(r"\d+ of \d+", line)))))
        for line in lines
        if len(name := [system for system in systems if system in line]) == 1
    ]
    starts = [("hf_padded", 1, 3)] * 2 + [("trl", 2, 3)] + [("hf_packed", 3, 3)] * 2
    rounds = [
        ("hf_padded", 1, 2, 1, 3), ("hf_packed", 1, 2, 3, 3), ("hf_packed", 2, 2, 1, 3), ("hf_padded", 2, 2, 3, 3),
    ]  # fmt: skip
    assert named == [*starts, *rounds]
    assert [line.split()[0] for line in printed.out.splitlines()] == ["workload", "smoke", "smoke", "smoke"]


# ---------------------------------------------------------------------- results and tables


def step(seconds: float) -> dict[str, Any]:
    return {"user_s": seconds, "system_s": 0.0, "wall_s": seconds, "device_s": None, "peak_extra_bytes": 2**20}


def competitor(name: str, seconds: list[float], norm: float = 1.0) -> harness.Competitor:
    first = {"loss": 0.5, "grad_norm": norm}
    choices = {8: step(3.0), 4: step(2.0)}
    steps = [step(value) for value in seconds]
    return harness.Competitor(name, ready={"parameters": 2**18}, first=first, choices=choices, steps=steps)


def result(one: harness.Competitor, *others: harness.Competitor) -> dict[str, Any]:
    return harness._result("smoke", one, [one, *others], tokens=100)


def test_a_ratio_is_the_median_over_rounds_and_the_fastest_size_counts() -> None:
    ours, theirs = competitor("slimefsdp", [1.0, 10.0, 2.0]), competitor("trl", [3.0, 20.0, 2.0])
    found = result(theirs, ours)
    assert found["slimefsdp_is_faster_by"] == 2.0  # of 3, 2 and 1; medians alone would say 1.5
    assert found["tokens_per_second"] == pytest.approx(100 / 3, abs=0.05) and found["micro_batch"] == 4
    assert result(ours)["slimefsdp_is_faster_by"] == 1.0 and found["gradient_mib"] == 1.0
    on_gpu = competitor("trl", [])
    on_gpu.steps = [{**step(9.0), "device_s": 0.5}]
    assert result(on_gpu)["tokens_per_second"] == 200


class Answers:
    """Stands for a system's process: takes the seconds that it is told, size by size."""

    def __init__(self, seconds: dict[int, list[float]]) -> None:
        self.seconds = {size: iter(values) for size, values in seconds.items()}
        self.taken: list[tuple[int, bool]] = []

    def answer(self) -> dict[str, Any]:
        return {"parameters": 1, "micro_batches": list(self.seconds)}

    def step(self, micro_batch: int, *, with_memory: bool = False) -> dict[str, Any]:
        self.taken.append((micro_batch, with_memory))
        return step(next(self.seconds[micro_batch]) if with_memory else 99.0)


@pytest.mark.parametrize(
    "seconds, chosen, timed",
    [
        ({8: [3.0, 1.0, 3.0], 4: [2.0, 2.0, 2.0]}, 8, 6),  # the first step was disturbed
        ({8: [9.0, 9.0], 4: [8.0, 9.5]}, 4, 4),  # no third of each: it takes too long
        ({8: [30.0], 4: [20.0]}, 4, 2),
        ({8: [1.0]}, 8, 1),
    ],
)
def test_the_size_of_the_fastest_step_is_chosen(seconds: dict[int, list[float]], chosen: int, timed: int) -> None:
    one, process = harness.Competitor("trl"), Answers(seconds)
    one.warm_up(cast(harness.Process, process))
    assert one.micro_batch == chosen and one.choices[chosen] == step(min(seconds[chosen]))
    untimed = [(size, False) for size in seconds]
    assert process.taken[: len(untimed)] == untimed, "what compiles does so before anything is timed"
    assert len(process.taken) == len(untimed) + timed and all(memory for _, memory in process.taken[len(untimed) :])


HEAD = {
    "cpu": "some", "threads_per_rank": 1, "date": "2026-01-01", "rounds": 1,
    "workloads": {"smoke": {"title": "a", "tokens": 100}},
}  # fmt: skip


def test_losses_that_are_zero_but_for_rounding_agree() -> None:
    ours, theirs = competitor("slimefsdp", [1.0]), competitor("trl", [1.0])
    ours.first, theirs.first = {"loss": 2e-9, "grad_norm": 1.0}, {"loss": -7e-9, "grad_norm": 1.0}
    assert result(theirs, ours)["agrees_with_slimefsdp"]
    theirs.first["loss"] = 1e-4
    assert not result(theirs, ours)["agrees_with_slimefsdp"]


def test_a_system_that_computes_something_else_has_no_ratio() -> None:
    ours, theirs = competitor("slimefsdp", [1.0]), competitor("trl", [9.0], norm=1.01)
    found = result(theirs, ours)
    assert not found["agrees_with_slimefsdp"] and "slimefsdp_is_faster_by" not in found
    record = {**HEAD, "results": [result(ours), found]}
    assert "computes something else" in harness.table(record) and "computes something else" in markdown(record)


def test_the_page_has_the_recorded_table() -> None:
    table = markdown(json.loads(RECORD.read_text()))
    text = (ROOT / "docs/benchmarks.md").read_text()
    assert replaced(text, table) == text
    assert replaced(text, table.replace(" MiB", " GiB")) != text


def test_every_system_is_in_the_record_of_a_workload_and_all_computed_the_same() -> None:
    record = json.loads(RECORD.read_text())
    assert record["workloads"].keys() <= set(DEFAULT_WORKLOADS)
    found = {(one["workload"], one["system"]) for one in record["results"]}
    assert found == {(workload, system) for workload in record["workloads"] for system in harness.DEFAULT_SYSTEMS}
    for one in record["results"]:
        assert one["status"] == "measured" and one["agrees_with_slimefsdp"], one["system"]
        assert len(one["steps"]) == record["rounds"] >= 3


def test_the_step_with_adapters_is_the_recorded_one_and_twice_as_fast_as_with_peft() -> None:
    record = json.loads((ROOT / "benchmarks/results/train_step_lora.json").read_text())
    found = {one["system"]: one for one in record["results"] if one["workload"] == "skewed"}
    assert all(one["status"] == "measured" and one["agrees_with_slimefsdp"] for one in found.values())
    plain, compiled = (found[name]["slimefsdp_is_faster_by"] for name in ("trl_lora", "trl_lora_compiled"))
    page = " ".join((ROOT / "docs/benchmarks.md").read_text().split())
    assert f"{plain:.2f} times as fast as TRL with peft, and {compiled:.2f} times as fast as that" in page
    assert f"took {found['lora']['of_all_weights']:.2f} times as long as one of all weights" in page
    assert min(plain, compiled) >= 2 and f"{plain:.2f} times as fast" in (ROOT / "docs/lora.md").read_text()


def test_a_table_goes_between_its_markers_and_nowhere_else() -> None:
    text = f"before\n{BEGIN}\nold\n{END}\nafter"
    assert replaced(text, "| new |") == f"before\n{BEGIN}\n| new |\n{END}\nafter"
    for broken in ("no markers", f"{BEGIN}\n", f"{END}\n\n{BEGIN}\n", text + text):
        with pytest.raises(SystemExit, match=re.escape(BEGIN)):
            replaced(broken, "| new |")


# ---------------------------------------------------------------------- the command

WRONG = {
    "an unknown system": (["--systems", "slimefsdp,verl"], "--systems", "'verl'"),
    "an unknown workload": (["--workloads", "short"], "--workloads", "'short'"),
    "no rounds": (["--rounds", "0"], "--rounds", "--rounds=0"),
    "no threads": (["--threads", "0"], "--threads", "--threads=0"),
    "a folder that is missing": (["--out", "nowhere/record.json"], "--out", "nowhere/record.json"),
}


# every call in one process, and then a look at what they imported
ALL_WRONG = """
import json, sys
from actors.cli.main import main
for arguments in json.loads(sys.argv[1]):
    try:
        code = main(["bench", *arguments])
    except SystemExit as end:
        code = end.code
    assert code == (0 if arguments == ["--help"] else 2), (arguments, code)
heavy = {"torch", "ray", "transformers"} & set(sys.modules)
assert not heavy, heavy
"""


def test_wrong_arguments_and_help_are_answered_without_torch(tmp_path: Path) -> None:
    calls = [["--help"], *(arguments for arguments, _, _ in WRONG.values())]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", ALL_WRONG, json.dumps(calls)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for _, field, said in WRONG.values():
        assert f"field: {field}" in done.stderr and said in done.stderr


def test_without_a_checkout_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "CHECKOUT", tmp_path)
    assert main(["bench"]) == ConfigError.exit_code
    told = capsys.readouterr().err
    assert "field: bench" in told and str(tmp_path) in told
