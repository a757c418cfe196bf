"""Every algorithm a second time, from its paper: one process, one sample at a time, nothing packed, masked or sharded.

A sample here is its trained tokens alone, as if the others of its response were not there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from tests.support.float64 import KeepFloat64
from tests.support.tiny_models import plain_model


class PlainPolicy:
    """Plain Hugging Face on one sample after the other, with whole tables of log-probs."""

    def __init__(self, path: Path, temperature: float) -> None:
        self.temperature = temperature
        with KeepFloat64():
            self.model = plain_model(path, torch.float64)

    def says(self, batch: RolloutBatch) -> list[tuple[Tensor, Tensor]]:
        """Log-probs and entropies of each sample's response tokens, with their graph."""
        found = []
        for sample in batch.to_samples():
            tokens, length = torch.tensor(sample["tokens"]), sample["response_length"]
            with KeepFloat64():
                logits = self.model(input_ids=tokens[None]).logits[0, :-1] / self.temperature
            table = logits.log_softmax(-1)[-length:]
            found.append((table.gather(-1, tokens[-length:, None])[:, 0], -(table.exp() * table).sum(-1)))
        return found

    def train(
        self,
        config: RunConfig,
        batch: RolloutBatch,
        said: Sequence[tuple[Tensor, Tensor]],
        updates: Sequence[np.ndarray] | None,
        rate: float,
    ) -> PlainTraining:
        """A training step of plain SGD; the weights are afterwards what they were.

        Args:
            said: what this policy says of the batch; its graph stays.
            updates: sample indices of each, without fully masked ones; None: one, of all that have a token.
        """
        parameters = dict(self.model.named_parameters())
        start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        done = PlainTraining([], {name: torch.zeros_like(value) for name, value in start.items()}, [])
        for number, indices in enumerate([None] if updates is None else updates):
            now = self.says(batch) if number else said
            samples = trained_samples(config, batch, now, said)
            chosen = [one for one in samples if len(one)] if indices is None else [samples[i] for i in indices]
            loss = update_loss(config, chosen)
            done.losses.append(loss.item())
            computed = [one for one in chosen if trains(config, one, samples)]
            done.corrections.append(torch.cat([correction(config, sample) for sample in computed]))
            gradients = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True)
            for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
                done.moved[name] += gradient
                parameter.data -= rate * gradient  # autograd must not notice: the graph of `said` serves other steps
        for name, parameter in parameters.items():
            parameter.data.copy_(start[name])
        return done


@dataclass
class PlainTraining:
    """What came of the updates of a step."""

    losses: list[float]
    moved: dict[str, Tensor]  # what they took off the weights, over the rate
    corrections: list[Tensor]  # of each update's tokens, but for groups of equal rewards that nothing trains


@dataclass
class Sample:
    """What is known of n trained tokens, in float64."""

    log_probs: Tensor  # [n], as the next two
    entropy: Tensor
    old: Tensor
    fields: dict[str, Any]  # of the batch: numbers, and [n] arrays
    advantages: np.ndarray | None = None  # [n]

    def tensor(self, name: str) -> Tensor:
        """A field of the batch, [n]."""
        return torch.tensor(self.fields[name])

    def __len__(self) -> int:
        return len(self.log_probs)


def trained_samples(
    config: RunConfig,
    batch: RolloutBatch,
    said: Sequence[tuple[Tensor, Tensor]],
    before: Sequence[tuple[Tensor, Tensor]],
) -> list[Sample]:
    """Every sample of the batch with its advantages, a fully masked one with no token.

    Args:
        said: what the policy says now.
        before: what it said at the start of the step.
    """
    samples = []
    for index, given in enumerate(batch.to_samples()):
        mask = given.pop("loss_mask")
        fields = {
            name: value[mask].astype(np.float64) if name != "tokens" and isinstance(value, np.ndarray) else value
            for name, value in given.items()
        }
        log_probs, entropy = (values[torch.tensor(mask)] for values in said[index])
        old = before[index][0].detach()[torch.tensor(mask)]
        if "old_log_probs" in fields:
            old = torch.tensor(fields["old_log_probs"])
        elif config.loss.old_log_probs == "rollout":
            old = torch.tensor(fields["rollout_log_probs"])
        samples.append(Sample(log_probs, entropy, old, fields))
    set_advantages(config, samples)
    return samples


# ---------------------------------------------------------------------- advantages


