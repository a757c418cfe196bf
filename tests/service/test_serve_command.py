"""`slimefsdp serve` as it is started, with the examples as its clients."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.cli.main import main
from slimefsdp.config import config_from_dict
from slimefsdp.config.launch import check_ready_to_serve
from slimefsdp.errors import ConfigError
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]


def tree(model: Path, folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "run": {"dir": str(folder / "run")},
        "model": {"path": str(model)},
        "lora": {"rank": 8, "targets": ["attention", "mlp", "head"]},
        "mesh": {"dp": 1, "device": "cpu"},
        "precision": {"compute_dtype": "float32"},
        "batch": {"max_tokens_per_rank": 256},
        "optim": {"lr": 1e-4, "total_updates": 1},
        "service": {"port": 0},
    }
    for name, values in sections.items():
        settings[name] = {**settings.get(name, {}), **values}
    return settings


UNFIT: dict[str, tuple[dict[str, Any], str, str]] = {
    "no folder": ({"run": {"dir": None}}, "run.dir", "not set"),
    "no adapters": ({"lora": {"rank": None, "targets": ["attention", "mlp"]}}, "lora.rank", "not set"),
    "adapters to begin with": ({"lora": {"rank": None, "path": "adapters"}}, "lora.rank", "not set"),
    "sgd": ({"optim": {"name": "sgd"}}, "optim.name", "no place"),
    "a temperature": ({"rollout": {"temperature": 0.7}}, "rollout.temperature", "no place"),
    "a KL": ({"loss": {"kl_coefficient": 0.1}}, "loss.kl_coefficient", "no place"),
    "no key": ({"service": {"host": "0.0.0.0"}}, "service.api_key_env", "can be reached by others"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_settings_that_say_what_requests_say_are_refused_before_anything_starts(name: str, tmp_path: Path) -> None:
    sections, field, words = UNFIT[name]
    with pytest.raises(ConfigError, match=words) as caught:
        check_ready_to_serve(config_from_dict(tree(tmp_path, tmp_path, **sections)))
    assert caught.value.field == field and caught.value.hint
    open_to_all = {"host": "0.0.0.0", "api_key_env": "KEY"}
    check_ready_to_serve(config_from_dict(tree(tmp_path, tmp_path, service=open_to_all)))


def test_a_key_that_is_named_and_not_set_is_an_error(
    untied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("A_KEY", raising=False)
    file = tmp_path / "service.yaml"
    file.write_text(yaml.safe_dump(tree(untied, tmp_path, service={"api_key_env": "A_KEY"})))
    assert main(["serve", str(file)]) == ConfigError.exit_code
    assert "export A_KEY=tml-.." in capsys.readouterr().err


@pytest.mark.slow  # starts Ray, ranks and an engine, and two clients
def test_it_serves_the_examples_and_ends_when_it_is_told_to_with_its_runs_saved(untied: Path, tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(yaml.safe_dump(tree(untied, tmp_path)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TINKER_TELEMETRY": "0", "TINKER_API_KEY": "tml-local"}
    server = subprocess.Popen(
        [sys.executable, "-m", "actors.cli", "serve", str(file)],
        env=environment, cwd=tmp_path, start_new_session=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        said = server.stdout.readline()
        environment["TINKER_BASE_URL"] = re.findall(r"serving .+ at (http://\S+)", said)[0]
        printed = {}
        for name in ("supervised", "dense_reward"):
            command = [sys.executable, str(ROOT / f"examples/tinker/{name}.py"), str(untied)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S * 4)
            assert done.returncode == 0, done.stdout + done.stderr
            printed[name] = done.stdout
        losses = [float(found) for found in re.findall(r": (\S+) nats", printed["supervised"])]
        assert losses[-1] < losses[0] / 2 and "saved as tinker://" in printed["supervised"]
        rewards = [float(found) for found in re.findall(r"reward (\S+),", printed["dense_reward"])]
        assert rewards[-1] >= 0.95 > 0.7 > rewards[0]
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S * 2) == 0
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
    assert list((tmp_path / "run/adapters").glob("*.train.*/checkpoints/named/supervised"))
