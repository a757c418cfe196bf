"""One update written from the formulas in plain PyTorch, and the batch that it and the product are compared on."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slimefsdp.batching.plan import Plan
from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.data.rollout_batch import RolloutBatch
from tests.support.tiny_models import plain_model

LENGTHS = [(31, 9), (12, 11), (7, 1), (40, 25), (2, 1), (9, 3), (18, 6), (23, 17)]
TEMPERATURE = 0.8


def settings(path: Path, **sections: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "model": {"path": str(path)},
        "mesh": {"device": "cpu"},
        "precision": {"compute_dtype": "float64"},
        "batch": {"max_tokens_per_rank": 64, "samples_per_update": 3},
        "loss": {"clip_low": 0.1, "clip_high": 0.15, "kl_coefficient": 0.3, "entropy_coefficient": 0.05, "epochs": 2},
        "optim": {"name": "sgd", "lr": 0.05, "total_updates": 100, "weight_decay": 0.0},
        "rollout": {"temperature": TEMPERATURE},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return config_from_dict(tree)


def make_batch(path: Path, *, seed: int = 0) -> RolloutBatch:
    """Ragged samples with holes in their masks, one without variance in its group, old and reference log-probs."""
    rng = np.random.default_rng(seed)
    samples = []
    for index, (length, response) in enumerate(LENGTHS):
        mask = rng.random(response) > 0.3
        mask[0] = True
        samples.append(
            {
                "tokens": rng.integers(0, 96, length).tolist(),
                "response_length": response,
                "reward": 1.0 if index in (4, 5) else float(rng.random()),
                "group_id": index // 2,
                "loss_mask": mask.tolist(),
                "old_log_probs": -rng.random(response) * 6,
                "ref_log_probs": -rng.random(response) * 6,
            }
        )
    return RolloutBatch.from_samples(samples)


class PlainStep:
    """One update written from the formulas: separate forwards, full log-softmax, no packing, no sharding."""

    def __init__(self, path: Path, config: RunConfig, dtype: torch.dtype) -> None:
        self.model = plain_model(path, dtype)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not any(fnmatchcase(name, pattern) for pattern in config.model.frozen or ()))
        self.config = config
        optim = config.optim
        assert optim.weight_decay == 0 and optim.schedule == "constant", "not written out here"
        self.optimizer: torch.optim.Optimizer
        if optim.name == "sgd":
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=optim.lr, momentum=optim.momentum)
        else:
            parameters = self.model.parameters()
            self.optimizer = torch.optim.AdamW(parameters, optim.lr, optim.betas, optim.eps, weight_decay=0.0)

    def backward(self, batch: RolloutBatch, chosen: np.ndarray) -> float:
        """Adds the gradients of one update's samples; returns its loss."""
        total = 0.0
        settings = self.config.loss
        samples = batch.to_samples()
        rewards = np.array([float(s["reward"]) for s in samples])
        groups = np.array([s["group_id"] for s in samples])
        trained_tokens = sum(int(np.sum(samples[i]["loss_mask"])) for i in chosen)
        for i in chosen:
            sample = samples[i]
            group = rewards[groups == groups[i]]
            advantage = (rewards[i] - group.mean()) / (group.std(ddof=1) + 1e-6)
            tokens = torch.as_tensor(np.array(sample["tokens"]))
            logits = self.model(input_ids=tokens[None]).logits[0, :-1] / TEMPERATURE
            table = logits.log_softmax(-1)[-sample["response_length"] :]
            log_probs = table.gather(-1, tokens[-sample["response_length"] :, None])[:, 0]
            entropy = -(table.exp() * table).sum(-1)
            given = ("old_log_probs", "ref_log_probs")
            old, reference = (torch.as_tensor(np.array(sample[name])).to(table) for name in given)
            ratio = (log_probs - old).exp()
            clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
            surrogate = -torch.minimum(ratio * advantage, clipped * advantage)
            kl = (reference - log_probs).exp() - (reference - log_probs) - 1
            per_token = surrogate + settings.kl_coefficient * kl - settings.entropy_coefficient * entropy
            mask = torch.as_tensor(np.array(sample["loss_mask"]))
            loss = per_token[mask].sum() / trained_tokens
            loss.backward()
            total += loss.item()
        return total

    def train(self, batch: RolloutBatch, plan: Plan) -> list[float]:
        """All updates of a plan, one after the other; returns their losses."""
        losses = []
        for update in range(len(plan.updates)):
            losses.append(self.backward(batch, plan.counted_of(update)))  # with those that nothing trains
            self.step()
        return losses

    def step(self) -> None:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        norm = torch.stack([p.grad.double().square().sum() for p in trained]).sum().sqrt()
        if norm > self.config.optim.max_grad_norm:
            for parameter in trained:
                parameter.grad.mul_(self.config.optim.max_grad_norm / norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad.clone() for name, p in self.model.named_parameters()}

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}
