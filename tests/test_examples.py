"""The example runs, and what README and docs say is so: names, links, commands, signatures and figures."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from slimefsdp import errors
from slimefsdp.config import load_config
from slimefsdp.models.hf_folder import SUPPORTED_MODELS
from slimefsdp.results import TAGS
from slimefsdp.rpc import CALLS
from slimefsdp.trainer import Trainer  # which defines the calls
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("configs/*.md")])
FOLDERS = "slimefsdp|actors|tests|scripts|configs|docs|examples|benchmarks"


# ---------------------------------------------------------------------- the example


def run(*command: str | Path, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_loop_of_ones_own_trains_and_its_engines_get_every_update(tmp_path: Path) -> None:
    run(ROOT / "scripts/make_sort_digits.py", "data/sort_digits", cwd=tmp_path)
    settings = ["model.path=data/sort_digits/model", "run.steps=2", "rollout.prompts_per_step=16", "rollout.engines=1"]
    printed = run(ROOT / "examples/own_loop.py", ROOT / "configs/sort_digits_grpo.yaml", *settings, cwd=tmp_path)
    steps = re.findall(r"step (\d): reward ([\d.]+), (\d+) updates, weights (\d+)\n", printed)
    assert [int(step) for step, *_ in steps] == [1, 2], printed
    updates = [int(count) for _, _, count, _ in steps]
    assert updates[0] >= 1 and all(float(reward) > 0 for _, reward, _, _ in steps), printed
    # a version is the number of updates that led to it
    assert [int(version) for *_, version in steps] == [updates[0], sum(updates)]


def test_the_readme_shows_the_example_as_it_is() -> None:
    assert (ROOT / "examples/own_loop.py").read_text() in blocks(README, "python")


# ---------------------------------------------------------------------- names, files, links


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_the_code_of_a_document_imports_exists(document: Path) -> None:
    for block in blocks(document.read_text(), "python"):
        for node in ast.walk(ast.parse(textwrap.dedent(block))):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in ("slimefsdp", "actors"):
                module = importlib.import_module(str(node.module))
                missing = [name.name for name in node.names if not hasattr(module, name.name)]
                assert not missing, f"{node.module} has no {missing}"


def definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from definitions(node.body, f"{prefix}{node.name}.")
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_name_in_a_file_that_a_document_gives_exists(document: Path) -> None:
    named = re.findall(r"`([\w/]+\.py):([\w.]+)`", document.read_text())
    missing = [
        f"{path}:{name}"
        for path, name in named
        if not (ROOT / path).is_file() or name not in definitions(ast.parse((ROOT / path).read_text()).body)
    ]
    assert not missing


def test_the_way_of_a_batch_names_its_functions() -> None:
    """So that the test above has something to look at."""
    way = (ROOT / "docs/architecture.md").read_text().split("## Follow one batch")[1].split("\n## ")[0]
    assert len(re.findall(r"`[\w/]+\.py:[\w.]+`", way)) >= 15


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_and_link_in_a_document_leads_somewhere(document: Path) -> None:
    text = document.read_text()
    files = set(re.findall(rf"(?:^|[\s`(])((?:{FOLDERS})/[\w./-]*\w\.(?:py|sh|md|yaml|json|png))\b", text))
    missing = [name for name in files if not (ROOT / name).exists() and not (document.parent / name).exists()]
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        path = (document.parent / file) if file else document
        if re.match(r"[a-z]+://", target):
            continue
        if not path.exists() or (anchor and anchor not in anchors(path)):
            missing.append(target)
    assert not missing


def anchors(document: Path) -> list[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), flags=re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_the_readme_names_every_package_and_nothing_that_is_not_there() -> None:
    named = set(re.findall(r"`((?:slimefsdp|actors)\.\w+)`", README.split("## How it works")[1].split("\n## ")[0]))
    packages = {
        f"{top}.{folder.name}"
        for top in ("slimefsdp", "actors")
        for folder in (ROOT / top).iterdir()
        if (folder / "__init__.py").is_file()
    }
    modules = {f"{top}.{file.stem}" for top in ("slimefsdp", "actors") for file in (ROOT / top).glob("*.py")}
    assert packages <= named <= packages | modules


def commands() -> list[list[str]]:
    documents = [document.read_text() for document in DOCUMENTS]
    lines = [
        line for text in documents for block in blocks(text, "bash") for line in block.replace("\\\n", " ").splitlines()
    ]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_the_settings_in_every_command_are_accepted() -> None:
    of_presets = [[word for word in words if not word.startswith("compose.")] for words in commands()]
    runs = [words for words in of_presets if any(word.endswith(".yaml") for word in words)]
    assert len(runs) >= 4
    for words in runs:
        config = next(word for word in words if word.endswith(".yaml"))
        load_config(ROOT / config, [word for word in words if re.match(r"\w+\.\w+=", word)])


def test_every_preset_is_described_with_what_it_was_run_on() -> None:
    table = re.findall(
        r"^\| \[([\w.]+)\]\(\1\) \| .+ \| (.+) \|$", (ROOT / "configs/README.md").read_text(), re.MULTILINE
    )
    assert sorted(name for name, _ in table) == sorted(path.name for path in (ROOT / "configs").glob("*.yaml"))


# ---------------------------------------------------------------------- signatures, errors, figures


def sections(text: str) -> dict[str, str]:
    parts = re.split(r"^### (\w+)$", text, flags=re.MULTILINE)
    return {
        name: re.split(r"^## ", body, flags=re.MULTILINE)[0]
        for name, body in zip(parts[1::2], parts[2::2], strict=True)
    }


@pytest.mark.parametrize("name", CALLS)
def test_every_call_is_documented_with_its_signature_and_errors(name: str) -> None:
    section = sections((ROOT / "docs/rpc.md").read_text())[name]
    written = re.search(r"\w[^`]*", section)
    assert written is not None and written[0] == name + unannotated(inspect.signature(CALLS[name].method))
    raised = re.findall(r"(\w+Error): ", (CALLS[name].method.__doc__ or "").partition("Raises:")[2])
    assert [error for error in raised if error not in section] == []


def unannotated(signature: inspect.Signature) -> str:
    """Returns the parameters without `self` and types."""
    parameters = list(signature.parameters.values())[1:]
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    return str(inspect.Signature(bare)).replace(str(TAGS), "TAGS")


def test_no_call_is_documented_that_does_not_exist() -> None:
    assert sections((ROOT / "docs/rpc.md").read_text()).keys() == CALLS.keys()
    assert all(hasattr(Trainer, name) for name in CALLS)


def test_the_table_of_errors_has_every_type_with_its_code_and_exit_status() -> None:
    table = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (\d+) \|", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)
    types = [
        value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, errors.SlimeError)
    ]
    assert table == [(error.__name__, error.code, str(error.exit_code)) for error in types]


def test_the_supported_models_are_those_of_the_code() -> None:
    listed = re.findall(r"`(\w+)`", README.split("`model_type`s:")[1].split(".\n")[0])
    assert listed == list(SUPPORTED_MODELS)
