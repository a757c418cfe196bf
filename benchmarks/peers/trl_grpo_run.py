"""TRL's GRPOTrainer from prompts to updates, with its own generation: a run that `benchmarks/rl_step.py` starts.

Its settings come as JSON in a file. It leaves a line a step in `metrics.jsonl`, in the words of slimefsdp's: when the
step ended, seconds of its parts, and what was sampled.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peers.rl_task import REWARDS


class Timed(GRPOTrainer):
    """Notes how long it generates."""

    generate_s = 0.0

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        found = super()._generate(*args, **kwargs)
        self.generate_s += time.perf_counter() - began
        return found


class StepLog(TrainerCallback):
    """A line a step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trainer: Timed
        self.rewards: list[dict[str, float]] = []
        self.lengths: list[int] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        generate_s, self.trainer.generate_s = self.trainer.generate_s, 0.0
        row = {
            "step": self.trainer.state.global_step,
            "time": time.time(),
            "seconds/step": now - self.began,
            "seconds/generate": generate_s,
            "seconds/train": now - self.began - generate_s,
            "rollout/response_length": sum(self.lengths) / len(self.lengths),
            "response_tokens": sum(self.lengths),
            **{f"rollout/{name}": _mean(self.rewards, name) for name in self.rewards[0]},
        }
        with self.path.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
        self.rewards, self.lengths, self.began = [], [], now


def _mean(rows: list[dict[str, float]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("settings", type=Path)
    given = json.loads(parser.parse_args().settings.read_text())
    torch.set_num_threads(1)
    folder = Path(given["folder"])
    tokenizer = AutoTokenizer.from_pretrained(given["model"])
    reward = REWARDS[given["reward"]]
    log = StepLog(folder / "metrics.jsonl")

    def score(completions: Any, completion_ids: Any, answer: Any, **_: Any) -> list[float]:
        found = [
            reward({"answer": right}, message[0]["content"].strip(), ids[-1] == tokenizer.eos_token_id)
            for message, ids, right in zip(completions, completion_ids, answer, strict=True)
        ]
        log.rewards += found
        log.lengths += map(len, completion_ids)
        return [one["reward"] for one in found]

    samples, micro_batch = given["prompts_per_step"] * given["samples_per_prompt"], given["micro_batch"]
    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=given["seed"],
        max_steps=given["steps"],
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=samples // micro_batch,
        num_generations=given["samples_per_prompt"],
        max_completion_length=given["max_new_tokens"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        loss_type="dapo",  # the mean over all tokens of the update
        beta=0.0,
        epsilon=given["clip"],
        scale_rewards="group",
        learning_rate=given["lr"],
        lr_scheduler_type="constant",
        warmup_steps=0,
        adam_beta1=given["betas"][0],
        adam_beta2=given["betas"][1],
        adam_epsilon=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        logging_steps=1,
        **given.get("options", {}),
    )
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32, attn_implementation="sdpa"),
        reward_funcs=score,
        args=settings,
        train_dataset=Dataset.from_list([json.loads(line) for line in Path(given["prompts"]).read_text().splitlines()]),
        processing_class=tokenizer,
        callbacks=[log],
    )
    log.trainer = trainer
    trainer.train()


if __name__ == "__main__":
    main()
