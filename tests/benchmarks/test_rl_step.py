"""A run's CPU-seconds are those of all its processes, however they end; the record's ratios follow from its rounds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import rl_step
from benchmarks.cpu_seconds import CpuMeter
from benchmarks.peers.rl_task import FILLER, chat, different, last_number, records
from benchmarks.rl_step import SHAPES, Shape, Task, compared, cpu_of_step, curve_figures, shown_command
from slimefsdp.config import load_config
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
BURN = """
import os, signal, subprocess, sys, time
def burn(seconds):
    while time.process_time() < seconds:
        pass
"""
DAEMON = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        burn(1.0)
        time.sleep(1)
    os._exit(0)
os.wait()
"""
SHORT_ONES = """
for _ in range(10):
    subprocess.run([sys.executable, "-S", "-c", "import time\\nwhile time.process_time() < 0.1: pass"])
"""
FORGOTTEN = """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
if os.fork() == 0:
    burn(1.0)
    time.sleep(1)  # so that a sample sees all of it
    os._exit(0)
try:
    os.wait()
except ChildProcessError:
    pass
"""


def measured(program: str) -> tuple[float, float]:
    """CPU-seconds of a program, by the meter and by what its reaper waited for."""
    command = [sys.executable, str(ROOT / "benchmarks/cpu_seconds.py"), sys.executable, "-S", "-c", BURN + program]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with CpuMeter(process.pid, interval_s=0.1) as meter:
        printed, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    return meter.sample(), float(json.loads(printed.splitlines()[-1])["cpu_s"])


@pytest.mark.parametrize("program", [DAEMON, SHORT_ONES], ids=["a daemon of its own session", "short-lived children"])
def test_every_process_counts_though_it_has_left_or_ended(program: str) -> None:
    found, waited_for = measured(program)
    assert 0.9 <= found <= waited_for + 0.05
    assert found >= waited_for - 0.35  # the end of the last process may be behind the last sample


def test_what_the_kernel_forgets_counts_as_it_was_last_seen() -> None:
    found, waited_for = measured(FORGOTTEN)
    assert waited_for < 0.7, "its parent ignored its end"
    assert 0.9 <= found <= 1.6


def test_the_status_of_the_command_is_that_of_its_reaper() -> None:
    reaper = str(ROOT / "benchmarks/cpu_seconds.py")
    command = [sys.executable, reaper, sys.executable, "-S", "-c", "raise SystemExit(3)"]
    assert subprocess.run(command, capture_output=True).returncode == 3


class Linear:
    """A meter of a process that takes two cores."""

    def at(self, moment: float) -> float:
        return 2.0 * moment


def test_the_parts_of_a_step_lie_where_they_were() -> None:
    row = {"time": 100.0, "seconds/step": 10.0, "seconds/generate": 4.0, "seconds/train": 3.0, "seconds/sync": 1.0}
    meter: Any = Linear()
    expected = {"cpu/step": 20.0, "cpu/generate": 8.0, "cpu/train": 6.0, "cpu/sync": 2.0}
    assert cpu_of_step(row, meter) == pytest.approx(expected)


def test_ratios_are_of_the_same_round() -> None:
    def one(cpu: float) -> dict[str, float]:
        return {"cpu/step": cpu, "seconds/step": 2 * cpu}

    found = compared({"slimefsdp": [one(1), one(2), one(4)], "trl": [one(3), one(10), one(4)]}, Shape(64, 20))
    ratios = found["systems"]["slimefsdp"]["times_trl_by_cpu"]
    assert ratios == {"median": 3, "least": 1, "most": 5}
    assert found["systems"]["slimefsdp"]["samples_per_cpu_second"] == 32
    assert "times_trl_by_cpu" not in found["systems"]["trl"]


def test_a_curve_is_told_by_its_mean_and_its_ends() -> None:
    assert curve_figures([0.0, 0.5, 0.5, 1.0]) == {"mean": 0.5, "first_quarter": 0.0, "last_quarter": 1.0}


def characters(messages: list[dict[str, str]]) -> int:
    return len(messages[0]["content"])


def test_prompts_are_as_long_as_they_are_wanted() -> None:
    found = records(20, 0, characters, 200)
    assert all(characters(record["prompt"]) == 200 for record in found)
    shortest = min(characters(record["prompt"]) for record in records(20, 0, characters))
    with pytest.raises(ValueError, match="the problem has"):
        records(20, 0, characters, shortest + len(FILLER) - 1)


@pytest.mark.parametrize(
    ("response", "finished", "reward"), [("4 - 7 = -3", True, 1), ("-3", False, 0), ("3", True, 0), ("none", True, 0)]
)
def test_the_reward_is_for_the_last_number_of_a_response_that_came_to_its_end(
    response: str, finished: bool, reward: float
) -> None:
    assert last_number({"answer": "-3"}, response, finished) == {"reward": reward, "finished": float(finished)}


def test_rewards_of_the_speed_runs_differ() -> None:
    assert len({different({}, str(text), True)["reward"] for text in range(64)}) == 64


def test_slimefsdp_knows_its_settings(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": chat("1 + 1"), "answer": "2"}) + "\n")
    task = Task(tmp_path, tmp_path / "prompts.jsonl", "different", SHAPES["short"], 0, 3)
    for system, settings in rl_step.OURS.items():
        served = ["rollout.engine_python=python"] if system == "slimefsdp_vllm" else []
        command = rl_step.ours(task, tmp_path / "run", [*settings, *served])
        config = load_config(Path(command[4]), command[5:])
        assert (config.rollout.prompts_per_step, config.rollout.samples_per_prompt) == (8, 8)
        assert config.loss.kl_coefficient == 0 and config.rollout.temperature == 1


def test_a_record_names_no_folder_of_the_machine() -> None:
    given = ["speed", "--model", "/a/b", "--trl-python", "/c/python", "--json", "/d/rl.json", "--rounds", "2"]
    shown = shown_command(given)
    assert "/a/" not in shown and "/c/" not in shown and "/d/" not in shown and shown.endswith("--rounds 2")
