"""Computes the advantages of a policy and the value targets of a critic from a batch's rewards and the settings.

This module looks up the functions that the settings name, and checks that the batch has the fields that they read. The
formulas are in slimefsdp/algorithms/advantages.py. Everything is computed in float64 by numpy.
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
from slimefsdp.config import TrainerConfig
from slimefsdp.config.callables import failure_of, load_function
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError, SlimeError


def check_functions(config: TrainerConfig) -> None:
    """Imports the user's own functions that advantage.estimator and loss.policy name.

    Raises:
        ConfigError: a function cannot be imported.
    """
    estimator_of(config)
    if ":" in config.loss.policy:
        load_function(config.loss.policy, field="loss.policy", example="my_losses:my_loss", takes=("tokens", "options"))


def estimator_of(config: TrainerConfig) -> Estimator:
    """Returns the advantage estimator of the settings.

    Raises:
        ConfigError: the estimator is a user's own function and cannot be imported.
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


def response_advantages(config: TrainerConfig, batch: RolloutBatch, kl_penalty: np.ndarray | None = None) -> np.ndarray:
    """Returns every response token's advantage, float64 [R]: from the batch, or computed by `advantage.estimator`.

    Args:
        kl_penalty: [R] float64, subtracted from each token's reward.

    Raises:
        BatchError: the estimator's inputs are missing, groups are too small for it, or advantages differ inside a
            sequence although loss.policy is a loss of whole sequences.
    """
    estimator, whiten = estimator_of(config), config.advantage.whiten
    if batch.advantages is not None:
        result = batch.advantages.astype(np.float64)
        result = whitened(result, batch.mask) if whiten else result
    else:
        whiten = estimator.whitens if whiten is None else whiten
        inputs = _advantage_inputs(config, batch, estimator.reads, kl_penalty)
        result = advantages(inputs, estimator, _advantage_options(config), whiten=whiten)
    if config.loss.policy in PER_SEQUENCE:
        _check_equal_inside_sequences(config, batch, result)
    return result


def has_variance(config: TrainerConfig, batch: RolloutBatch, advantages: np.ndarray | None = None) -> np.ndarray:
    """Returns False for samples of groups in which every trained token has advantage 0; bool [B].

    This holds only for estimators that compare the samples of a group, and for the batch's own advantages. For other
    estimators all samples are True: a zero is an ordinary value, and dropping it would change the weights of the other
    samples.

    Args:
        advantages: [R]; None means that they are computed here.
    """
    compares = batch.advantages is not None or estimator_of(config).compares_groups
    if batch.group_ids is None or not compares:
        return np.ones(batch.num_samples, dtype=bool)
    _, group_of = np.unique(batch.group_ids, return_inverse=True)
    values = response_advantages(config, batch) if advantages is None else advantages
    moves = batch.any_token(batch.mask & (values != 0))
    return np.bincount(group_of, moves)[group_of] > 0


def value_targets(
    config: TrainerConfig, batch: RolloutBatch, kl_penalty: np.ndarray | None = None, gae_lambda: float | None = None
) -> np.ndarray:
    """Returns a critic's targets, float64 [R]: the batch's `returns`, or lambda-returns.

    Args:
        kl_penalty: as in `response_advantages`.
        gae_lambda: replaces advantage.gae_lambda, unless it is None.

    Raises:
        BatchError: rewards or values are missing.
    """
    if batch.returns is not None:
        return batch.returns.astype(np.float64)
    inputs = _advantage_inputs(config, batch, ESTIMATORS["gae"].reads, kl_penalty)
    options = _advantage_options(config)
    return gae_targets(inputs, options if gae_lambda is None else replace(options, gae_lambda=gae_lambda))


def _advantage_options(config: TrainerConfig) -> AdvantageOptions:
    settings = config.advantage
    return AdvantageOptions(gamma=settings.gamma, gae_lambda=settings.gae_lambda, pass_k=settings.pass_k or 1)


