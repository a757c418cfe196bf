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
