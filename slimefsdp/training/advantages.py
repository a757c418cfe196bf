"""Computes the advantages of a policy and the value targets of a critic from a batch's rewards and the settings.

The formulas are in slimefsdp/algorithms/advantages.py.

Numpy only and float64; the functions of the settings are found here, and what they read is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from slimefsdp.algorithms.advantages import (
    ESTIMATORS,
    AdvantageInputs,
    AdvantageOptions,
    Estimator,
    Floats,
    advantages,
    whitened,
)
from slimefsdp.algorithms.advantages import value_targets as gae_targets
from slimefsdp.algorithms.registry import GROUPED, PER_SEQUENCE
from slimefsdp.config import RunConfig
from slimefsdp.config.callables import failure_of, load_function
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError, SlimeError


def check_functions(config: RunConfig) -> None:
    """Imports the user's own functions that the settings of advantages and loss name.

    Raises:
        ConfigError: one cannot be imported.
    """
    estimator_of(config)
    if ":" in config.loss.policy:
        load_function(config.loss.policy, field="loss.policy", example="my_losses:my_loss", takes=("tokens", "options"))


def estimator_of(config: RunConfig) -> Estimator:
    """Returns the advantage estimator of the settings.

    Raises:
        ConfigError: it is a function of the user's own that cannot be imported.
    """
    name = config.estimator
    if name in ESTIMATORS:
        return ESTIMATORS[name]._replace(compares_groups=name in GROUPED)
    function = load_function(
        name, field="advantage.estimator", example="my_advantages:my_estimator", takes=("inputs", "options")
    )

    def reported(inputs: AdvantageInputs, options: AdvantageOptions) -> Floats:
        try:
            return np.asarray(function(inputs, options), dtype=np.float64)
        except SlimeError:
            raise
        except (Exception, SystemExit) as error:  # the user's function may raise, or return, anything
            raise BatchError(
                f"advantage.estimator={failure_of(name, error)}",
                field="advantages",
                hint="return an array of numbers, one per sample or one per response token",
            ) from error

    return Estimator(reported, reads=(), compares_groups=getattr(function, "compares_groups", False) is True)


def response_advantages(config: RunConfig, batch: RolloutBatch, kl_penalty: np.ndarray | None = None) -> np.ndarray:
    """Returns advantages per response token, float64 [R]: the caller's own, or those of `advantage.estimator`.

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


def has_variance(config: RunConfig, batch: RolloutBatch, advantages: np.ndarray | None = None) -> np.ndarray:
    """Returns False for samples of groups in which no trained token has an advantage; bool [B].

    Only advantages that compare a group's samples, or the caller's own, say so by being zero: elsewhere a zero is a
    number like any other, and leaving it out of an update's denominators would change the others' weight.

    Args:
        advantages: [R], where they are known already; None: computed here.
    """
    compares = batch.advantages is not None or estimator_of(config).compares_groups
    if batch.group_ids is None or not compares:
        return np.ones(batch.num_samples, dtype=bool)
    _, group_of = np.unique(batch.group_ids, return_inverse=True)
    found = response_advantages(config, batch) if advantages is None else advantages
    moves = batch.any_token(batch.mask & (found != 0))
    return np.bincount(group_of, moves)[group_of] > 0


