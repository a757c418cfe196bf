"""A run that begins from adapters of peft, on Ray workers, leaves a merged model and the adapters, which agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from actors.loop import train
from actors.workers.worker_group import WorkerGroup
from slimefsdp.errors import StateError
from tests.support.comparisons import largest_difference
from tests.support.peft_folders import adapters_in, farthest, merged_logits, opened_by_peft, trained_by_peft
from tests.support.plain_step import make_batch, settings
from tests.support.refusals import refused
from tests.support.runs import rows_of


def test_a_run_begins_from_adapters_and_leaves_them_beside_the_merged_model(
    cluster: None, make_config: Any, example: Path, tmp_path: Path
) -> None:
    base, batch = example / "model", make_batch(example / "model")
    gently = settings(base, lora={"rank": 3, "alpha": 7.0}, optim={"lr": 1e-4})
    adapters = trained_by_peft(base, gently, batch, tmp_path / "adapters", ["q_proj", "up_proj"])
    config = make_config(
        run={"dir": str(tmp_path / "run"), "steps": 2, "export_dir": str(tmp_path / "out")},
        lora={"path": str(adapters)},
        mesh={"dp": 2},
        precision={"compute_dtype": "float32"},
        data={"train": str(example / "train.jsonl")},
        rollout={
            "prompts_per_step": 2,
            "samples_per_prompt": 4,
            "max_new_tokens": 6,
            "engines": 1,
            "reward": "tests.support.runs:variety",
        },
        checkpoint={"interval_steps": 1},
        optim={"lr": 1e-2},
    )
    train(config)
    rows = [row for row in rows_of(config) if row["step"] > 0]
    assert len(rows) == 2 and all(row["rollout_mismatch_max"] < 1e-4 for row in rows)  # engines have them merged
    left = tmp_path / "out" / "adapter"
    assert largest_difference(adapters_in(left), adapters_in(adapters)) > 0
    assert farthest(opened_by_peft(base, left, batch), merged_logits(tmp_path / "out", batch)) < 1e-4
    AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)


def test_a_group_writes_its_adapters_and_says_when_it_has_none(group: Any, cluster: None, tmp_path: Path) -> None:
    assert isinstance(group, WorkerGroup)
    with refused(StateError, "lora.rank", "export_adapter()"):
        group.export_adapter(tmp_path / "none")
    assert not (tmp_path / "none").exists()
