"""Whether a batch, and a plan that a caller brings, can be trained on under these settings, before ranks see them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Literal

import numpy as np

from slimefsdp.algorithms.registry import PAIRWISE
from slimefsdp.batching.plan import Plan
from slimefsdp.batching.prefix_tree import SharedPrefixes
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError
from slimefsdp.preparation.advantages import (
    check_pairs,
    require,
    response_advantages,
    value_targets,
)


def batch_digest(batch: RolloutBatch) -> str:
    """sha256 over every field, as hex; equal on every rank that holds the same batch."""
    digest = hashlib.sha256()
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        content = b"" if value is None else np.ascontiguousarray(value).tobytes()
        digest.update(f"{field.name} {value is None} {len(content)} ".encode() + content)
    return digest.hexdigest()


def require_batch(batch: object) -> None:
    """Whether a call was given a batch at all.

    Raises:
        BatchError: it is something else.
    """
    if not isinstance(batch, RolloutBatch):
        raise BatchError(
            f"a {type(batch).__name__} was given for a batch",
            field="batch",
            hint="make one with RolloutBatch.from_samples",
        )


def check_batch(
    config: RunConfig,
    batch: RolloutBatch,
    vocab_size: int,
    *,
    loss: Literal["policy", "sft", "value"] | None,
    max_sample_tokens: int | None = None,
) -> np.ndarray | None:
    """Whether the batch can be used under these settings; its own consistency was checked when it was made.

    Args:
        vocab_size: of the model.
        loss: also check what this loss reads (rewards, groups, log-probs, values); None: just the tokens.
        max_sample_tokens: positions that the model learned; None: it has no such limit.

    Returns:
        Of a policy's loss the advantages, float64 [R], so that nobody computes them again: an estimator of the user's
        own may answer otherwise when asked twice. None where a KL in the reward enters them, and log-probs with it.

    Raises:
        BatchError: naming field, sample, value and the way out.
    """
    batch.check_token_ids(vocab_size)
    budget = config.max_pack_tokens
    longest = int(batch.lengths.argmax())
    if batch.lengths[longest] > budget:
        raise BatchError(
            f"sample {longest} has {batch.lengths[longest]} tokens, the budget is {budget} (batch.max_tokens_per_rank"
            f"={config.batch.max_tokens_per_rank} x mesh.cp={config.mesh.cp})",
            field="lengths",
            hint=f"raise batch.max_tokens_per_rank to {-(-int(batch.lengths[longest]) // config.mesh.cp)}, or drop it",
        )
    if max_sample_tokens is not None and batch.lengths[longest] > max_sample_tokens:
        raise BatchError(
            f"sample {longest} has {batch.lengths[longest]} tokens, the model learned {max_sample_tokens} positions",
            field="lengths",
            hint="drop it, or train a model with rotary positions",
        )
    if batch.temperature is not None and batch.temperature != config.rollout.temperature:
        raise BatchError(
            f"temperature={batch.temperature}, but rollout.temperature={config.rollout.temperature}",
            field="temperature",
            hint="sample and train at one temperature",
        )
    advantages = _check_policy_inputs(config, batch) if loss == "policy" else None
    if loss == "value":
        _check_value_inputs(config, batch)
    if loss is not None and config.loss.reduction == "prompt_mean":
        require(batch, "group_ids", "loss.reduction=prompt_mean counts prompts", "choose another reduction")
    return advantages


def _check_policy_inputs(config: RunConfig, batch: RolloutBatch) -> np.ndarray | None:
    lacks_kl = config.has_kl_in_reward and batch.advantages is None
    advantages = None
    if not (lacks_kl and ":" in config.estimator):  # which is asked once a step, when the KL is known
        advantages = response_advantages(config, batch)  # raises what is wrong with rewards, values and groups
    if config.loss.old_log_probs == "rollout" and batch.old_log_probs is None:
        require(batch, "rollout_log_probs", "loss.old_log_probs=rollout reads it", "set loss.old_log_probs=recompute")
    if config.correction.reads_rollout_log_probs:
        way_out = "switch the correction off"
        require(batch, "rollout_log_probs", "the correction of its mismatch reads it", way_out)
    if config.loss.policy in PAIRWISE:
        check_pairs(config, batch, advantages)
    return None if lacks_kl else advantages


def _check_value_inputs(config: RunConfig, batch: RolloutBatch) -> None:
    require(batch, "values", "a critic's loss is measured from its values before the step", "call compute_values")
    if batch.returns is None and config.has_kl_in_reward:
        for name in ("old_log_probs", "ref_log_probs"):
            require(
                batch, name, "loss.kl_in=reward takes the KL off the rewards", "call compute_log_probs on the actor"
            )
    if batch.returns is None:
        value_targets(config, batch)


def check_plan(
    plan: object, batch: RolloutBatch, *, dp: int, max_pack_tokens: int, together: np.ndarray | None = None
) -> None:
    """Whether a caller's plan fits this batch and this group: what it names is there, no pack exceeds the cap.

    Args:
        together: as `samples_together`.

    Raises:
        BatchError: naming what does not fit.
    """
    if not isinstance(plan, Plan):
        fault = f"is a {type(plan).__name__}, not a Plan"
    elif not _is_well_formed(plan):
        fault = "is not made of int64 arrays of samples, one for every micro-batch of every data rank in every update"
    elif any(len(update) != dp for update in plan.updates):
        fault = f"is not for mesh.dp_replicate x mesh.dp = {dp}"
    elif any(len({len(packs) for packs in update}) > 1 for update in plan.updates):
        fault = "gives data ranks different numbers of micro-batches in an update"
    else:
        packs = [pack for update in plan.updates for packs in update for pack in packs if len(pack)]
        first = plan.updates[: plan.num_first_epoch_updates]
        if any(pack.min() < 0 or pack.max() >= batch.num_samples for pack in packs):
            fault = f"names samples that a batch of {batch.num_samples} does not have"
        elif any(len(found) != len(np.unique(found)) for found in map(plan.samples_of, range(len(plan.updates)))):
            fault = "has a sample twice in an update"
        elif not all(_counts_all(plan, update, batch) for update in range(len(plan.updates))):
            fault = "does not count every sample of an update once in its denominators"
        elif plan.shared is not None and not plan.shared.fit(batch.tokens, batch.lengths):
            fault = "says that samples share what they do not"
        elif any(_tokens_of(plan, batch, pack) > max_pack_tokens for pack in packs):
            fault = f"has packs of more than {max_pack_tokens} tokens"
        elif together is not None and any(np.isin(together, together[pack]).sum() != len(pack) for pack in packs):
            fault = "parts samples that the loss compares"
        elif len(_samples(first)) != len(np.unique(_samples(first))):
            fault = f"has a sample twice in its first epoch, its first {plan.num_first_epoch_updates} updates"
        elif not np.isin(_samples(plan.updates), _samples(first)).all():
            fault = f"has samples in later epochs that its first {plan.num_first_epoch_updates} updates do not have"
        else:
            return
    raise BatchError(
        f"plan {fault}", field="plan", hint="make it with slimefsdp.preparation.plan.plan_training for this batch"
    )


def _is_well_formed(plan: Plan) -> bool:
    def is_indices(value: object) -> bool:
        return isinstance(value, np.ndarray) and value.dtype == np.int64 and value.ndim == 1

    shared, first = plan.shared, plan.num_first_epoch_updates
    if shared is not None and not (
        isinstance(shared, SharedPrefixes) and is_indices(shared.place) and is_indices(shared.shared)
    ):
        return False
    try:
        packs = [(len(of_rank), all(map(is_indices, of_rank))) for update in plan.updates for of_rank in update]
        # a plan cut short may name, and count, more updates
        counts = plan.counted is None or (len(plan.counted) >= len(plan.updates) and all(map(is_indices, plan.counted)))
        return all(count and good for count, good in packs) and first >= 0 and counts
    except TypeError:  # something is no sequence, or no number
        return False


def _counts_all(plan: Plan, update: int, batch: RolloutBatch) -> bool:
    if plan.counted is None:
        return True
    counted = plan.counted[update]
    are_samples = ((counted >= 0) & (counted < batch.num_samples)).all() and (np.diff(counted) > 0).all()
    return bool(are_samples and np.isin(plan.samples_of(update), counted).all())


def _tokens_of(plan: Plan, batch: RolloutBatch, pack: np.ndarray) -> int:
    return int(batch.lengths[pack].sum()) if plan.shared is None else plan.shared.tokens(batch.lengths, pack)


def _samples(updates: Sequence[Sequence[Sequence[np.ndarray]]]) -> np.ndarray:
    packs = [pack for update in updates for packs in update for pack in packs]
    return np.concatenate(packs) if packs else np.zeros(0, dtype=np.int64)