def value_targets(
    config: RunConfig, batch: RolloutBatch, kl_penalty: np.ndarray | None = None, gae_lambda: float | None = None
) -> np.ndarray:
    """Returns a critic's targets, float64 [R]: the caller's `returns`, or lambda-returns.

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
                "values": "give those of compute_values on a critic, as the loop of algorithm=ppo does",
                "baseline_rewards": "give baseline_rewards, the reward of the greedy response to each sample's prompt",
            }
            raise BatchError(
                f"{name} is missing, and advantage.estimator={config.estimator} is computed from it",
                field=name,
                hint=hints.get(name, f"give {name}, or advantages of your own"),
            )
    earned = _earned(batch)
    if kl_penalty is not None:
        earned -= np.where(batch.mask, kl_penalty, 0.0)
    sample_ids, mask = batch.sample_ids, batch.mask
    rewarded = np.flatnonzero(earned)  # where rewards are of whole samples, few of all tokens
    return AdvantageInputs(
        scores=np.bincount(sample_ids[rewarded], earned[rewarded], batch.num_samples).astype(np.float64),
        token_rewards=_at_trained_tokens(earned, rewarded, mask, sample_ids),
        mask=mask,
        sample_ids=sample_ids,
        group_ids=batch.group_ids,
        baseline_rewards=_float64(batch.baseline_rewards),
        values=_float64(batch.values),
    )


def _at_trained_tokens(
    earned: np.ndarray, rewarded: np.ndarray, mask: np.ndarray, sample_ids: np.ndarray
) -> np.ndarray:
    """Moves rewards at untrained tokens to the trained token before them, [R].

    What an environment answers rewards what was said before it. Ahead of a sample's first trained token they move to
    that one; a sample without any loses them here, and not in its score.

    Args:
        rewarded: where `earned`, [R], is not 0.
    """
    if mask[rewarded].all():
        return earned
    trained = np.flatnonzero(mask)
    if not trained.size:
        return np.zeros_like(earned)
    places = np.searchsorted(trained, rewarded, side="right") - 1
    before, behind = trained[np.maximum(places, 0)], trained[np.minimum(places + 1, trained.size - 1)]
    is_before = (places >= 0) & (sample_ids[before] == sample_ids[rewarded])
    is_kept = is_before | (sample_ids[behind] == sample_ids[rewarded])
    owner = np.where(is_before, before, behind)
    return np.bincount(owner[is_kept], earned[rewarded[is_kept]], earned.size)


def scores_of(batch: RolloutBatch) -> np.ndarray:
    """Returns the total reward of each sample, token rewards included; float64 [B]."""
    if batch.token_rewards is None and batch.rewards is not None:
        return batch.rewards.astype(np.float64) + 0.0  # a sum is never -0.0
    return np.bincount(batch.sample_ids, _earned(batch), batch.num_samples)


def _earned(batch: RolloutBatch) -> np.ndarray:
    """Returns the reward at each response token, float64 [R]; a sample's own reward is at its last token."""
    earned = np.zeros(batch.num_response_tokens)
    if batch.token_rewards is not None:
        earned += batch.token_rewards
    if batch.rewards is not None:
        earned[batch.response_offsets[1:] - 1] += batch.rewards
    return earned


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


def check_pairs(config: RunConfig, batch: RolloutBatch, advantages: np.ndarray | None = None) -> None:
    """Checks that a batch holds preference pairs: groups of two that fit a pack, one of positive and one of negative
    advantage.

    Args:
        advantages: as for `has_variance`.

    Raises:
        BatchError: naming the first group that is none.
    """
    require(batch, "group_ids", f"loss.policy={config.loss.policy} compares the two samples of a group", "choose ppo")
    assert batch.group_ids is not None
    trained = np.flatnonzero(batch.mask)
    signs = np.zeros(batch.num_samples)
    found = response_advantages(config, batch) if advantages is None else advantages
    signs[batch.sample_ids[trained]] = np.sign(found[trained])
    groups, group_of, sizes = np.unique(batch.group_ids, return_inverse=True, return_counts=True)
    are_not_two = sizes != 2
    are_no_opposites = (np.bincount(group_of, signs) != 0) | (np.bincount(group_of, np.abs(signs)) != 2)
    are_too_long = np.bincount(group_of, batch.lengths) > config.max_pack_tokens
    if are_not_two.any():
        index = int(np.argmax(are_not_two))
        fault = f"has {sizes[index]} samples, not two"
    elif are_no_opposites.any():
        index = int(np.argmax(are_no_opposites))
        fault = "has no chosen and rejected sample among its 2"
    elif are_too_long.any():
        index = int(np.argmax(are_too_long))
        fault = f"has more than {config.max_pack_tokens} tokens in its 2 samples"
    else:
        return
    raise BatchError(
        f"group {groups[index]} {fault}, and loss.policy=dpo compares pairs",
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
