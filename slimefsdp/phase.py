"""What is decided about an update phase before any rank works: whether the batch will do, and its plan.

Numpy only, so that the driver decides it once, without torch, and ships the plan.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from slimefsdp.attention.choice import AttentionShape, choose_strategy
from slimefsdp.config import RunConfig
from slimefsdp.credit import check_pairs, has_variance, require, response_advantages, scores_of, value_targets
from slimefsdp.data.cost import DEFAULT_COST_MODEL, ELEMENT_BYTES, CostModel
from slimefsdp.data.dimensions import ModelDimensions
from slimefsdp.data.plan import MIN_GAIN, Plan, plan_phase
from slimefsdp.data.prefixes import SharedPrefixes, find_prefixes
from slimefsdp.data.rollout import RolloutBatch
from slimefsdp.errors import BatchError, ModelError
from slimefsdp.loss.advantages import zero_variance_share
from slimefsdp.loss.names import PAIRWISE
from slimefsdp.loss.reduce import token_weights
from slimefsdp.rates import read_calibration


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
    if not (lacks_kl and ":" in config.estimator):  # which is asked once a phase, when the KL is known
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
    require(batch, "values", "a critic's loss is measured from its values before the phase", "call compute_values")
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
    raise BatchError(f"plan {fault}", field="plan", hint="make it with slimefsdp.phase.plan_training for this batch")


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


def plan_training(
    config: RunConfig,
    batch: RolloutBatch,
    cost: CostModel = DEFAULT_COST_MODEL,
    *,
    loss: Literal["policy", "sft", "value"] | None = None,
    advantages: np.ndarray | None = None,
) -> Plan:
    """The phase's updates; samples in which nothing trains are left out of the packs, not of the denominators.

    Args:
        cost: what packs and ranks are balanced by, as `cost_model_of` the model.
        loss: whose phase it is; None: the actor's under this algorithm.
        advantages: [R], those that `check_batch` found; None: computed here where they are needed.

    The shuffle is seeded by `run.seed` and the batch's own tokens, so a recorded batch is replayed in the same order.
    """
    loss = loss or config.loss_name
    counts = np.zeros(batch.num_samples, dtype=bool)
    counts[batch.sample_ids[batch.mask]] = True
    other_terms = config.loss.kl_coefficient > 0 or config.loss.entropy_coefficient > 0
    trains = counts
    if loss == "policy" and not other_terms:
        trains = counts & has_variance(config, batch, advantages)
    per_update = config.batch.samples_per_update
    one_update = per_update is None or per_update >= batch.num_samples
    return plan_phase(
        batch.lengths,
        dp=math.prod(config.mesh_of("critic" if loss == "value" else "actor")),
        max_pack_tokens=config.max_pack_tokens,
        samples_per_update=per_update,
        epochs=config.loss.epochs,
        seed=None if one_update else config.run.seed + zlib.crc32(batch.tokens.tobytes()),
        trains=trains,
        counts=counts,
        drop=config.loss.drop_zero_advantages and config.loss.max_kl is None,  # which is of all samples
        together=samples_together(config, batch, loss),
        **_sharing(config, batch),
        cost_model=cost,
        cp=config.mesh.cp,
    )


def dimensions_of(model_config: Mapping[str, Any] | None) -> ModelDimensions | None:
    """What a config.json says of the model's sizes; None where it does not."""
    try:
        return ModelDimensions.from_config(model_config or {})
    except ModelError:
        return None


def cost_model_of(config: RunConfig, model_config: Mapping[str, Any] | None) -> CostModel:
    """What a model's tokens cost under these settings; the default where its sizes are not known.

    An estimate that only balance depends on, but plans and layouts follow from it: ranks must use the same.

    Args:
        model_config: what its config.json holds.

    Raises:
        ConfigError: `attention.strategy` cannot serve the model on this mesh, or `batch.cost_model` is no calibration.
    """
    dimensions = dimensions_of(model_config)
    if dimensions is None:
        return DEFAULT_COST_MODEL
    shape = AttentionShape.of_dimensions(dimensions)
    strategy = choose_strategy(config.attention.strategy, shape, config.mesh.cp).traffic
    element_bytes = ELEMENT_BYTES[config.precision.compute_dtype]
    measured: dict[str, float] = {}
    if config.batch.cost_model is not None:
        rates = read_calibration(config.batch.cost_model, field="batch.cost_model")
        measured = {"flops_per_byte": rates.flops_per_byte, "attention_slowdown": rates.attention_slowdown}
    return CostModel.of_model(dimensions, strategy=strategy, bytes_per_element=element_bytes, **measured)