def set_advantages(config: RunConfig, samples: list[Sample]) -> None:
    """The batch's own, or those of the settings' estimator; whitened where asked for."""
    settings, name = config.advantage, config.estimator
    is_given = "advantages" in samples[0].fields
    earned = [[] if is_given else token_rewards(config, sample) for sample in samples]
    scores = [float(sum(rewards)) if len(sample) else sample.fields.get("reward", 0.0)
              for sample, rewards in zip(samples, earned, strict=True)]  # fmt: skip
    for index, sample in enumerate(samples):
        if is_given:
            sample.advantages = sample.fields["advantages"]
        elif name in ("reinforce_pp", "remax", "gae"):
            sample.advantages = np.array(advantages_of_tokens(config, sample, earned[index]))
        else:
            group = [i for i, other in enumerate(samples) if other.fields["group_id"] == sample.fields["group_id"]]
            advantage = advantage_of_sample(config, index, group, scores, [len(other) for other in samples])
            sample.advantages = np.full(len(sample), advantage)
    is_usual = not is_given and name in ("reinforce_pp", "reinforce_pp_baseline", "gae")
    if is_usual if settings.whiten is None else settings.whiten:
        everything = np.concatenate([sample.advantages for sample in samples])
        for sample in samples:
            sample.advantages = (sample.advantages - everything.mean()) / (everything.std() + 1e-8)


def token_rewards(config: RunConfig, sample: Sample) -> list[float]:
    """Where they were earned, the sample's own at its last token, less the KL where that is part of the reward."""
    rewards = list(sample.fields.get("token_rewards", np.zeros(len(sample))))
    if config.loss.kl_coefficient and config.loss.kl_in == "reward":
        penalty = config.loss.kl_coefficient * kl(config, sample.old, sample.tensor("ref_log_probs"))
        rewards = [reward - taken for reward, taken in zip(rewards, penalty.tolist(), strict=True)]
    if rewards:
        rewards[-1] += sample.fields.get("reward", 0.0)
    return rewards


def advantages_of_tokens(config: RunConfig, sample: Sample, rewards: list[float]) -> list[float]:
    """Of the estimators that look at single tokens."""
    settings, steps = config.advantage, range(len(rewards))
    if config.estimator == "reinforce_pp":
        return [sum(settings.gamma ** (s - t) * rewards[s] for s in steps if s >= t) for t in steps]
    if config.estimator == "remax":
        return [sum(rewards[t:]) - sample.fields["baseline_reward"] for t in steps]
    values = [*sample.fields["values"], 0.0]
    deltas = [rewards[t] + settings.gamma * values[t + 1] - values[t] for t in steps]
    discount = settings.gamma * settings.gae_lambda
    return [sum(discount ** (s - t) * deltas[s] for s in steps if s >= t) for t in steps]


