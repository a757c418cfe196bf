"""TRL's SFTTrainer on one file of records: a run that `benchmarks/trl_sft_equality.py` starts in TRL's environment.

Its settings come as JSON in a file, and so does what it answers: the loss of each update. The weights of the last one
are left in a folder.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer


class Recorded(SFTTrainer):
    """Keeps the loss of each update as it is differentiated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    settings = SFTConfig(
        output_dir=asked["folder"],
        per_device_train_batch_size=asked["samples_per_update"],
        num_train_epochs=1,  # the file has the records of all epochs in their order
        train_sampling_strategy="sequential",
        learning_rate=asked["lr"],
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        optim={"adamw": "adamw_torch", "sgd": "sgd"}[asked["optimizer"]],
        adam_beta1=asked["betas"][0],
        adam_beta2=asked["betas"][1],
        adam_epsilon=asked["eps"],
        max_grad_norm=asked["max_grad_norm"],
        assistant_only_loss=asked["assistant_only_loss"],
        max_length=None,
        packing=False,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Recorded(
        model=AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(asked["model"]),
        args=settings,
        train_dataset=load_dataset("json", data_files=asked["records"], split="train"),
    )
    trainer.train()
    trainer.model.save_pretrained(asked["weights"])
    versions = {name: version(name) for name in ("trl", "torch", "transformers", "accelerate")}
    Path(asked["answer"]).write_text(json.dumps({"losses": trainer.losses, "versions": versions}))


if __name__ == "__main__":
    main()
