"""Credit: what a batch's rewards say about each of its tokens, as advantages of a policy or targets of a critic.

Numpy only and float64; the functions of the settings are found here, and what they read is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from slimefsdp.config import RunConfig
from slimefsdp.data.rollout import RolloutBatch
from slimefsdp.errors import BatchError
from slimefsdp.functions import load_function
from slimefsdp.loss.advantages import (
    ESTIMATORS,
    AdvantageInputs,
    AdvantageOptions,
    Estimator,
    advantages,
    whitened,
)
from slimefsdp.loss.advantages import value_targets as gae_targets
from slimefsdp.loss.names import PER_SEQUENCE


def check_functions(config: RunConfig) -> None:
    """Imports the functions of the user's own that advantages and loss name.

    Raises:
        ConfigError: one cannot be imported.
    """
    estimator_of(config)
    if ":" in config.loss.policy:
        load_function(config.loss.policy, field="loss.policy", example="my_losses:my_loss")


def estimator_of(config: RunConfig) -> Estimator:
    """The advantage estimator of the settings.

    Raises:
        ConfigError: it is a function of the user's own that cannot be imported.
    """
    name = config.estimator
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    return Estimator(load_function(name, field="advantage.estimator", example="my_advantages:my_estimator"), reads=())


def response_advantages(config: RunConfig, batch: RolloutBatch, kl_penalty: np.ndarray | None = None) -> np.ndarray:
    """Advantages per response token, float64 [R]: the caller's own, or those of `advantage.estimator`.

    Args:
        kl_penalty: [R] float64, what the KL takes off each token's reward.

    Raises:
        BatchError: what the estimator reads is missing, groups are too small for it, or a loss of whole sequences would
            meet advantages that differ inside one.
    """
    estimator, whiten = estimator_of(config), config.advantage.whiten
    if batch.advantages is not None:
        found = batch.advantages.astype(np.float64)
        found = whitened(found, batch.mask) if whiten else found
    else:
        whiten = estimator.whitens if whiten is None else whiten
        inputs = _advantage_inputs(config, batch, estimator.reads, kl_penalty)
        found = advantages(inputs, estimator, _advantage_options(config), whiten=whiten)
    if config.loss.policy in PER_SEQUENCE:
        _check_equal_inside_sequences(config, batch, found)
    return found


def value_targets(
    config: RunConfig, batch: RolloutBatch, kl_penalty: np.ndarray | None = None, gae_lambda: float | None = None
) -> np.ndarray:
    """What a critic's values should be, float64 [R]: the caller's `returns`, or lambda-returns.

    Args:
        kl_penalty: as in `response_advantages`.
        gae_lambda: None: advantage.gae_lambda.

    Raises:
        BatchError: rewards or values are missing.
    """
    if batch.returns is not None:
        return batch.returns.astype(np.float64)
    inputs = _advantage_inputs(config, batch, ESTIMATORS["gae"].reads, kl_penalty)
    options = _advantage_options(config)
    return gae_targets(inputs, options if gae_lambda is None else replace(options, gae_lambda=gae_lambda))


def _advantage_options(config: RunConfig) -> AdvantageOptions:
    settings = config.advantage
    return AdvantageOptions(gamma=settings.gamma, gae_lambda=settings.gae_lambda, pass_k=settings.pass_k or 1)


def _advantage_inputs(
    config: RunConfig, batch: RolloutBatch, reads: Sequence[str], kl_penalty: np.ndarray | None
) -> AdvantageInputs:
    for name in reads:
        if getattr(batch, name) is None and not (name == "rewards" and batch.token_rewards is not None):
            hints = {
                "values": "set algorithm=ppo, whose loop asks the critic, or give values of compute_values",
                "baseline_rewards": "give baseline_rewards, the reward of the greedy response to each sample's prompt",
            }
            raise BatchError(
                f"{name} is missing, and advantage.estimator={config.estimator} is computed from it",
                field=name,
                hint=hints.get(name, f"give {name}, or advantages of your own"),
            )
    trained, sample_ids, none = batch.mask, batch.sample_ids, np.zeros(batch.num_samples)
    per_token = np.zeros(batch.num_response_tokens)
    if batch.token_rewards is not None:
        per_token[trained] += batch.token_rewards[trained]
    if kl_penalty is not None:
        per_token[trained] -= kl_penalty[trained]
    rewards = none if batch.rewards is None else batch.rewards.astype(np.float64)
    scores = rewards + np.bincount(sample_ids, per_token, batch.num_samples)
    last = np.full(batch.num_samples, -1)
    last[sample_ids[trained]] = np.flatnonzero(trained)  # the last one of each sample stays
    per_token[last[last >= 0]] += rewards[last >= 0]
    return AdvantageInputs(
        scores=scores,
        token_rewards=per_token,
        mask=trained,
        sample_ids=sample_ids,
        group_ids=batch.group_ids,
        baseline_rewards=_float64(batch.baseline_rewards),
        values=_float64(batch.values),
    )


def _float64(values: np.ndarray | None) -> np.ndarray | None:
    return None if values is None else values.astype(np.float64)


def _check_equal_inside_sequences(config: RunConfig, batch: RolloutBatch, found: np.ndarray) -> None:
    trained = np.flatnonzero(batch.mask)
    samples = batch.sample_ids[trained]
    differs = (found[trained][1:] != found[trained][:-1]) & (samples[1:] == samples[:-1])
    if differs.any():
        raise BatchError(
            f"advantages differ inside sample {samples[1:][differs][0]}, and loss.policy={config.loss.policy} has one "
            "for each sequence",
            field="advantages",
            hint="choose gspo_token or ppo, or an estimator of whole samples such as grpo",
        )


def check_pairs(config: RunConfig, batch: RolloutBatch) -> None:
    """Whether a batch holds preference pairs: groups of two, one of positive and one of negative advantage, that fit.

    Raises:
        BatchError: naming the first group that is none.
    """
    require(batch, "group_ids", f"loss.policy={config.loss.policy} compares the two samples of a group", "choose ppo")
    assert batch.group_ids is not None
    trained = np.flatnonzero(batch.mask)
    signs = np.zeros(batch.num_samples)
    signs[batch.sample_ids[trained]] = np.sign(response_advantages(config, batch)[trained])
    groups, group_of, sizes = np.unique(batch.group_ids, return_inverse=True, return_counts=True)
    for fault, wrong in (
        ("has {} samples, not two", sizes != 2),
        ("has no chosen and rejected sample among its {}", (np.bincount(group_of, signs) != 0) | (
            np.bincount(group_of, np.abs(signs)) != 2)),
        (f"has more than {config.max_pack_tokens} tokens in its {{}} samples", (
            np.bincount(group_of, batch.lengths) > config.max_pack_tokens)),
    ):  # fmt: skip
        if wrong.any():
            index = int(np.argmax(wrong))
            raise BatchError(
                f"group {groups[index]} {fault.format(sizes[index])}, and loss.policy=dpo compares pairs",
                field="group_ids",
                hint="give two samples of different reward for each prompt, or raise batch.max_tokens_per_rank",
            )


def require(batch: RolloutBatch, name: str, reader: str, way_out: str) -> None:
    """Refuses a batch without the field `name`.

    Args:
        reader: who reads it, in words.
        way_out: what to do instead of giving it.

    Raises:
        BatchError: it is missing.
    """
    if getattr(batch, name) is None:
        raise BatchError(f"{name} is missing, and {reader}", field=name, hint=f"give {name}, or {way_out}")