def advantage_of_sample(
    config: RunConfig, index: int, group: list[int], scores: list[float], lengths: list[int]
) -> float:
    """Of the estimators that compare whole samples."""
    mine, rewards = scores[index], np.array([scores[i] for i in group])
    match config.estimator:
        case "grpo":
            return (mine - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        case "dr_grpo" | "reinforce_pp_baseline":
            return mine - rewards.mean()
        case "rloo":
            return mine - np.mean([scores[i] for i in group if i != index])
        case "opo":
            return mine - sum(scores[i] * lengths[i] for i in group) / sum(lengths[i] for i in group)
        case "maxrl":
            return (mine - rewards.mean()) / rewards.mean() if rewards.mean() else 0.0
        case "pass_at_k":
            subsets = list(itertools.combinations(group, config.advantage.pass_k))
            passes = np.array([max(scores[i] == max(scores) for i in subset) for subset in subsets], dtype=np.float64)
            with_me = passes[[index in subset for subset in subsets]]
            return (with_me.mean() - passes.mean()) / (passes.std() + 1e-6)
        case "raw":
            return mine
    raise NotImplementedError(config.estimator)


# ---------------------------------------------------------------------- losses of one sample's tokens


def policy_loss(config: RunConfig, sample: Sample) -> Tensor:
    """Of all losses but dpo, [n]."""
    settings, now, old = config.loss, sample.log_probs, sample.old
    advantages = torch.tensor(sample.advantages)
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    ratio = (now - old).exp()
    match settings.policy:
        case "ppo":
            loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
            if settings.dual_clip is not None:
                bounded = torch.minimum(loss, -settings.dual_clip * advantages)
                loss = torch.where(advantages < 0, bounded, loss)
            return loss
        case "gspo":
            ratio = (now - old).mean().exp()
            return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
        case "gspo_token":
            ratio = (now - old).mean().exp().detach() * now.exp() / now.exp().detach()
            return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
        case "cispo":
            return -ratio.clamp(low, high).detach() * advantages * now
        case "sapo":
            cool, hot = 1.0, 1.05
            tau = torch.where(advantages > 0, torch.full_like(now, cool), torch.full_like(now, hot))
            return -advantages * 4 / tau / (1 + (-tau * (ratio - 1)).exp())
        case "gmpo":
            sign = advantages.sign()
            clipped = (now - old).clamp(-settings.clip_low, settings.clip_high)
            bounded = sign * torch.minimum(sign * (now - old), sign * clipped)
            return -(bounded.exp().prod() ** (1 / len(sample))) * advantages
        case "reinforce":
            return -advantages * now
        case "importance_sampling":
            return -ratio * advantages
        case "dro":
            return -(advantages * now - settings.beta / 2 * (now - old) ** 2)
    raise NotImplementedError(settings.policy)


def correction(config: RunConfig, sample: Sample) -> Tensor:
    """What each token's policy loss is multiplied by, [n]."""
    settings = config.correction
    low = 0.0 if settings.low is None else settings.low
    high = np.inf if settings.high is None else settings.high
    weights = torch.ones(len(sample), dtype=torch.float64)
    sampled = sample.old
    if "rollout_log_probs" in sample.fields:
        sampled = sample.tensor("rollout_log_probs")
        trainer = sample.log_probs.detach() if config.loss.old_log_probs == "rollout" else sample.old
        rho = trainer.exp() / sampled.exp()
        match settings.method:
            case "importance" | "mis" | "icepop":
                weights = torch.where((rho >= low) & (rho <= high), rho, 0.0)
            case "tis":
                weights = rho.clamp(max=high)
            case "sequence_tis":
                weights = weights * min(float(rho.prod()), high)
            case "sequence_mis":
                weights = weights * (float(rho.prod()) if low <= rho.prod() <= high else 0.0)
            case "geometric_mis":
                weights = rho * float(low <= rho.log().mean().exp() <= high)
        if settings.veto_below is not None and (rho < settings.veto_below).any():
            weights = torch.zeros_like(weights)
    if settings.opsm_threshold is not None:
        has_left = (sampled - sample.log_probs.detach()).mean() > settings.opsm_threshold
        weights = torch.where(has_left & (torch.tensor(sample.advantages) < 0), 0.0, weights)
    return weights


def kl(config: RunConfig, now: Tensor, ref: Tensor) -> Tensor:
    """[n] estimates of KL(policy || reference)."""
    r = ref.exp() / now.exp()
    estimates = {"k1": -r.log(), "k2": r.log() ** 2 / 2, "k3": r - 1 - r.log(), "abs": r.log().abs()}
    return estimates[config.kl_estimator]


def token_losses(config: RunConfig, sample: Sample, policy: Tensor) -> Tensor:
    """All terms of the loss of each token, [n]."""
    settings = config.loss
    loss = policy * correction(config, sample)
    if settings.kl_coefficient and settings.kl_in == "loss":
        estimate = kl(config, sample.log_probs, sample.tensor("ref_log_probs"))
        if config.is_kl_unbiased:
            estimate = (sample.log_probs - sample.old).exp() * estimate
        loss = loss + settings.kl_coefficient * estimate
    return loss - settings.entropy_coefficient * sample.entropy


# ---------------------------------------------------------------------- the loss of an update


def update_loss(config: RunConfig, samples: list[Sample]) -> Tensor:
    """Of the samples of one update, those without a trained token aside."""
    samples = [sample for sample in samples if len(sample)]
    if config.loss.policy == "dpo":
        policy = [pair_loss(config, sample, samples) for sample in samples]
    else:
        policy = [policy_loss(config, sample) for sample in samples]
    losses = [token_losses(config, sample, own) for sample, own in zip(samples, policy, strict=True)]
    match config.loss.reduction:
        case "token_mean":
            return torch.cat(losses).mean()
        case "sequence_mean":
            return torch.stack([loss.mean() for loss in losses]).mean()
        case "constant":
            return torch.stack([loss.sum() / config.loss.constant_length for loss in losses]).mean()
    prompts: dict[int, list[Tensor]] = {}
    for sample, loss in zip(samples, losses, strict=True):
        prompts.setdefault(sample.fields["group_id"], []).append(loss)
    return torch.stack([torch.cat(of_prompt).mean() for of_prompt in prompts.values()]).mean()


def pair_loss(config: RunConfig, sample: Sample, samples: list[Sample]) -> Tensor:
    """DPO of the pair that a sample belongs to, []; chosen is the one of the larger reward."""
    pair = [other for other in samples if other.fields["group_id"] == sample.fields["group_id"]]
    rejected, chosen = sorted(pair, key=lambda other: other.fields["reward"])
    gains = [(one.log_probs - one.tensor("ref_log_probs")).sum() for one in (chosen, rejected)]
    return -torch.log(1 / (1 + torch.exp(-config.loss.beta * (gains[0] - gains[1]))))


def trains(config: RunConfig, sample: Sample, samples: list[Sample]) -> bool:
    """Whether anything moves a sample of a step: it has a token, and its group is not one of equal rewards."""
    others = config.loss.kl_coefficient > 0 or config.loss.entropy_coefficient > 0 or config.loss.policy == "dro"
    compares = config.advantage.estimator in (None, "grpo", "dr_grpo", "rloo", "opo", "maxrl", "pass_at_k")
    group = [other for other in samples if other.fields["group_id"] == sample.fields["group_id"]]
    is_dead = compares and not others and not any(bool((other.advantages != 0).any()) for other in group)
    return len(sample) > 0 and not is_dead
