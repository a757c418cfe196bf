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
from actors.cli import ray_session
from slimefsdp.errors import ModelError
from tests.support.runs import startable
from tests.support.vllm_server import ProtocolServer


@pytest.fixture
def config(example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A YAML file with which `train` would start; whatever connects to Ray fails."""

    def refused(*_: Any) -> NoReturn:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(ray_session, "connect", refused)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(startable(example, tmp_path)))
    return tmp_path / "c.yaml"


def everything(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("overrides", "numbers"),
    [
        ([], ["2 steps", "32 prompts x 8 responses of at most 256 tokens", "256 samples"]),
        (["mesh.dp=2", "mesh.cp=2", "rollout.engines=2"], ["4 = dp_replicate 1 x dp 2 x cp 2", "2 more process"]),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (["mesh.dp=auto"], ["dp_replicate 1 x dp "]),
                (["mesh.dp=2", "rollout.placement=colocated"], ["1 embedded in the places of ranks"]),
                (["batch.samples_per_update=96"], ["3 a step of 256 samples (96 each, the last of an epoch 64)"]),
                (["lora.rank=4"], ["in adapters of rank 4, which alone are trained", "by an estimate"]),
                (["checkpoint.interval_steps=1", "rollout.prompts_per_step=3"], ["every 1 step", "24 samples"]),
            )
        ),
    ],
)
def test_a_dry_run_says_what_would_be_started_and_writes_and_starts_nothing(
    config: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], numbers: list[str]
) -> None:
    before = everything(config.parent)
    assert cli.main(["train", str(config), "--dry-run", "cluster.max_ranks_per_core=8", *overrides]) == 0
    said = capsys.readouterr().out
    assert [number for number in numbers if number not in said] == [], said
    assert everything(config.parent) == before


def test_a_cluster_that_is_not_there_is_no_start(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:  # bound, and nobody listens
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        assert cli.main(["train", str(config), "--dry-run", f"cluster.address={address}"]) == 6
    said = capsys.readouterr()
    assert "would start" not in said.out and address in said.err and "cluster.address" in said.err


def test_a_cluster_that_is_there_is_looked_at(config: Path, cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    import ray

    address = f"cluster.address={ray.get_runtime_context().gcs_address}"
    assert cli.main(["train", str(config), "--dry-run", address]) == 0
    said = capsys.readouterr().out
    assert "would start" in said and f"{int(ray.cluster_resources()['CPU'])} CPUs" in said


@pytest.mark.slow
def test_held_out_sets_are_listed_and_prompts_that_they_share_are_told(
    config: Path, example: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = (example / "heldout.jsonl").read_text().splitlines()
    seen = (example / "train.jsonl").read_text().splitlines()[:3]
    (tmp_path / "plain.jsonl").write_text("\n".join(lines[:9]))
    (tmp_path / "mixed.jsonl").write_text("\n".join([*lines[:2], *seen, *lines[20:22]]))
    sets = [f"data.heldout.{name}={tmp_path / f'{name}.jsonl'}" for name in ("plain", "mixed")]
    sets.append("evaluation.interval_steps=1")
    told = [
        f"data.heldout.mixed: 3 of 7 prompts are in data.train too, the first at {tmp_path / 'mixed.jsonl'}:3",
        f"data.heldout.mixed: 2 of 7 prompts are in data.heldout.plain too, the first at {tmp_path / 'mixed.jsonl'}:1",
    ]
    for words, listed in (
        (["train", str(config), "--dry-run"], ["data ", "held out plain", "held out mixed"]),
        (["check", str(config)], ["data.train ", "data.heldout.plain", "data.heldout.mixed"]),
    ):
        assert cli.main([*words, *sets]) == 0
        said = capsys.readouterr()
        assert [line for line in said.err.splitlines() if line.startswith("data.")] == told
        rows = {name: line for line in said.out.splitlines() for name in listed if line.startswith(name)}
        assert list(rows) == listed, said.out
        assert "9 records" in rows[listed[1]] and str(tmp_path / "plain.jsonl") in rows[listed[1]]
        assert "7 records" in rows[listed[2]] and "3 of them in data.train" in rows[listed[2]]
    assert cli.main(["check", str(config), "--json", *sets]) == 0
    data = json.loads(capsys.readouterr().out)["data"]
    assert [(one["field"], one["prompts"], [other["prompts"] for other in one["shared"]]) for one in data[1:]] == [
        ("data.heldout.plain", 9, []), ("data.heldout.mixed", 7, [3, 2]),
    ]  # fmt: skip


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
        assert cli.main(words) == 0, words
    assert everything(config.parent) == before


@pytest.mark.slow
def test_an_earlier_run_is_named_after_all_else_that_is_wrong(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train, check = ["train", str(config)], ["check", str(config)]
    (config.parent / "run").mkdir()
    (config.parent / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    for words in (train, [*train, "--dry-run"], check, [*check, "--json"]):
        assert cli.main(words) == 2, words
    capsys.readouterr()
    (config.parent / "model").mkdir()
    (config.parent / "model" / "config.json").write_text("{}")
    taken = f"run.export_dir={config.parent / 'model'}"
    for words in (train, check):
        assert cli.main([*words, taken]) == 2, words
        said = capsys.readouterr().err
        assert "holds an earlier run, and run.export_dir=" in said and "run.export_dir=null" in said, words
    assert cli.main([*check, taken, "data.max_prompt_tokens=1"]) == 2
    assert "data.max_prompt_tokens" in capsys.readouterr().err, "what else is wrong comes first, but in `train`"
    with pytest.raises(AssertionError, match="Ray was started"):
        cli.main([*train, f"run.dir={config.parent / 'other'}"])


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
