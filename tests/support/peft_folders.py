"""Folders that peft writes and opens, and a plain step that goes on from one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.trainer import Trainer
from slimefsdp.training.plan import plan_training
from tests.support.float64 import KeepFloat64
from tests.support.plain_lora import ALL, PeftStep, Weights, adapters_of, some_b, unstacked
from tests.support.plain_step import PlainStep
from tests.support.tiny_models import plain_model

PREFIX = "base_model.model."


def trained_by_peft(base: Path, config: RunConfig, batch: RolloutBatch, folder: Path, targets: Any = ALL) -> Path:
    """The folder that peft leaves after a few updates, with the rank and alpha of the settings."""
    with KeepFloat64():
        plain = PeftStep(base, config, torch.float64, None, targets)
        for name, parameter in plain.adapters.items():
            if name.endswith("lora_B"):
                parameter.data.copy_(some_b(name, parameter.shape))
        plain.train(batch, plan_training(config, batch))
        plain.model.save_pretrained(folder, save_embedding_layers=False)
    return folder


class ContinuedStep(PeftStep):
    """`PlainStep` on the adapters of a folder, as peft opens it."""

    def __init__(self, base: Path, config: RunConfig, folder: Path) -> None:
        PlainStep.__init__(self, base, config, torch.float64)
        self.model = PeftModel.from_pretrained(self.model, folder, is_trainable=True, autocast_adapter_dtype=False)
        self.train_adapters()


def adapters_in(folder: Path) -> Weights:
    """A and B in a folder, under this library's names."""
    found = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    stacks = sorted({key.rpartition(".")[2] for key in config.get("target_parameters") or ()})
    ours = {}
    for name, tensor in found.items():
        stem, matrix = name.removeprefix(PREFIX).removesuffix(".weight").rsplit(".", 1)
        if ".experts" not in stem:
            ours[f"{stem}.{matrix}"] = tensor
            continue
        experts = (tensor.shape[0] if matrix == "lora_A" else tensor.shape[1]) // config["r"]
        # the wrapper of the last one, which in the alphabet comes first, is the outermost
        owner, _, inside = stem.partition(".base_layer")
        stack = stacks[-1] if inside or stem.endswith(".base_layer") else stacks[0]
        ours[f"{owner}.{stack}_{matrix}"] = unstacked(matrix, tensor, experts)
    return ours


def metadata_of(folder: Path) -> dict[str, str]:
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        metadata: dict[str, str] = file.metadata()
    return metadata


def rewrite(
    folder: Path, *, config: dict[str, Any] | None = None, tensors: dict[str, torch.Tensor | None] | None = None
) -> None:
    """Changes keys of adapter_config.json, and tensors of the file; None removes one of these."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **(config or {})}))
    if tensors is not None:
        held: dict[str, torch.Tensor | None] = dict(load_file(folder / "adapter_model.safetensors"))
        kept = {name: tensor for name, tensor in {**held, **tensors}.items() if tensor is not None}
        save_file(kept, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def logits_of(model: Any, batch: RolloutBatch) -> list[torch.Tensor]:
    with torch.no_grad(), KeepFloat64():
        return [model(input_ids=torch.as_tensor(sample["tokens"])[None]).logits[0] for sample in batch.to_samples()]


def opened_by_peft(base: Path, folder: Path, batch: RolloutBatch) -> list[torch.Tensor]:
    """The logits of a base under the adapters of a folder."""
    with KeepFloat64():
        model = PeftModel.from_pretrained(plain_model(base, torch.float64), folder, autocast_adapter_dtype=False)
    return logits_of(model, batch)


def merged_logits(folder: Path, batch: RolloutBatch) -> list[torch.Tensor]:
    """The logits of an exported model."""
    return logits_of(plain_model(folder, torch.float64), batch)


def farthest(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def continued(rank: int, config: RunConfig, batch: RolloutBatch, out: Path) -> dict[str, Any]:
    """Of one rank: what training from a folder begins with, its gradients, what comes of it, and exports of that."""
    with KeepFloat64():
        trainer = Trainer(config, device=torch.device("cpu"))
        start = adapters_of(trainer)
        trainer.forward_backward(batch)
        gradients = {name: p.grad.full_tensor() for name, p in trainer.policy.trained_weights()}
        trainer.zero_grad()
        trainer.train_step(batch)
        trainer.export_adapter(out / "adapter")
        trainer.export_hf(out / "merged")
    return {
        "settings": trainer.config.lora,
        "start": start,
        "gradients": gradients,
        "end": adapters_of(trainer),
        "in sync": trainer.check_sync().is_in_sync,
    }


def begun(rank: int, config: RunConfig) -> dict[str, Any]:
    """Of one rank: the adapters that a trainer begins with."""
    trainer = Trainer(config, device=torch.device("cpu"))
    return {"settings": trainer.config.lora, "start": adapters_of(trainer)}
