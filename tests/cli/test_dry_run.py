"""What is known before a start: the version, whether settings would be taken, and what would be started."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml

from actors.cli import main as cli
from actors.cluster import connect
from actors.rollout import prompt_files
from actors.rollout.prompt_files import read_prompts
from actors.rollout.prompts import PromptStream
from slimefsdp.checkpoint.store import CheckpointStore
from slimefsdp.config import load_config
from slimefsdp.errors import CheckpointError, ModelError
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.training.identity import BASE_WEIGHTS, identity_of
from tests.support.runs import startable
from tests.support.vllm_server import ProtocolServer


@pytest.fixture
def config(example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A YAML file with which `train` would start; whatever connects to Ray fails."""

    def refused(*_: Any) -> NoReturn:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(connect, "connect", refused)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(startable(example, tmp_path)))
    return tmp_path / "c.yaml"


def everything(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("overrides", "numbers"),
    [
        ([], ["2 steps", "32 prompts x 8 responses of at most 256 tokens", "256 samples"]),
        (["mesh.dp=2", "mesh.cp=2", "rollout.engines=2"], ["4 = dp_replicate 1 x dp 2 x cp 2", "2 more process"]),
        pytest.param(
            ["mesh.dp=2", "rollout.placement=colocated", "batch.samples_per_update=96", "lora.rank=4"],
            ["1 embedded in the places of ranks", "(96 each, the last of an epoch 64)", "in adapters of rank 4"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_dry_run_says_what_would_be_started_and_writes_and_starts_nothing(
    config: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], numbers: list[str]
) -> None:
    before = everything(config.parent)
    assert cli.main(["train", str(config), "--dry-run", *overrides]) == 0
    said = capsys.readouterr().out
    assert [number for number in numbers if number not in said] == [], said
    assert everything(config.parent) == before


def test_a_cluster_that_is_there_is_looked_at(config: Path, cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    import ray

    address = f"cluster.address={ray.get_runtime_context().gcs_address}"
    assert cli.main(["train", str(config), "--dry-run", address]) == 0
    said = capsys.readouterr().out
    assert "would start" in said and f"{int(ray.cluster_resources()['CPU'])} CPUs" in said


def test_train_its_dry_run_and_check_list_the_same_problems_and_write_nothing(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, check = ["train", str(config)], ["check", str(config)]
    wrong = ["model.path=nowhere", "data.train=nowhere.jsonl", "rollout.reward=no_module:f", "mesh.dp=100000"]
    before = everything(config.parent)
    answers = set()
    for words in (train, [*train, "--dry-run"], check, [*check, "--json"]):
        assert cli.main([*words, *wrong]) == ModelError.exit_code
        said = capsys.readouterr()
        assert said.out == ""
        answers.add(tuple(line for line in said.err.splitlines() if not line.startswith("[")))
    (lines,) = answers
    assert lines[0].startswith("error [model]") and "  field: model.path" in lines
    others = [line for line in lines if line.startswith("  also:")]
    assert len(others) == 3
    for field, line in zip(("data.train", "rollout.reward", "mesh.dp"), others, strict=True):
        assert field in line
    for words in ([*train, "--dry-run"], check, [*check, "--json"]):
        assert cli.main([*words, "optim.warmup_updates=8"]) == 0, words
        said = capsys.readouterr().err
        assert "optim.warmup_updates" in said and "after 2 of 8" in said and "25% of optim.lr" in said
    assert everything(config.parent) == before


@pytest.mark.slow
def test_servers_of_engines_are_looked_for_before_anything_starts(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def found(*overrides: str) -> tuple[int, str]:
        status = cli.main(["train", str(config), "--dry-run", "rollout.engine=vllm", *overrides])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    status, said = found(f"rollout.engine_python={sys.executable}")
    assert status == 2 and "rollout.engine_python" in said and "has no vllm" in said
    status, said = found("rollout.engine_python=/bin/ls")
    assert status == 2 and "rollout.engine_python" in said and "is no Python" in said
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    status, said = found(f"rollout.engine_urls=[{url}]")
    assert status == 2 and "rollout.engine_urls" in said and url in said
    status, said = found(f"rollout.engine_urls=[{url}]", "cluster.address=127.0.0.1:1")
    assert status == 6 and url not in said, "the cluster's nodes alone can tell, and no cluster answers"
    server = ProtocolServer(320, "qwen3", None)
    try:
        status, said = found(f"rollout.engine_urls=[{server.url}]")
    finally:
        server.close()
    assert status == 0 and f"1 vllm at {server.url}" in said
    (tmp_path / "vllm").mkdir()
    has_one = tmp_path / "python"  # an interpreter that finds a package of that name
    has_one.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    has_one.chmod(0o755)
    status, said = found(f"rollout.engine_python={has_one}")
    assert status == 0 and f"1 vllm by {has_one}" in said


@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_records_that_are_here_are_read_in_the_form_of_the_algorithm_while_others_are_awaited(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], algorithm: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = {name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    asked = [{"role": "user", "content": "sort 31"}]
    records = {"sft": {"messages": asked + said["chosen"]}, "dpo": {name: asked + said[name] for name in said}}
    (tmp_path / "train.jsonl").write_text(json.dumps(records[algorithm]) + "\n")
    tree = startable(example, tmp_path) | {"algorithm": algorithm, "batch": {"samples_per_update": 2}}
    del tree["rollout"]
    tree["data"] = {"train": str(tmp_path / "train.jsonl"), "heldout": "nobody/has-this"}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    assert cli.main(["check", str(tmp_path / "c.yaml")]) == 0, capsys.readouterr().err
    assert "data.heldout=nobody/has-this" in capsys.readouterr().out


def test_a_resume_that_ranks_would_refuse_is_refused_before_anything_starts(
    config: Path,
    example: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # counting tokens takes seconds in each call, and says nothing about the checkpoint
    monkeypatch.setattr(prompt_files, "prompt_lengths", lambda _, records, **__: [8] * len(records))
    saved = load_config(config, ["lora.rank=8"])
    identity = identity_of(saved, "actor", read_model_folder(saved.model.path))
    prompts = PromptStream(read_prompts(saved).train, saved.run.seed).state()
    info: dict[str, Any] = {
        "identity": identity | {BASE_WEIGHTS["actor"]: "a folder of weights 12ab"}, "mesh": {}, "config": {},
        "loop_state": {"step": 1, "prompts": prompts}, "reference_follows": False, "updates_taken": 8,
        "skipped_in_a_row": 0, "kl_coefficient": 0.0,
    }  # fmt: skip
    store = CheckpointStore.of_run(tmp_path / "run")
    store.begin(1)
    store.commit(1, info, [])
    others = tmp_path / "others.jsonl"
    others.write_text("".join(f"{line}\n" for line in (example / "train.jsonl").read_text().splitlines()[:3]))
    train = ["train", str(config), "--dry-run", "checkpoint.resume=true"]
    assert cli.main([*train, "lora.rank=8"]) == 0
    assert "resumes from step 1 of 2" in capsys.readouterr().out
    check = ["check", str(config), "checkpoint.resume=true"]
    for words, field, values in (
        ([*train, "lora.rank=4"], "lora.rank", ["lora.rank=8", "is 8", "4 in this run"]),
        (check, "lora.rank", ["lora.rank=8"]),
        ([*train, "lora.rank=8", f"data.train={others}"], "data.train", ["data.allow_changed=true", "this run has 3"]),
    ):
        assert cli.main(words) == CheckpointError.exit_code
        said = capsys.readouterr().err
        assert f"field: {field}\n" in said and all(value in said for value in values), said
