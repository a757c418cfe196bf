"""The Dockerfile and the compose files: versions that fit together, the packages of the system, the commands they run.

No Docker is needed. tests/fixtures/image.json is what pip resolved on the package index for each line of the
Dockerfile; as long as every version in it still meets what the line, pyproject.toml and constraints.txt ask for, pip
finds a solution. Where a test says that the record does not fit: python scripts/try_image.py resolve
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from actors.cli.main import app
from scripts.try_image import PipLine, chain, pip_lines, steps

ROOT = Path(__file__).resolve().parents[1]
RECORD = json.loads((ROOT / "tests/fixtures/image.json").read_text())


def versions(text: str) -> dict[str, str]:
    """Version by name, of words or lines name==version."""
    return {canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)}


PINNED = versions((ROOT / "constraints.txt").read_text())


def unmet(line: PipLine, found: dict[str, str]) -> list[str]:
    """What a line asks for and the versions that pip would install do not meet."""
    asked = [Requirement(one) for one in line.requirements()]
    missing = [str(one) for one in asked if not one.specifier.contains(found.get(canonicalize_name(one.name), "0"))]
    pinned = {name: PINNED[name] for name in found.keys() & PINNED.keys()} if line.is_constrained else {}
    return [*missing, *(f"{name}=={version}" for name, version in pinned.items() if found[name] != version)]


@pytest.mark.parametrize("place", range(len(pip_lines())))
def test_every_line_of_pip_in_the_dockerfile_has_versions_that_fit_together(place: int) -> None:
    line, recorded = pip_lines()[place], RECORD[place]
    assert (line.stage, line.pip, list(line.wanted)) == (recorded["stage"], recorded["pip"], recorded["wanted"])
    found = versions(recorded["installs"].replace(" ", "\n"))
    assert found and unmet(line, found) == []


def test_the_trainer_has_the_pinned_torch_and_the_packages_of_its_extras() -> None:
    of_trainer = [one["installs"] for one in RECORD if one["stage"] == "base"]
    found = versions(" ".join(of_trainer).replace(" ", "\n"))
    assert found["torch"] == PINNED["torch"]
    assert {"datasets", "wandb", "starlette", "uvicorn"} <= found.keys()
    missing = {name for text in of_trainer for name in versions(text.replace(" ", "\n"))} - PINNED.keys()
    # what torch's build for GPUs brings has versions that torch itself asks for
    assert all(re.match(r"nvidia-|cuda-|triton", name) for name in missing)


@pytest.mark.parametrize("target", ["trainer", "vllm", "kernels"])
def test_every_target_runs_as_a_user_without_rights_and_compiles_nothing_but_where_it_is_asked_for(target: str) -> None:
    words = [step.word for step in chain(target)]
    assert [step.rest for step in chain(target) if step.word == "USER"] == ["10001"]
    runs = [step.rest for step in chain(target)[words.index("USER") :] if step.word == "RUN"]
    assert not any("apt-get" in run or "useradd" in run for run in runs)
    assert any("wheels" in step.options.get("mount", "") for step in chain(target)) is (target == "kernels")
    assert list(steps())[-1].stage == "trainer", "docker build without --target makes the trainer"


def services() -> list[tuple[str, dict[str, Any]]]:
    files = [yaml.safe_load((ROOT / name).read_text()) for name in ("compose.yaml", "compose.cluster.yaml")]
    return [pair for file in files for pair in file["services"].items()]


@pytest.mark.parametrize(("name", "service"), services(), ids=[name for name, _ in services()])
def test_every_service_runs_what_is_in_the_image(name: str, service: dict[str, Any]) -> None:
    default = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", json.dumps(service))
    filled = json.loads(default)
    assert filled["build"]["target"] in {step.stage for step in steps()}
    assert service["image"].endswith(service["build"]["target"]), "images of two targets have two names"
    assert filled["user"] in [step.rest for step in chain(filled["build"]["target"]) if step.word == "USER"]
    program, *arguments = filled["entrypoint"] + filled["command"]
    if program == "slimefsdp":
        assert arguments[0] in typer.main.get_command(app).commands and (ROOT / arguments[1]).is_file()
    else:
        assert (program, arguments[1]) == ("bash", name) and (ROOT / arguments[0]).is_file()
    homes = {volume.partition(":")[2].rpartition("/")[0] for volume in filled["volumes"]}
    assert homes == {next(step.rest for step in chain("trainer") if step.word == "WORKDIR")}
