"""A critic's settings, a batch for it, and its updates written from the formulas in plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model

from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.data.rollout_batch import RolloutBatch
from tests.support.classifiers import plain_classifier, separate_values
from tests.support.plain_lora import ALL
from tests.support.plain_step import make_batch, settings

CLIP, GAMMA, LAMBDA = 0.3, 0.97, 0.9


def critic_settings(path: Path, **sections: Any) -> RunConfig:
    """PPO, without the terms that belong to a policy's loss."""
    tree = settings(path, loss={"kl_coefficient": 0.0, "entropy_coefficient": 0.0}).model_dump(exclude_unset=True)
    tree |= {
        "algorithm": "ppo",
        "advantage": {"gamma": GAMMA, "gae_lambda": LAMBDA},
        "critic": {"clip": CLIP},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return config_from_dict(tree)


def critic_batch(seed: int = 0) -> RolloutBatch:
    """Holes in the masks, rewards of whole samples and of tokens, values near which the clip decides for some."""
    rng = np.random.default_rng(seed)
    batch = make_batch(Path(), seed=seed)
    values, token_rewards = rng.normal(size=(2, batch.num_response_tokens))
    return batch.replace(values=values, token_rewards=token_rewards * batch.mask)


def plain_targets(batch: RolloutBatch, gae_lambda: float = LAMBDA, kl: np.ndarray | None = None) -> np.ndarray:
    """Lambda-returns of the trained tokens by their recursion, token by token; 0 elsewhere."""
    assert batch.values is not None and batch.token_rewards is not None and batch.rewards is not None
    targets = np.zeros(batch.num_response_tokens)
    for sample in range(batch.num_samples):
        trained = np.flatnonzero((batch.sample_ids == sample) & batch.mask)
        next_value = next_target = 0.0
        for place in reversed(trained):
            reward = float(batch.token_rewards[place]) - (0.0 if kl is None else kl[place])
            reward += float(batch.rewards[sample]) if place == trained[-1] else 0.0
            targets[place] = reward + GAMMA * ((1 - gae_lambda) * next_value + gae_lambda * next_target)
            next_value, next_target = float(batch.values[place]), targets[place]
    return targets


class PlainCritic:
    """Separate forwards of transformers' own classifier, the value loss written out, torch's SGD.

    Args:
        adapters: of peft, which train in place of all but the head, by this library's names; their targets are all.
    """

    def __init__(self, path: Path, config: RunConfig, adapters: dict[str, torch.Tensor] | None = None) -> None:
        self.model = plain_classifier(path)
        if adapters is not None:
            lora = LoraConfig(
                r=config.lora.rank, lora_alpha=config.lora.alpha, target_modules=ALL, modules_to_save=["score"]
            )
            self.model = get_peft_model(self.model, lora, autocast_adapter_dtype=False)
        self.trained = {_own_name(name): one for name, one in self.model.named_parameters() if one.requires_grad}
        with torch.no_grad():
            for name, parameter in (adapters or {}).items():
                self.trained[name].copy_(parameter)
        lr = config.critic.lr or config.optim.lr
        self.optimizer = torch.optim.SGD(self.trained.values(), lr=lr, momentum=getattr(config.optim, "momentum", 0.9))
        self.max_norm = config.optim.max_grad_norm

    def backward(self, batch: RolloutBatch, targets: np.ndarray, chosen: np.ndarray) -> float:
        returns = torch.tensor(targets[np.isin(batch.sample_ids, chosen)])
        batch = batch.select(chosen)
        values, old = separate_values(self.model, batch), torch.tensor(np.array(batch.values), dtype=torch.float64)
        bounded = torch.minimum(torch.maximum(values, old - CLIP), old + CLIP)
        per_token = 0.5 * torch.maximum((values - returns) ** 2, (bounded - returns) ** 2)
        loss = per_token[torch.tensor(batch.mask)].mean()
        loss.backward()
        return loss.item()

    def step(self) -> None:
        gradients = [parameter.grad for parameter in self.trained.values()]
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        for gradient in gradients:
            gradient.mul_(min(1.0, self.max_norm / float(norm)))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: parameter.grad.clone() for name, parameter in self.trained.items()}

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.trained.items()}


def _own_name(name: str) -> str:
    for theirs, ours in (("base_model.model.", ""), (".modules_to_save.default", ""), (".default.weight", "")):
        name = name.replace(theirs, ours)
    return name
