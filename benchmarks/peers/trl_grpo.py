"""TRL's GRPOTrainer on a recorded batch: its own preparation, loss and training step; only generation is replaced.

As its documentation has one set it up for one update on the sampled batch: `beta` 0, the `dapo` loss (a mean over all
tokens of the update), no gradient checkpointing, the fused AdamW that it takes by default. Padding is its own: prompts
to the left and completions to the right, to the longest of the whole batch, which is then shuffled and cut. With
`--adapter` the trainer is handed a `PeftModel`.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import pad

from benchmarks.peers.measure import ADAMW, CLIP, MAX_GRAD_NORM, Sample, read_samples, serve


class Recorded(GRPOTrainer):
    """Takes recorded samples for those that it would generate."""

    samples: list[Sample]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        prompts = [sample.tokens[: -sample.response_length] for sample in self.samples]
        completions = [sample.tokens[-sample.response_length :] for sample in self.samples]
        return {
            "prompt_ids": pad(prompts, padding_value=0, padding_side="left"),
            "prompt_mask": pad([torch.ones_like(ids) for ids in prompts], padding_value=0, padding_side="left"),
            "completion_ids": pad(completions, padding_value=0, padding_side="right"),
            "completion_mask": pad([torch.ones_like(ids) for ids in completions], padding_value=0),
            "advantages": prompts[0].new_tensor([sample.advantage for sample in self.samples], dtype=torch.float32),
            "num_items_in_batch": torch.tensor(sum(map(len, completions)), device=prompts[0].device),
        }


class TrlStep:
    """One optimiser step of the trainer, over all accumulation steps."""

    def __init__(
        self, model: Path, batch: Path, device: torch.device, *, is_compiled: bool, adapter: Path | None
    ) -> None:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>")),
            pad_token="<pad>",
            eos_token="<eos>",
        )
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
        if adapter is not None:
            from peft import PeftModel

            policy = PeftModel.from_pretrained(policy, adapter, is_trainable=True)
        if is_compiled:
            policy.compile()  # what the trainer's `torch_compile` comes to
        settings = GRPOConfig(
            output_dir=str(batch.with_name("trl")),  # beside the batch, and gone with it
            use_cpu=device.type == "cpu",
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            loss_type="dapo",
            beta=0.0,
            epsilon=CLIP,
            learning_rate=ADAMW["lr"],
            adam_beta1=ADAMW["betas"][0],
            adam_beta2=ADAMW["betas"][1],
            adam_epsilon=ADAMW["eps"],
            weight_decay=ADAMW["weight_decay"],
            max_grad_norm=MAX_GRAD_NORM,
            lr_scheduler_type="constant",
            per_device_train_batch_size=2,  # of the data loader, which is not used
            num_generations=2,
        )
        self.trainer = Recorded(
            model=policy,
            reward_funcs=lambda prompts, **_: [0.0] * len(prompts),
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": ["<eos>"] * 4}),
            processing_class=tokenizer,
        )
        self.trainer.samples = read_samples(batch, device)
        self.trainer.create_optimizer()
        self.trainer.model.train()
        self.parameters = sum(one.numel() for one in self.trainer.model.parameters() if one.requires_grad)
        count = len(self.trainer.samples)
        self.micro_batches = [size for size in (4, 8, 16) if count % size == 0] or [count]

    def step(self, micro_batch: int) -> tuple[float, float]:
        """One update with `per_device_train_batch_size` samples at a time."""
        trainer = self.trainer
        accumulation = len(trainer.samples) // micro_batch
        trainer.args.per_device_train_batch_size = micro_batch
        trainer.args.gradient_accumulation_steps = trainer.current_gradient_accumulation_steps = accumulation
        trainer.args.steps_per_generation = accumulation
        trainer._step, trainer._buffered_inputs = 0, None  # the next call makes a new batch
        total = 0.0
        for _ in range(accumulation):
            total += float(trainer.training_step(trainer.model, [], None))
        norm = trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), MAX_GRAD_NORM)
        trainer.optimizer.step()
        trainer.model.zero_grad()
        return total, float(norm)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--adapter", type=Path, help="a PEFT folder, which is trained; default: all weights are")
    chosen, _ = parser.parse_known_args()
    packages = ["trl", "transformers", "accelerate", *(["peft"] if chosen.adapter else [])]
    serve(partial(TrlStep, is_compiled=chosen.compile, adapter=chosen.adapter), *packages)
