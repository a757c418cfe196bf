"""`python -m slimefsdp.replay`: one batch through train_step in a plain process, as the Trainer itself would do it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slimefsdp.config import load_config
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.trainer import Trainer
from tests.support.plain_step import make_batch
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import save_tiny_model
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[1]


def replay(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "slimefsdp.replay", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with settings and a batch, as a bug report would bring it."""
    folder = tmp_path_factory.mktemp("recorded")
    save_tiny_model(folder / "model")
    tree = {
        "model": {"path": str(folder / "model")},
        "mesh": {"device": "cpu"},
        "precision": {"compute_dtype": "float32"},
        "batch": {"max_tokens_per_rank": 64, "samples_per_update": 3},
        "loss": {"kl_coefficient": 0.3, "epochs": 2},
        "optim": {"lr": 1e-3, "total_updates": 100},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    make_batch(folder / "model").save(folder / "batch.safetensors")
    return folder


def train_in_this_process(rank: int, folder: Path) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    trainer = Trainer(load_config(folder / "config.yaml", ["optim.lr=2e-3"]), device=torch.device("cpu"))
    metrics = trainer.train_step(RolloutBatch.load(folder / "batch.safetensors"))
    return metrics, {name: weight.full_tensor().detach() for name, weight in trainer.policy.named_weights()}


@pytest.mark.default_tier
def test_metrics_and_weights_are_the_trainers_to_the_last_bit(recorded: Path, ranks: RankPool, tmp_path: Path) -> None:
    # settings may stand on both sides of the options
    done = replay(
        recorded, "config.yaml", "--batch", "batch.safetensors", "--export", f"{tmp_path}/new", "optim.lr=2e-3"
    )
    assert done.returncode == 0, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1, "one object and nothing else"
    metrics, weights = ranks.run(1, train_in_this_process, recorded)[0]
    times = {"train_seconds", "tokens_per_second", "tokens_per_second_per_rank", "tflops_per_rank"}
    assert printed.keys() == metrics.keys() and metrics["updates"] >= 4
    assert {k: v.hex() for k, v in printed.items() if k not in times} == {
        k: v.hex() for k, v in metrics.items() if k not in times
    }
    exported = load_file(tmp_path / "new" / "model.safetensors")
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weight) for name, weight in weights.items())
    before = load_file(recorded / "model" / "model.safetensors")
    assert not any(torch.equal(exported[name], before[name]) for name in before)
    AutoModelForCausalLM.from_pretrained(tmp_path / "new")


@pytest.mark.parametrize(
    ("arguments", "status", "code", "value"),
    [
        (["config.yaml", "--batch", "config.yaml"], 3, "batch", "config.yaml"),
        (["config.yaml", "--batch", "batch.safetensors", "model.path=nowhere"], 4, "model", "'nowhere'"),
        (["config.yaml", "--batch", "batch.safetensors", "mesh.dp=2"], 2, "config", "mesh.dp=2"),
    ],
)
def test_a_mistake_has_the_exit_status_of_its_class(
    recorded: Path, arguments: list[str], status: int, code: str, value: str
) -> None:
    done = replay(recorded, *arguments)
    assert done.returncode == status, done.stderr
    assert value in done.stderr and done.stderr.startswith(f"error [{code}]: ")
    assert "Traceback" not in done.stderr and done.stdout == ""