def _advantage_inputs(
    config: TrainerConfig, batch: RolloutBatch, reads: Sequence[str], kl_penalty: np.ndarray | None
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
    rewarded = np.flatnonzero(earned)  # usually few tokens: one per sample
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

    A reward on an environment's answer belongs to the policy's tokens before the answer. Rewards before the first
    trained token of a sample move to that token. A sample without trained tokens loses its token rewards, but keeps
    its score.

    Args:
        rewarded: indices where `earned`, [R], is not 0.
    """
    if mask[rewarded].all():
        return earned
    trained = np.flatnonzero(mask)
    if not trained.size:
        return np.zeros_like(earned)
    positions = np.searchsorted(trained, rewarded, side="right") - 1
    before, after = trained[np.maximum(positions, 0)], trained[np.minimum(positions + 1, trained.size - 1)]
    is_before = (positions >= 0) & (sample_ids[before] == sample_ids[rewarded])
    is_kept = is_before | (sample_ids[after] == sample_ids[rewarded])
    owner = np.where(is_before, before, after)
    return np.bincount(owner[is_kept], earned[rewarded[is_kept]], earned.size)


def scores_of(batch: RolloutBatch) -> np.ndarray:
    """Returns the total reward of each sample, token rewards included; float64 [B]."""
    if batch.token_rewards is None and batch.rewards is not None:
        return batch.rewards.astype(np.float64) + 0.0  # + 0.0 turns -0.0 into 0.0, as sums do
    return np.bincount(batch.sample_ids, _earned(batch), batch.num_samples)


def _earned(batch: RolloutBatch) -> np.ndarray:
    """Returns the reward at each response token, float64 [R]; a sample's scalar reward is at its last token."""
    earned = np.zeros(batch.num_response_tokens)
    if batch.token_rewards is not None:
        earned += batch.token_rewards
    if batch.rewards is not None:
        earned[batch.response_offsets[1:] - 1] += batch.rewards
    return earned


def _float64(values: np.ndarray | None) -> np.ndarray | None:
    return None if values is None else values.astype(np.float64)


def _check_equal_inside_sequences(config: TrainerConfig, batch: RolloutBatch, advantages: np.ndarray) -> None:
    trained = np.flatnonzero(batch.mask)
    samples = batch.sample_ids[trained]
    differs = (advantages[trained][1:] != advantages[trained][:-1]) & (samples[1:] == samples[:-1])
    if differs.any():
        raise BatchError(
            f"advantages differ inside sample {samples[1:][differs][0]}, and loss.policy={config.loss.policy} has one "
            "for each sequence",
            field="advantages",
            hint="choose gspo_token or ppo, or an estimator of whole samples such as grpo",
        )


def check_pairs(config: TrainerConfig, batch: RolloutBatch, advantages: np.ndarray | None = None) -> None:
    """Checks that a batch holds preference pairs.

    A pair is a group of two samples that fit in one pack: one has a positive and the other a negative advantage.

    Args:
        advantages: see `has_variance`.

    Raises:
        BatchError: a group is not a pair.
    """
    require(batch, "group_ids", f"loss.policy={config.loss.policy} compares the two samples of a group", "choose ppo")
    assert batch.group_ids is not None
    trained = np.flatnonzero(batch.mask)
    signs = np.zeros(batch.num_samples)
    values = response_advantages(config, batch) if advantages is None else advantages
    signs[batch.sample_ids[trained]] = np.sign(values[trained])
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
    """Checks that a batch has the field `name`.

    Args:
        reader: end of the error message, which says what reads the field.
        way_out: end of the hint, an alternative to giving the field.

    Raises:
        BatchError: the field is missing.
    """
    if getattr(batch, name) is None:
        raise BatchError(f"{name} is missing, and {reader}", field=name, hint=f"give {name}, or {way_out}")
