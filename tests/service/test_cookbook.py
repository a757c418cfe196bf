"""The recipes of tinker-cookbook, as they are, against `slimefsdp serve`: they train, sample, save and go on.

Run with SLIMEFSDP_COOKBOOK_PYTHON naming the interpreter of an environment that scripts/setup_cookbook.sh made; takes
minutes. A recipe is a command of that interpreter, with flags and environment variables alone; what it would fetch from
a hub lies under the same names in the folder that it runs in.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.cookbook import MODEL, metrics_of, write_recipe_folder
from tests.support.service import Server, service_tree
from tests.support.waiting import PATIENCE_S

PYTHON = os.environ.get("SLIMEFSDP_COOKBOOK_PYTHON")
pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="SLIMEFSDP_COOKBOOK_PYTHON names no interpreter with tinker-cookbook"),
    pytest.mark.slow,
]
Run = Callable[..., Path]
CHAT = ("renderer_name=qwen3_instruct", "behavior_if_log_dir_exists=raise")


@pytest.fixture(scope="module")
def folder(untied: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("cookbook")
    write_recipe_folder(made, untied)
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    file = folder / "service.yaml"
    lora = {"rank": 32, "targets": ["attention", "mlp", "head"]}
    batch, service = {"max_tokens_per_rank": 2048}, {"address": "127.0.0.1:0", "model_name": MODEL}
    service["stable_reinforce"] = "importance_sampling"
    file.write_text(yaml.safe_dump(service_tree(folder / MODEL, folder, lora=lora, batch=batch, service=service)))
    started = Server(file)
    yield started
    ended = started.end()
    started.kill()
    assert ended == 0


@pytest.fixture(scope="module")
def run(server: Server, folder: Path) -> Run:
    """Runs a recipe to its end, and returns the folder that it wrote."""

    def ran(recipe: str, *flags: str, log: str | None = None) -> Path:
        where = folder / "logs" / (log or recipe)
        command = [
            PYTHON,
            "-m",
            f"tinker_cookbook.recipes.{recipe}",
            f"model_name={MODEL}",
            f"log_path={where}",
            *flags,
        ]
        known = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        known |= {
            "TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0",
            "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        done = subprocess.run(
            [*command, *flags],
            cwd=folder,
            env=known,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return where

    return ran


@pytest.fixture(scope="module")
def imitated(run: Run) -> Path:
    """What the recipe sl_loop left, whose model answers 1 or 2."""
    flags = "batch_size=8", "learning_rate=1e-2", "lora_rank=8", "max_length=512", "save_every=10"
    return run("sl_loop", *flags, "train_on_what=last_assistant_message")


def checkpoints_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (log / "checkpoints.jsonl").read_text().splitlines()]


def test_sl_loop_imitates_and_its_checkpoints_expire_or_stay_as_it_says(imitated: Path, folder: Path) -> None:
    losses = metrics_of(imitated, "train_mean_nll")
    assert len(losses) == 20 and all(map(math.isfinite, losses))
    assert losses[0] > 3 and max(losses[-5:]) < 0.5
    assert all(norm > 0 for norm in metrics_of(imitated, "grad_norm"))
    first, last = checkpoints_of(imitated)
    assert (first["name"], last["name"]) == ("000010", "final")
    known = [json.loads(file.read_text()) for file in (folder / "run/service/saved").iterdir()]
    expires = {f"tinker://{one['run']}/{one['kind']}/{one['name']}": one["expires"] for one in known}
    assert expires[first["state_path"]] is not None
    assert expires[last["state_path"]] is None and expires[last["sampler_path"]] is None


@pytest.mark.parametrize("loss", ["stable_reinforce", "cispo", "gspo"])  # the first one is importance_sampling here
def test_rl_loop_goes_on_from_a_checkpoint_and_learns_the_right_answer(
    run: Run, imitated: Path, folder: Path, loss: str
) -> None:
    log = folder / "logs" / loss
    log.mkdir()
    shutil.copy(imitated / "checkpoints.jsonl", log)  # it goes on where the last one says, which is batch 20
    flags = "batch_size=4", "group_size=8", "learning_rate=1e-3", "lora_rank=8", "max_tokens=12", "max_steps=34"
    rewards = metrics_of(run("rl_loop", f"loss_fn={loss}", *flags, log=loss), "reward/total")
    assert len(rewards) == 14
    assert rewards[0] < 0.6 and sum(rewards[-3:]) / 3 > 0.8
    assert all(map(math.isfinite, metrics_of(log, "grad_norm")))


def test_math_rl_learns_to_end_its_answers(run: Run) -> None:
    flags = "groups_per_batch=8", "group_size=8", "max_tokens=16", "lora_rank=8", "learning_rate=1e-2", "max_steps=10"
    log = run("math_rl.train", "env=arithmetic", "loss_fn=importance_sampling", "save_every=5", *flags, CHAT[1])
    rewards = metrics_of(log, "env/all/reward/total")  # -0.1 for an answer that does not end
    assert len(rewards) == 10 and rewards[0] < -0.08 and rewards[-1] > -0.05
    assert max(map(abs, metrics_of(log, "optim/kl_sample_train_v1"))) < 1e-4
    assert [one["name"] for one in checkpoints_of(log)] == ["000005", "000010", "final"]


def test_math_rl_begins_with_the_weights_of_another_recipe(run: Run, imitated: Path) -> None:
    path = f"load_checkpoint_path={checkpoints_of(imitated)[-1]['state_path']}"
    flags = "groups_per_batch=2", "group_size=4", "max_tokens=12", "lora_rank=8", "max_steps=1", "eval_every=0"
    log = run("math_rl.train", "env=gsm8k", *flags, path, CHAT[1], log="gsm8k")  # with its own default loss
    assert metrics_of(log, "env/all/format") == [1.0]


DISTILLED = ("groups_per_batch=4", "max_tokens=12", "topk=5", "lora_rank=8", "eval_every=0", "max_context_length=1024")
OTHERS: dict[str, tuple[tuple[str, ...], str]] = {
    "chat_sl.train": (("dataset=no_robots", "batch_size=8", "max_length=512", "lora_rank=8", *CHAT), "train_mean_nll"),
    "preference.dpo.train": (("dataset=hhh", "batch_size=8", "max_length=512", *CHAT), "dpo_loss"),
    "preference.shorter.train": (
        ("batch_size=2", "group_size=4", "max_tokens=16", "eval_every=0", *CHAT), "env/all/reward/total"
    ),
    "distillation.on_policy_distillation": (
        (f"teacher_model={MODEL}", "dataset=tulu3", "groups_per_batch=4", "max_tokens=8", "lora_rank=8", "eval_every=0",
         *CHAT), "teacher_kl"
    ),
    "distillation.off_policy_reasoning": (
        ("batch_size=8", "max_length=512", "lora_rank=8", "buffer_size=16", "max_prompts=64", "eval_every=0", *CHAT),
        "train_mean_nll",
    ),
    "sdft.train": ((*DISTILLED, *CHAT), "sdft/mean_teacher_entropy"),
    "sdft.train reverse=true": ((*DISTILLED, *CHAT), "sdft/reverse_kl_loss"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_a_recipe_makes_two_steps(run: Run, name: str) -> None:
    recipe, *more = name.split()
    flags, metric = OTHERS[name]
    log = run(recipe, "max_steps=2", *more, *flags, log=name.replace(" ", "-"))
    values = metrics_of(log, metric)
    assert len(values) == 2 and all(map(math.isfinite, values))
    assert checkpoints_of(log)[-1]["name"] == "final"
