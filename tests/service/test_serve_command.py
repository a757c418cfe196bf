"""`slimefsdp serve` as it is started, with the examples as its clients."""

from __future__ import annotations

import fcntl
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import yaml
from tinker import types

from actors.cli.main import main
from slimefsdp.config import config_from_dict
from slimefsdp.config.launch import check_ready_to_serve
from slimefsdp.errors import CheckpointError, ConfigError, ModelError, ResourceError
from slimefsdp.io.files import LOCK
from tests.support.service import Server, datum, log_probs_of, service_tree, tokens_of
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]


VLLM = {"engine": "vllm", "engine_python": "python"}
UNFIT: dict[str, tuple[dict[str, Any], str, str]] = {
    "no folder": ({"run": {"dir": None}}, "run.dir", "not set"),
    "adapters to begin with": ({"lora": {"rank": None, "path": "adapters"}}, "lora.path", "cannot begin from"),
    "sgd": ({"optim": {"name": "sgd"}}, "optim.name", "cannot be chosen"),
    "a temperature": ({"rollout": {"temperature": 0.7}}, "rollout.temperature", "cannot be chosen"),
    "a KL": ({"loss": {"kl_coefficient": 0.1}}, "loss.kl_coefficient", "cannot be chosen"),
    "sglang": ({"rollout": {"engine": "sglang", "engine_python": "p"}}, "rollout.engine", "does not sample"),
    "all weights by vllm": (
        {"rollout": VLLM, "lora": {"rank": None, "targets": ["attention", "mlp"]}},
        "rollout.engine",
        "lora.rank is null",
    ),
    "a rank that vllm has not": ({"rollout": VLLM, "lora": {"rank": 513}}, "lora.rank", "of rank 512 at most"),
    "experts by vllm": ({"rollout": VLLM, "lora": {"targets": ["experts"]}}, "lora.targets", "no adapters of experts"),
    "random weights by vllm": (
        {"rollout": VLLM, "model": {"init": "random"}},
        "model.init",
        "reads the model's folder",
    ),
    "two servers": ({"rollout": {**VLLM, "engines": 2}}, "rollout.engines", "samples with one"),
    "turns": ({"rollout": {**VLLM, "placement": "colocated"}}, "rollout.placement", "at the same time"),
    "no key": ({"service": {"address": "0.0.0.0:8000"}}, "service.api_key_env", "can be reached by others"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_settings_that_say_what_requests_say_are_refused_before_anything_starts(name: str, tmp_path: Path) -> None:
    sections, field, words = UNFIT[name]
    with pytest.raises(ConfigError, match=words) as caught:
        check_ready_to_serve(config_from_dict(service_tree(tmp_path, tmp_path, **sections)))
    assert caught.value.field == field and caught.value.hint
    open_to_all = {"address": "0.0.0.0:8000", "api_key_env": "KEY"}
    check_ready_to_serve(config_from_dict(service_tree(tmp_path, tmp_path, service=open_to_all, rollout=VLLM)))


def test_a_second_server_in_the_same_folder_is_refused_before_it_starts_anything(
    untied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, run_dir = tmp_path / "service.yaml", tmp_path / "run"
    file.write_text(yaml.safe_dump(service_tree(untied, tmp_path)))
    run_dir.mkdir()
    with (run_dir / LOCK).open("w") as first:  # as the first server holds it
        fcntl.flock(first, fcntl.LOCK_EX)
        first.write('{"pid": 4711, "host": "its-host"}')
        first.flush()
        assert main(["serve", str(file)]) == CheckpointError.exit_code
    said = capsys.readouterr().err
    assert all(word in said for word in (str(run_dir), "4711", "its-host", "choose another run.dir"))
    assert [one.name for one in run_dir.iterdir()] == [LOCK]


def test_a_port_in_use_is_found_before_anything_starts(
    untied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(yaml.safe_dump(service_tree(untied, tmp_path)))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(file), f"service.address=127.0.0.1:{port}"]) == ResourceError.exit_code
    assert f"127.0.0.1:{port}" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_a_model_without_a_tokenizer_is_refused_before_anything_starts(
    untied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(untied, model, ignore=shutil.ignore_patterns("tokenizer*"))
    (tmp_path / "service.yaml").write_text(yaml.safe_dump(service_tree(model, tmp_path)))
    assert main(["serve", str(tmp_path / "service.yaml")]) == ModelError.exit_code
    said = capsys.readouterr().err
    assert f"{model} has no tokenizer" in said and "field: model.path" in said and not (tmp_path / "run").exists()


def test_a_server_of_all_weights_needs_room_for_one_more_model(
    untied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "service.yaml"
    tree = service_tree(untied, tmp_path, service={"max_version_bytes": 100_000})
    file.write_text(yaml.safe_dump(tree | {"lora": {"rank": 8}}))
    assert main(["serve", str(file), "lora.rank=null"]) == ConfigError.exit_code
    assert "service.max_version_bytes=100000 holds no version" in capsys.readouterr().err


@pytest.mark.slow  # starts Ray, ranks and an engine twice, and two clients
def test_it_serves_the_examples_and_a_second_start_goes_on_with_what_the_first_one_had(
    untied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    file = tmp_path / "service.yaml"
    file.write_text(yaml.safe_dump(service_tree(untied, tmp_path)))
    server = Server(file)
    try:
        monkeypatch.setenv("TINKER_BASE_URL", server.url)
        printed = {}
        for name in ("supervised", "dense_reward"):
            command = [sys.executable, str(ROOT / f"examples/tinker/{name}.py"), str(untied)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
            assert done.returncode == 0, done.stdout + done.stderr
            printed[name] = done.stdout
        losses = [float(found) for found in re.findall(r": (\S+) nats", printed["supervised"])]
        assert losses[-1] < losses[0] / 2 and "saved as tinker://" in printed["supervised"]
        assert "the trained model '23578'" in printed["supervised"]
        rewards = [float(found) for found in re.findall(r"reward (\S+),", printed["dense_reward"])]
        assert rewards[-1] >= 0.95 > 0.7 > rewards[0]

        training = tinker.ServiceClient().create_lora_training_client(base_model=str(untied), rank=4).result()
        data = [datum(tokens_of(0))]
        adam = types.AdamParams(learning_rate=1e-2, eps=1e-8)
        training.forward_backward(data, "cross_entropy")
        training.optim_step(adam).result()
        before = log_probs_of(training.forward(data, "cross_entropy").result())[0]
        assert server.end() == 0
        server = Server(file, f"service.address={server.url.rpartition('/')[2]}")
        after = log_probs_of(training.forward(data, "cross_entropy").result())[0]
        assert np.array_equal(before, after)
        training.forward_backward(data, "cross_entropy")
        assert training.optim_step(adam).result().metrics["grad_norm"] > 0
        assert server.end() == 0
    finally:
        server.kill()
    assert list((tmp_path / "run/adapters").glob("*.train.*/checkpoints/named/supervised"))


@pytest.mark.slow  # starts Ray, ranks and an engine three times
def test_a_killed_server_goes_on_from_checkpoints_bit_for_bit_and_says_what_was_lost(
    untied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    file = tmp_path / "service.yaml"
    file.write_text(yaml.safe_dump(service_tree(untied, tmp_path, checkpoint={"interval_steps": 2})))
    adam = types.AdamParams(learning_rate=1e-2, eps=1e-8)

    def train(one: tinker.TrainingClient, *updates: int) -> np.ndarray:
        for update in updates:
            one.forward_backward([datum(tokens_of(update))], "cross_entropy")
            one.optim_step(adam).result()
        return log_probs_of(one.forward([datum(tokens_of(99))], "cross_entropy").result())[0]

    servers = [Server(file)]

    def kill_and_start() -> None:
        os.kill(servers[-1].process.pid, signal.SIGKILL)  # it alone: what it had started is left to see to itself
        servers[-1].process.wait(PATIENCE_S)
        servers.append(Server(file, f"service.address={servers[-1].url.rpartition('/')[2]}"))

    try:
        service = tinker.ServiceClient(base_url=servers[0].url, api_key="tml-local")
        made = {"base_model": str(untied), "rank": 4, "seed": 1}
        undisturbed = train(service.create_lora_training_client(**made).result(), 1, 2, 3, 4, 5)
        training = service.create_lora_training_client(**made).result()
        for update in (1, 2):
            training.forward_backward([datum(tokens_of(update))], "cross_entropy").result()
            training.optim_step(adam).result()
        kill_and_start()  # at a checkpoint: the client need not know
        assert np.array_equal(train(training, 3, 4, 5), undisturbed)
        kill_and_start()  # an update and a forward behind one
        sent = [training.forward_backward([datum(tokens_of(6))], "cross_entropy"), training.optim_step(adam)]
        for one in sent:
            with pytest.raises(tinker.RequestFailedError, match=r"after update 4.+load tinker://"):
                one.result()
        rest = tinker.RestClient(base_url=servers[0].url, api_key="tml-local")
        saved = [one.tinker_path for one in rest.list_checkpoints(training.model_id).result().checkpoints]
        path = f"tinker://{training.model_id}/weights/update-4-request-8"
        assert path in saved
        training.load_state_with_optimizer(path).result()
        assert np.array_equal(train(training, 5), undisturbed)
        again = service.create_training_client_from_state_with_optimizer(path).result()
        assert np.array_equal(train(again, 5), undisturbed)
        assert servers[-1].end() == 0
    finally:
        for server in servers:
            with suppress(ProcessLookupError):
                os.killpg(server.process.pid, signal.SIGKILL)


@pytest.mark.parametrize("name", ["supervised", "dense_reward"])
def test_an_example_without_a_server_ends_in_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = str(ROOT / f"examples/tinker/{name}.py")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    monkeypatch.setenv("TINKER_BASE_URL", url)
    monkeypatch.setattr(sys, "argv", [script, "a/model"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(script, run_name="__main__")
    assert isinstance(end.value.code, str) and url in end.value.code and "\n" not in end.value.code
