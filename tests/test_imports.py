"""What must start fast imports nothing heavy: one bare process asks it of every part, each in a fork of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import actors
import slimefsdp

ROOT = Path(__file__).resolve().parents[1]
RAY = {"torch", "ray", "transformers"}
ANY = {*RAY, "numpy", "pydantic"}

# of every command
HELP = """
import contextlib, io
import typer
from actors.cli.main import app, main
waiting, seen = [([], typer.main.get_command(app))], []
while waiting:
    words, command = waiting.pop()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main([*words, '--help']) == 0, words
    assert 'Usage: ' + ' '.join(['slimefsdp', *words]) in said.getvalue(), words
    assert hasattr(command, 'commands') or 'Example' in said.getvalue(), words
    seen.append(' '.join(words))
    waiting += [([*words, name], one) for name, one in getattr(command, 'commands', {}).items()]
assert {'train', 'replay', 'plan', 'check', 'convert dcp-to-hf', 'groups list'} <= set(seen), seen
"""

PARTS: dict[str, tuple[str, set[str]]] = {
    "the settings of a Trainer": (
        "from slimefsdp.config.trainer import TrainerConfig; TrainerConfig.checked({'model': {'path': 'm'}})",
        {*RAY, "slimefsdp.config.run", "slimefsdp.config.rollout", "slimefsdp.config.data"},
    ),
    "a Trainer": (
        "import slimefsdp.trainer",
        {
            "ray",
            "actors",
            "slimefsdp.config.run",
            "slimefsdp.config.rollout",
            "slimefsdp.config.data",
        },
    ),
    "batches": ("import slimefsdp.data.rollout_batch", RAY),
    "judging a batch": ("import slimefsdp.training.advantages", RAY),
    "planning": ("import slimefsdp.training.prepare", RAY),
    "estimating": ("import slimefsdp.estimate.recommend", RAY),
    "reading a model folder": ("import slimefsdp.models.hf_folder", ANY),
    "settings": (
        "import slimefsdp; slimefsdp.load_config(settings, ['optim.lr=1e-3'])",
        {*RAY, "numpy", "matplotlib", "tensorboard"},
    ),
    "settings that are refused": (
        "import slimefsdp\ntry: slimefsdp.load_config(settings, ['optim.lrr=1'])\n"
        "except slimefsdp.errors.ConfigError: pass\nelse: raise SystemExit('accepted')",
        {*RAY, "numpy", "matplotlib", "tensorboard"},
    ),
    "finding a reward": (
        "from actors.rollout.rewards import load_reward; load_reward('actors.rollout.rewards:sorted_digits')",
        ANY,
    ),
    "reading prompts": (
        "from types import SimpleNamespace\nfrom actors.rollout.records import read_records\n"
        "read_records(SimpleNamespace(sources={'data.train': prompts}, prompt_key='prompt', answer_column='answer', "
        "prompt_template=None), 'train')",
        {*RAY, "numpy"},
    ),
    "help of every command": (HELP, {*RAY, "requests", "httpx"}),
    "finding an environment": (
        "from actors.rollout.environment import load_environment\n"
        f"environment = load_environment('{ROOT}/examples/environments/tools.py:ToolUse', {{'tools': ['python']}})\n"
        "environment(['calculator', 'python'])",
        RAY,
    ),
    "a report": ("import actors.cli.report", {*RAY, "matplotlib"}),
    "finding a filter": ("from actors.rollout.groups import load_filter; load_filter('mixed_groups')", RAY),
}

BARE = """
import json, os, sys, traceback
codes, names = json.loads(sys.argv[1]), json.loads(sys.argv[2])
for part, code in codes.items():
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        continue
    answer = {}
    try:
        exec(code, dict(names))
        answer["imported"] = sorted(sys.modules)
    except BaseException:
        answer["error"] = traceback.format_exc()
    print(json.dumps([part, answer]), flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[str]]]:
    """By part, the modules that it brings into a bare process."""
    folder = tmp_path_factory.mktemp("files")
    settings, prompts = folder / "settings.yaml", folder / "prompts.jsonl"
    settings.write_text("model: {path: unread}\nbatch: {max_tokens_per_rank: 64}\noptim: {total_updates: 10}\n")
    prompts.write_text('{"prompt": "a"}\n')
    codes = {part: code for part, (code, _) in PARTS.items()}
    names = {"settings": str(settings), "prompts": str(prompts)}
    command = [sys.executable, "-c", BARE, json.dumps(codes), json.dumps(names)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.default_tier
@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_starts_fast_imports_nothing_heavy(part: str, imported: dict[str, dict[str, list[str]]]) -> None:
    assert "error" not in imported[part], imported[part]["error"]
    assert not PARTS[part][1] & set(imported[part]["imported"])


def test_names_that_are_imported_on_use_are_offered_for_completion() -> None:
    for module in (slimefsdp, actors):
        assert set(module.__all__) <= set(dir(module))
