"""A run that is killed in the middle of its episodes goes on as if nothing had happened."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from actors.loop import train
from actors.run_dir import settings_text
from slimefsdp.config import load_config
from tests.support.runs import bits, rows_of
from tests.support.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]
STEPS, INTERVAL, BROKEN_IN = 4, 2, 3  # the process dies in step 3, counted from 0: step 2 is on record
TURNS, EPISODES = 3, 8  # of an episode, of a step
WORLD = '''
import os, random, time
from pathlib import Path
from slimefsdp import Environment, StepResult

class Echo(Environment):
    """Says some of the letters back; counts its steps in a file, and stands still at one of them if asked to."""

    def reset(self, record, seed):
        self.turn, self.random = 0, random.Random(seed)
        return f"{record['prompt']} {self.random.randrange(100)}"

    def step(self, response, finished):
        calls = Path(os.environ.get("WORLD_CALLS", Path(__file__).with_name("here.calls")))
        with calls.open("a") as file:
            file.write(".")
        if str(calls.stat().st_size) == os.environ.get("WORLD_STOPS_AT"):
            calls.with_suffix(".stopped").touch()
            time.sleep(600)
        self.turn += 1
        reward = len(set(response)) / 10
        if self.turn == 3:
            return StepResult(reward=reward, done=True)
        return StepResult("".join(self.random.choices("0123456789", k=3)), reward)
'''


def test_a_run_killed_in_the_middle_of_its_episodes_goes_on_to_the_same_records_and_weights(
    cluster: None, make_config: Any, example: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "world.py").write_text(WORLD)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = make_config(
        run={"steps": STEPS, "seed": 5},
        mesh={"dp": 1},
        batch={"samples_per_update": 4, "max_tokens_per_rank": 128},
        optim={"schedule": "cosine", "warmup_updates": 3, "total_updates": 2 * STEPS},
        data={"train": str(example / "train.jsonl")},
        rollout={
            "prompts_per_step": 2, "samples_per_prompt": 4, "max_new_tokens": 6, "engines": 1,
            "environment": "world:Echo",
        },
        checkpoint={"interval_steps": INTERVAL},
    )  # fmt: skip
    (tmp_path / "run.yaml").write_text(settings_text(config))

    def overrides(name: str) -> list[str]:
        return [f"run.dir={tmp_path / name}", f"run.export_dir={tmp_path / name / 'model'}"]

    def start(*more: str, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "actors.cli", "train", str(tmp_path / "run.yaml"), *overrides("killed"), *more]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), **environment}
        return subprocess.Popen(
            command, env=variables, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def model(name: str) -> str:
        return hashlib.sha256((tmp_path / name / "model" / "model.safetensors").read_bytes()).hexdigest()

    # in the second turn of step 3, when some episodes have been answered and others have not
    stops_at = EPISODES * TURNS * BROKEN_IN + EPISODES + 3
    calls = tmp_path / "killed.calls"
    process = start(WORLD_CALLS=str(calls), WORLD_STOPS_AT=str(stops_at))
    try:
        straight = load_config(tmp_path / "run.yaml", overrides("straight"))
        train(straight)
        wait_until(lambda: calls.with_suffix(".stopped").exists() or process.poll() is not None)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    printed = process.communicate()[0]
    assert calls.with_suffix(".stopped").exists(), printed
    expected = [bits(row) for row in rows_of(straight)]
    assert all(row["rollout/turns"] == TURNS for row in rows_of(straight))
    killed = load_config(tmp_path / "run.yaml", overrides("killed"))
    assert [bits(row) for row in rows_of(killed)] == expected[:BROKEN_IN]
    resumed = start("checkpoint.resume=true", WORLD_CALLS=str(calls))
    printed = resumed.communicate(timeout=PATIENCE_S)[0]
    assert resumed.returncode == 0, printed
    assert f"resuming at step {INTERVAL} of {STEPS}" in printed
    assert [bits(row) for row in rows_of(killed)] == expected
    assert model("killed") == model("straight")
    # the step on record was not played again; the one that was broken off was, whole
    assert calls.stat().st_size == stops_at + EPISODES * TURNS
