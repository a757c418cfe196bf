"""TRL's DPOTrainer on a file of pairs, in its order: a run that `benchmarks/trl_dpo_equality.py` starts.

Its settings come as JSON in a file. It leaves `found.json`: the loss and the metrics of each update, and the tokens of
each pair.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer


class InOrder(DPOTrainer):
    """Takes pairs as they come, and notes each loss as it is: what is logged may be rounded."""

    losses: list[float]

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        found = super().compute_loss(*args, **kwargs)
        self.losses.append(found.item())
        return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("settings", type=Path)
    given = json.loads(parser.parse_args().settings.read_text())
    torch.set_num_threads(1)
    folder = Path(given["folder"])
    settings = DPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        max_steps=given["steps"],
        per_device_train_batch_size=given["pairs_per_update"],
        gradient_accumulation_steps=1,
        max_length=None,
        beta=given["beta"],
        loss_type=["sigmoid"],
        optim={"sgd": "sgd", "adamw": "adamw_torch"}[given["optimizer"]],
        learning_rate=given["lr"],
        adam_beta1=given["betas"][0],
        adam_beta2=given["betas"][1],
        adam_epsilon=given["eps"],
        weight_decay=0.0,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        warmup_steps=0,
    )
    trainer = InOrder(
        model=AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32),
        args=settings,
        train_dataset=Dataset.from_list(given["records"]),
        processing_class=AutoTokenizer.from_pretrained(given["model"]),
    )
    trainer.losses = []
    trainer.train()
    rows = [row for row in trainer.state.log_history if "rewards/margins" in row]
    found = {
        "updates": [row | {"loss": loss} for row, loss in zip(rows, trainer.losses, strict=True)],
        "tokens": [
            [
                pair["prompt_ids"] + pair["chosen_ids"],
                pair["prompt_ids"] + pair["rejected_ids"],
                len(pair["prompt_ids"]),
            ]
            for pair in trainer.train_dataset
        ],
        "versions": {name: version(name) for name in ("trl", "transformers", "torch", "accelerate", "datasets")},
    }
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
