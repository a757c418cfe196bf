"""A plain step on adapters of peft, and the same adapters in a Trainer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from transformers import AutoModelForCausalLM

from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.distributed.mesh import local_block, local_shard
from slimefsdp.trainer import Trainer
from slimefsdp.training.build import compute_dtype
from slimefsdp.training.plan import plan_training
from slimefsdp.weight_sync.buckets import Bucket
from slimefsdp.weight_sync.progress import Manifest
from slimefsdp.weight_sync.receive import WeightReceiver
from tests.support.float64 import KeepFloat64
from tests.support.plain_step import PlainStep
from tests.support.trainers import error_of, hex_losses

EXPERTS = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Weights = dict[str, torch.Tensor]


def some_b(name: str, shape: torch.Size) -> torch.Tensor:
    """A B that is not 0, by its name alone: at 0, nothing reaches A."""
    generator = torch.Generator().manual_seed(len(name) + sum(name.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.2


@torch.no_grad()
def fill_b(trainer: Trainer) -> None:
    """Gives every B of a trainer its `some_b`."""
    for name, parameter in trainer.policy.all_parameters():
        if name.endswith("lora_B"):
            start, end = local_block(parameter).rows
            local_shard(parameter).copy_(some_b(name, parameter.shape)[start:end])


def unstacked(name: str, tensor: torch.Tensor, experts: int) -> torch.Tensor:
    """A or B of a stack of experts as peft has it, as [experts, rank, in] or [experts, out, rank]."""
    if name.endswith("lora_A"):
        return tensor.view(experts, -1, tensor.shape[1])
    return tensor.view(tensor.shape[0], -1, experts).permute(2, 0, 1)


class PeftStep(PlainStep):
    """`PlainStep` of a model under peft's adapters.

    Args:
        adapters: A and B of every target, under this library's names; None: as peft draws them.
        targets: what peft calls them: target_modules, or several settings.
    """

    def __init__(
        self, path: Path, config: RunConfig, dtype: torch.dtype, adapters: Weights | None, targets: Any
    ) -> None:
        super().__init__(path, config, dtype)
        chosen = targets if isinstance(targets, dict) else {"target_modules": targets}
        lora = LoraConfig(r=config.lora.rank, lora_alpha=config.lora.alpha, lora_dropout=0.0, **chosen)
        self.model = get_peft_model(self.model, lora, autocast_adapter_dtype=False)
        self.train_adapters()
        if adapters is None:
            return
        assert self.adapters.keys() == adapters.keys()
        with torch.no_grad():
            for name, parameter in self.adapters.items():
                ours = self._as_ours(name, parameter)  # a view
                assert parameter.dtype == dtype and ours.shape == adapters[name].shape
                ours.copy_(adapters[name])

    def train_adapters(self) -> None:
        """Has `adapters` and the optimizer be those of the model as it is now."""
        self.adapters, self.experts = {}, {}
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                continue
            ours = name.removeprefix("base_model.model.").removesuffix(".default.weight")
            wrapper = self.model.get_submodule(name.rpartition(".lora_")[0])
            if isinstance(wrapper, ParamWrapper):
                stem, matrix = ours.replace(".base_layer", "").rsplit(".", 1)
                ours = f"{stem}.{wrapper.parameter_name}_{matrix}"
                self.experts[ours] = wrapper.num_experts
            self.adapters[ours] = parameter
        trained, optim = list(self.adapters.values()), self.config.optim
        if optim.name == "sgd":
            self.optimizer = torch.optim.SGD(trained, lr=optim.lr, momentum=optim.momentum)
        else:
            self.optimizer = torch.optim.AdamW(trained, optim.lr, optim.betas, optim.eps, weight_decay=0.0)

    def gradients(self) -> Weights:
        return {name: self._as_ours(name, parameter.grad).clone() for name, parameter in self.adapters.items()}

    def weights(self) -> Weights:
        return {name: self._as_ours(name, parameter.detach()).clone() for name, parameter in self.adapters.items()}

    def _as_ours(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return unstacked(name, tensor, self.experts[name]) if name in self.experts else tensor

    def merged(self) -> Weights:
        """The weights of the model without adapters that computes the same; of no more use afterwards."""
        model: Any = self.model.merge_and_unload()
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def adapters_of(trainer: Trainer) -> Weights:
    return {name: parameter.full_tensor().detach().clone() for name, parameter in trainer.policy.trained_weights()}


def lora_gradients(rank: int, config: RunConfig, batch: RolloutBatch) -> tuple[Weights, Weights, list[str]]:
    """Of one rank: the adapters at first, their gradients, and what else has one."""
    with KeepFloat64():
        trainer = Trainer(config, device=torch.device("cpu"))
        fill_b(trainer)
        start = adapters_of(trainer)
        trainer.forward_backward(batch)
    gradients = {name: p.grad.full_tensor() for name, p in trainer.policy.trained_weights()}
    others = [name for name, p in trainer.policy.all_parameters() if p.grad is not None and name not in gradients]
    return start, gradients, others


def plain_gradients(
    path: Path, config: RunConfig, batch: RolloutBatch, adapters: Weights, targets: Any = ALL
) -> Weights:
    with KeepFloat64():
        plain = PeftStep(path, config, torch.float64, adapters, targets)
        plain.backward(batch, np.arange(batch.num_samples))
    return plain.gradients()


def lora_training(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, Any]:
    """Of one rank: a train step of several updates, and what is left of it."""
    with KeepFloat64():
        trainer = Trainer(config, device=torch.device("cpu"))
        fill_b(trainer)
        start, base = adapters_of(trainer), base_of(trainer)
        metrics = trainer.train_step(batch)
    norms = trainer.gradient_health().group_norms
    return {
        "start": start,
        "end": adapters_of(trainer),
        "metrics": metrics,
        "norms": norms,
        "base moved": [name for name, weight in base_of(trainer).items() if not torch.equal(weight, base[name])],
        "in sync": trainer.check_sync().is_in_sync,
        "description": trainer.describe(),
    }


def base_of(trainer: Trainer) -> Weights:
    return {name: parameter.full_tensor().detach().clone() for name, parameter in trainer.policy.named_weights()}


def plain_training(
    path: Path, config: RunConfig, batch: RolloutBatch, adapters: Weights, targets: Any = ALL
) -> PeftStep:
    plan = plan_training(config, batch)
    assert len(plan.updates) >= 3
    with KeepFloat64():
        plain = PeftStep(path, config, torch.float64, adapters, targets)
        plain.train(batch, plan)
    return plain


def life_of_adapters(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, Any]:
    """Of one rank: steps, what the reference says before and after them, and the bytes that it has."""
    trainer = Trainer(config, device=torch.device("cpu"))
    before = trainer.compute_log_probs(batch).log_probs
    said = [trainer.compute_log_probs(batch, "ref").log_probs]
    metrics = [trainer.train_step(batch) for _ in range(3)]
    held = trainer.memory().reference
    trainer.sleep()
    said.append(trainer.compute_log_probs(batch, "ref").log_probs)
    after = trainer.compute_log_probs(batch).log_probs
    return {
        "before": before,
        "after": after,
        "reference": said,
        "metrics": metrics,
        "reference bytes": held,
        "adapters": adapters_of(trainer),
        "update_ref": error_of(trainer.update_ref),
        "reference at last": trainer.compute_log_probs(batch, "ref").log_probs,
    }


class Taker(WeightReceiver):
    """Has the frozen weights of any sender from its first update on, and says which tensors came."""

    def __init__(self, model: Any) -> None:
        super().__init__(list(model.named_parameters()))
        self.came: list[str] = []
        self.is_filled = False

    def has_frozen(self, source: str) -> bool:
        return self.is_filled

    def begin(self, version: int, manifest: Manifest, kept: Any = ()) -> None:
        super().begin(version, manifest, kept)
        self.came = []

    def receive(self, bucket: Bucket) -> None:
        super().receive(bucket)
        self.came += [name for name, _ in bucket]

    def commit(self, version: int) -> None:
        super().commit(version)
        self.is_filled = True


def merged_weights(rank: int, config: RunConfig, batch: RolloutBatch, export: Path) -> dict[str, Any]:
    """Of one rank: adapters after a step, and what an engine and an export get of them."""
    dtype = compute_dtype(config)
    engine = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=dtype)
    for parameter in engine.parameters():
        parameter.data = torch.zeros_like(parameter, dtype=dtype)
    receiver = Taker(engine)
    with KeepFloat64():
        trainer = Trainer(config, device=torch.device("cpu"))
        fill_b(trainer)
        start = adapters_of(trainer)
        trainer.update_weights([receiver])
        first = sorted(receiver.came)
        trainer.train_step(batch)
    report = trainer.update_weights([receiver])
    trainer.export_hf(export)
    return {
        "start": start,
        "adapters": adapters_of(trainer),
        "base": base_of(trainer),
        "scale": config.lora.alpha / (config.lora.rank or 1),
        "engine": {name: parameter.detach().clone() for name, parameter in engine.named_parameters()},
        "came first": first,
        "came": sorted(receiver.came),
        "bytes": report.bytes,
    }


def save_run(rank: int, config: RunConfig, batches: list[RolloutBatch]) -> dict[str, Any]:
    """Of one rank: a checkpoint after the first batch, and what training says and has after all."""
    trainer = Trainer(config, device=torch.device("cpu"))
    trainer.train_step(batches[0])
    folder = trainer.save(1, {"step": 1})
    trainer.finish_save()
    saved = adapters_of(trainer)
    losses = hex_losses([trainer.train_step(batch) for batch in batches[1:]])
    return {"folder": folder, "losses": losses, "saved": saved, "adapters": adapters_of(trainer)}


def load_run(rank: int, config: RunConfig, batches: list[RolloutBatch]) -> dict[str, Any]:
    """Of one rank: the error of loading that checkpoint, or how training goes on."""
    trainer = Trainer(config, device=torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of generators that belong to another mesh
        error = error_of(trainer.load)
    if error is not None:
        return {"error": error}
    loaded = adapters_of(trainer)
    losses = hex_losses([trainer.train_step(batch) for batch in batches[1:]])
    return {"error": None, "losses": losses, "loaded": loaded, "adapters": adapters_of(trainer)}