def plan_everything(
    config: RunConfig,
    batch: RolloutBatch,
    cost: CostModel = DEFAULT_COST_MODEL,
    *,
    data_ranks: int,
    loss: Literal["policy", "sft", "value"] | None = None,
) -> Plan:
    """One update that holds every sample: for log-probs, and for the primitives of custom loops.

    Args:
        data_ranks: of this group; a reference group may have others than the actor's.
        loss: that the packs are for; None: they are for log-probs or values.
    """
    return plan_phase(
        batch.lengths,
        dp=data_ranks,
        max_pack_tokens=config.max_pack_tokens,
        together=samples_together(config, batch, loss),
        **_sharing(config, batch),
        cost_model=cost,
        cp=config.mesh.cp,
    )


def may_share(config: RunConfig) -> bool:
    """Whether what samples share may be computed once."""
    # the package's calls know no sample that goes on from another
    packages_cannot = config.attention.strategy == "ring_flash_attn" and config.mesh.cp > 1
    return config.batch.share_prefixes != "never" and not packages_cannot


def _sharing(config: RunConfig, batch: RolloutBatch) -> dict[str, Any]:
    """What samples share, and how much that must save, as arguments of `plan_phase`."""
    if not may_share(config):
        return {}
    return {
        "shared": find_prefixes(batch.tokens, batch.lengths),
        "min_gain": -math.inf if config.batch.share_prefixes == "always" else MIN_GAIN,
    }


def samples_together(
    config: RunConfig, batch: RolloutBatch, loss: Literal["policy", "sft", "value"] | None
) -> np.ndarray | None:
    """The number of each sample's pair, [B], where the loss compares the samples of a pair; else None."""
    return batch.group_ids if loss == "policy" and config.loss.policy in PAIRWISE else None


def update_weights_of_tokens(
    config: RunConfig, batch: RolloutBatch, samples: np.ndarray, denominator: float | None = None
) -> np.ndarray:
    """The loss weight of every response token in an update of `samples`; float64 [R], 0 outside it.

    Args:
        samples: all that count in the update (`Plan.counted_of`), computed or not.
    """
    if denominator is not None and not isinstance(denominator, int | float):
        raise BatchError(f"denominator={denominator!r} is no number", field="denominator", hint="give a number > 0")
    in_update = np.zeros(batch.num_samples, dtype=bool)
    in_update[samples] = True
    return token_weights(
        batch.mask & in_update[batch.sample_ids],
        batch.sample_ids,
        batch.num_samples,
        config.loss.reduction,
        constant_length=config.loss.constant_length,
        denominator=denominator,
        group_ids=batch.group_ids,
    )


def phase_metrics(
    config: RunConfig,
    plan: Plan,
    batch: RolloutBatch,
    cost: CostModel = DEFAULT_COST_MODEL,
    *,
    advantages: np.ndarray | None = None,
) -> dict[str, float]:
    """What a phase was about: updates, dropped samples, balance by `cost`, lengths, advantages.

    Args:
        advantages: [R], where the loss has them: of the trained tokens mean, standard deviation and largest size.
    """
    trained = sum(int(batch.lengths[plan.samples_of(update)].sum()) for update in range(len(plan.updates)))
    metrics = {
        "updates": float(len(plan.updates)),
        "empty_updates": float(plan.num_skipped_updates),
        "dropped_samples": float(plan.num_dropped),
        "plan_imbalance": plan.imbalance(batch.lengths, cost, config.mesh.cp),
        "shared_tokens": 1 - plan.computed_tokens(batch.lengths) / trained if trained else 0.0,
        "response_length": float(batch.response_lengths.mean()),
        "response_length_max": float(batch.response_lengths.max()),
    }
    if advantages is not None:
        of_trained = advantages[batch.mask]
        metrics |= {
            "advantage": float(of_trained.mean()),
            "advantage_std": float(of_trained.std()),
            "advantage_abs_max": float(np.abs(of_trained).max()),
        }
    if batch.group_ids is not None and not (batch.rewards is None and batch.token_rewards is None):
        metrics["zero_variance_groups"] = zero_variance_share(scores_of(batch), batch.group_ids)
    return metrics
