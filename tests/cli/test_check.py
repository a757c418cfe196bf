"""`slimefsdp check` says what is there, what can be chosen and what settings choose, and fails where nothing runs."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from actors.cli import check
from actors.cli.check import REGISTRY
from actors.cli.main import main
from actors.rollout.rewards import exact_match
from slimefsdp.algorithms import registry
from slimefsdp.config import RunConfig
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
# what the console script does, and then a look at what that has imported
WATCHED = """
import sys
from actors.cli.main import main
from actors.cluster.capacity import RANKS_PER_CORE
code = main(sys.argv[1:])
heavy = {"ray", "transformers"} & set(sys.modules)
sys.exit(f"imported {sorted(heavy)}" if heavy else code)
"""


@pytest.fixture
def config(example: Path, tmp_path: Path) -> Path:
    tree = {
        "model": {"path": str(example / "model")},
        "optim": {"total_updates": 10},
        "mesh": {"device": "cpu"},
        "advantage": {"estimator": "rloo"},
        "rollout": {"reward": "actors.rollout.rewards:exact_match", "filter": f"{__name__}:keep_all"},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "c.yaml"


def keep_all(record: dict[str, Any], samples: Any) -> bool:
    return True


def checked(capsys: pytest.CaptureFixture[str], *arguments: Any, status: int = 0) -> tuple[str, str]:
    """Standard output and standard error of `slimefsdp check`."""
    assert main(["check", *map(str, arguments)]) == status
    found = capsys.readouterr()
    return found.out, found.err


def test_it_says_what_is_installed_without_importing_ray_or_transformers() -> None:
    command = [sys.executable, "-c", WATCHED, "check", "--json"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["environment"]
    installed = {one["name"]: one["version"] for one in found["packages"]}
    for name in ("torch", "transformers", "ray", "pydantic"):
        assert installed[name] == importlib.metadata.version(name)
    assert installed["python"] == ".".join(map(str, sys.version_info[:3]))
    for name in ("flash-attn", "ring-flash-attn"):
        there = {str(one.name).lower().replace("_", "-") for one in importlib.metadata.distributions()}
        assert (installed[name] is not None) == (name in there)
    assert found["problems"] == [] and found["has_loopback"] and "gloo" in found["backends"]
    assert found["cpu_cores"] == os.cpu_count() and len(found["gpus"]) == torch.cuda.device_count()


def test_every_table_of_functions_is_listed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    tables = [table for name, table in vars(registry).items() if name.isupper() and isinstance(table, dict)]
    assert len(tables) >= 5 and all(table in REGISTRY.values() for table in tables)
    text, _ = checked(capsys)
    lines = [line.split() for line in text.splitlines()]
    for setting, functions in REGISTRY.items():
        section, _, name = setting.partition(".")
        assert name in RunConfig.model_fields[section].annotation.model_fields  # type: ignore[union-attr]
        for function, meaning in functions.items():
            assert [function, *meaning.split()] in lines
    assert "*" not in text, "without settings nothing is chosen"


def test_as_json_it_says_what_settings_choose(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["loss.kl_coefficient=0.1", "loss.kl_estimator=k2", "correction.method=tis", "correction.high=2"]
    found = json.loads(checked(capsys, config, "--json", *overrides)[0])
    assert found["registry"] == REGISTRY
    chosen = {setting: next(iter(functions)) for setting, functions in found["chosen"].items()}
    assert chosen == {
        "advantage.estimator": "rloo",
        "loss.policy": "ppo",
        "loss.reduction": "token_mean",
        "loss.kl_estimator": "k2",
        "correction.method": "tis",
        "rollout.filter": f"{__name__}:keep_all",
        "rollout.reward": "actors.rollout.rewards:exact_match",
    }
    first_line = str(exact_match.__doc__).splitlines()[0]
    assert found["chosen"]["rollout.reward"]["actors.rollout.rewards:exact_match"] == first_line


def test_settings_of_a_users_own_loop_are_fine_though_train_would_refuse_them(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *_, verdict = checked(capsys, config)[0].splitlines()
    assert verdict.startswith("these settings are fine for a loop of your own; `slimefsdp train` would refuse them: ")
    assert "run.dir" in verdict
    found = json.loads(checked(capsys, config, "--json")[0])
    assert found["train"] in verdict and found["data"] == []


def test_sft_chooses_no_policy_loss_and_a_function_without_a_source_is_named_as_it_is(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = yaml.safe_load(config.read_text())
    for name in ("advantage", "rollout"):
        del tree[name]
    config.write_text(yaml.safe_dump({**tree, "algorithm": "sft"}))
    assert list(json.loads(checked(capsys, config, "--json")[0])["chosen"]) == ["loss.reduction"]
    config.write_text(yaml.safe_dump({**tree, "rollout": {"filter": f"{__name__}:KEEPER"}}))
    chosen = json.loads(checked(capsys, config, "--json")[0])["chosen"]["rollout.filter"]
    assert chosen == {f"{__name__}:KEEPER": repr(KEEPER)}


class Keeper:
    def __call__(self, record: dict[str, Any], samples: Any) -> bool:
        return True

    def __repr__(self) -> str:
        return "a keeper"


KEEPER = Keeper()


def test_gpus_are_listed_with_their_memory_and_what_can_run_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "_torchs_devices", lambda: ([("H200", 140 * 10**9)] * 2, ["nccl"]))
    lines = dict(line.split("  ", 1) for line in checked(capsys)[0].splitlines() if "  " in line)
    assert lines["devices"].strip().endswith("H200, 140.0 GB; H200, 140.0 GB")
    assert lines["can run"].strip() == "on CUDA 2 ranks and engines in all, each with its own GPU"


def test_a_machine_without_loopback_and_without_some_package_is_described(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(*_: Any, **__: Any) -> Any:
        raise OSError("no route to host")

    monkeypatch.setattr(check.socket, "create_connection", unreachable)
    text, error = checked(capsys, status=6)
    assert "NOT reachable" in text and "127.0.0.1" in error
    monkeypatch.undo()
    requirements = ["numpy>=1.0", 'wandb>=999; extra == "wandb"', 'datasets; extra == "data"', 'x>=1; extra == "other"']
    monkeypatch.setattr(check, "_requirements", lambda: (">=3", [*requirements, "no-such-package"]))
    text, error = checked(capsys, status=6)
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line]
    assert ["no-such-package", "MISSING,  is needed"] in lines and "no-such-package" in error
    (optional,) = [words[1] for words in lines if words[0] == "optional"]
    assert optional.startswith("wandb ") and optional.count(";") == 1 and "x>=1" not in text


@pytest.mark.parametrize(("version", "is_within"), [("2.11.0a0+nv25.10", True), ("3.0", False), ("of a fork", False)])
def test_builds_of_vendors_count_as_their_release_and_other_words_as_none(
    version: str, is_within: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "_requirements", lambda: (">=3", ["torch>=2.11,<3"]))
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    (torch_package,) = [one for one in check.look_around().packages if one.name == "torch"]
    assert torch_package.is_supported is is_within and torch_package.version == version


def test_outside_of_a_checkout_the_installed_distribution_says_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = check.look_around().packages
    monkeypatch.setattr(check, "__file__", str(tmp_path / "site-packages" / "actors" / "cli" / "check.py"))
    assert {one.name for one in check.look_around().packages} == {one.name for one in here}


def broken_torch() -> Any:
    raise OSError("libcudart.so.99: cannot open shared object file")


@pytest.mark.parametrize(
    ("name", "stand_in", "said"),
    [
        ("_torchs_devices", broken_torch, "torch cannot be used: OSError: libcudart.so.99"),
        ("_torchs_devices", lambda: ([], []), "neither gloo nor nccl"),
        ("_can_connect_to_itself", lambda: False, "127.0.0.1"),
        ("_requirements", lambda: (">=4", ["numpy>=1"]), "python"),
        ("_requirements", lambda: (">=3", ["no-such-package>=2.1,<3"]), "no no-such-package is installed"),
        ("_requirements", lambda: (">=3", ["numpy>=1,<1.1"]), "numpy<1.1,>=1 is needed"),
    ],
)
def test_where_nothing_runs_all_is_printed_and_the_status_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, stand_in: Any, said: str
) -> None:
    monkeypatch.setattr(check, name, stand_in)
    for arguments in ([], ["--json"]):
        printed, error = checked(capsys, *arguments, status=6)
        assert said in error and "grpo" in printed
    assert len(json.loads(printed)["environment"]["problems"]) == 1
