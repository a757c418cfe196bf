"""Plans a training step from settings and a batch, and computes the metrics that need no rank.

The module uses only numpy, so that the driver can plan once without torch and send the plan to the ranks.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from slimefsdp.algorithms.advantages import zero_variance_share
from slimefsdp.algorithms.reduction import sample_weights
from slimefsdp.algorithms.registry import PAIRWISE, TRAINS_WITHOUT_ADVANTAGE, LossName
from slimefsdp.attention.select import AttentionShape, choose_strategy
from slimefsdp.batching.cost import DEFAULT_COST_MODEL, ELEMENT_BYTES, CostModel
from slimefsdp.batching.plan import MIN_GAIN, PackLimits, Plan, PrefixSharing, UpdateCut, plan_batch
from slimefsdp.batching.prefix_tree import find_prefixes
from slimefsdp.config import TrainerConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError, ModelError
from slimefsdp.estimate.hardware import read_calibration
from slimefsdp.model_spec import ModelSpec
from slimefsdp.training.advantages import (
    has_variance,
    scores_of,
)


def plan_training(
    config: TrainerConfig,
    batch: RolloutBatch,
    cost: CostModel = DEFAULT_COST_MODEL,
    *,
    loss: LossName | None = None,
    advantages: np.ndarray | None = None,
) -> Plan:
    """Plans the updates of a step.

    Samples in which no token trains are left out of the packs, but not of the denominators. The shuffle is seeded by
    `run.seed` and the batch's tokens, so a recorded batch is replayed in the same order.

    Args:
        cost: the cost model that packs and ranks are balanced by; see `cost_model_of`.
        loss: the loss that the step trains; None means the actor's loss under this algorithm.
        advantages: [R], the result of `checked_advantages`; None means that they are computed here if needed.
    """
    loss = loss or config.loss_name
    counts = batch.any_token(batch.mask)
    other_terms = config.loss.kl_coefficient > 0 or config.loss.entropy_coefficient > 0
    other_terms |= config.loss.policy in TRAINS_WITHOUT_ADVANTAGE
    trains = counts
    if loss == "policy" and not other_terms:
        trains = counts & has_variance(config, batch, advantages)
    per_update = config.batch.samples_per_update
    one_update = per_update is None or per_update >= batch.num_samples
    cut = UpdateCut(
        samples_per_update=per_update,
        epochs=config.loss.epochs,
        seed=None if one_update else config.run.seed + zlib.crc32(batch.tokens.data),
        trains=trains,
        counts=counts,
        drop=config.loss.max_kl is None,  # max_kl is measured over all samples
    )
    data_ranks = math.prod(config.mesh_of("critic" if loss == "value" else "actor"))
    return plan_batch(
        batch.lengths,
        _limits(config, data_ranks, cost),
        cut,
        together=samples_together(config, batch, loss),
        sharing=_sharing(config, batch),
    )


def model_spec_of(model_config: Mapping[str, Any] | None) -> ModelSpec | None:
    """Returns the sizes of a model from the content of its config.json; None if a size is missing or invalid."""
    try:
        return ModelSpec.from_config(model_config or {})
    except ModelError:
        return None


def routed_experts_of(model_config: Mapping[str, Any] | None) -> tuple[int, int, int] | None:
    """Returns `ModelSpec.routed_experts`; None also if the configuration lacks sizes."""
    model_spec = model_spec_of(model_config)
    return None if model_spec is None else model_spec.routed_experts


def cost_model_of(config: TrainerConfig, model_config: Mapping[str, Any] | None) -> CostModel:
    """Returns the cost model of a model under these settings; the default if its sizes are not known.

    The cost model only affects the balance of work, but plans and layouts are computed from it, so it must be equal on
    all ranks.

    Args:
        model_config: content of the model's config.json.

    Raises:
        ConfigError: `attention.strategy` cannot serve the model on this mesh, or `batch.cost_model` is no calibration.
    """
    model_spec = model_spec_of(model_config)
    if model_spec is None:
        return DEFAULT_COST_MODEL
    shape = AttentionShape.of_model_spec(model_spec).over(config.mesh.tp)
    strategy = choose_strategy(config.attention.strategy, shape, config.mesh.cp).traffic
    element_bytes = ELEMENT_BYTES[config.precision.compute_dtype]
    measured: dict[str, float] = {}
    if config.batch.cost_model is not None:
        rates = read_calibration(config.batch.cost_model, field="batch.cost_model")
        measured = {"flops_per_byte": rates.flops_per_byte, "attention_slowdown": rates.attention_slowdown}
    return CostModel.of_model(model_spec, strategy=strategy, bytes_per_element=element_bytes, **measured)


def plan_everything(
    config: TrainerConfig,
    batch: RolloutBatch,
    cost: CostModel = DEFAULT_COST_MODEL,
    *,
    data_ranks: int,
    loss: LossName | None = None,
) -> Plan:
    """Plans one update of every sample, for log-probs and for the primitives of custom loops.

    Args:
        data_ranks: data-parallel ranks of this group; a reference group may have another number than its actor.
        loss: the loss that the packs are for; None means a forward pass for log-probs or values.
    """
    return plan_batch(
        batch.lengths,
        _limits(config, data_ranks, cost),
        together=samples_together(config, batch, loss),
        sharing=_sharing(config, batch),
    )


def _limits(config: TrainerConfig, data_ranks: int, cost: CostModel) -> PackLimits:
    return PackLimits(data_ranks, config.max_pack_tokens, config.mesh.cp, cost)


def may_share(config: TrainerConfig) -> bool:
    # the ring_flash_attn package cannot express a sequence that continues another one
    packages_cannot = config.attention.strategy == "ring_flash_attn" and config.mesh.cp > 1
    return config.batch.share_prefixes != "never" and not packages_cannot


def _sharing(config: TrainerConfig, batch: RolloutBatch) -> PrefixSharing | None:
    shared = find_prefixes(batch.tokens, batch.lengths, experts=batch.routed_experts) if may_share(config) else None
    if shared is None:
        return None
    return PrefixSharing(
        shared,
        pairs=None if batch.target_tokens is None else batch.response_lengths,
        min_gain=-math.inf if config.batch.share_prefixes == "always" else MIN_GAIN,
    )


def samples_together(config: TrainerConfig, batch: RolloutBatch, loss: LossName | None) -> np.ndarray | None:
    """Returns the pair of each sample, int64 [B], if the loss compares the samples of a pair; else None."""
    return batch.group_ids if loss == "policy" and config.loss.policy in PAIRWISE else None


def loss_weights(
    config: TrainerConfig, batch: RolloutBatch, samples: np.ndarray, denominator: float | None = None
) -> np.ndarray:
    """Returns the loss weight of every response token in an update of `samples`; float64 [R], 0 for other samples.

    This is the weight of `loss.reduction`, times the batch's `loss_weights` if it has any. The batch's weights do not
    affect denominators.

    Args:
        samples: all samples in the denominator of the update (`Plan.counted_of`), computed or not.
        denominator: replaces the update's own denominator.
    """
    if denominator is not None and not isinstance(denominator, int | float):
        raise BatchError(f"denominator={denominator!r} is no number", field="denominator", hint="give a number > 0")
    counts = np.zeros(batch.num_samples, dtype=np.int64)
    counts[samples] = batch.trained_tokens()[samples]
    of_sample = sample_weights(
        counts,
        config.loss.reduction,
        constant_length=config.loss.constant_length,
        denominator=denominator,
        group_ids=batch.group_ids,
    )
    weights = np.repeat(of_sample, batch.response_lengths)
    if batch.loss_mask is not None:
        weights[~batch.loss_mask] = 0.0
    return weights if batch.loss_weights is None else weights * batch.loss_weights


def batch_metrics(
    config: TrainerConfig,
    plan: Plan,
    batch: RolloutBatch,
    cost: CostModel = DEFAULT_COST_MODEL,
    *,
    advantages: np.ndarray | None = None,
) -> dict[str, float]:
    """Returns metrics that need no rank: updates, dropped samples, balance by `cost`, lengths, advantages.

    Args:
        advantages: [R]; if given, the metrics include mean, standard deviation and maximum magnitude over the trained
            tokens.
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
        of_trained = advantages if batch.loss_mask is None else advantages[batch.loss_mask]
        metrics |= {
            "advantage": float(of_trained.mean()),
            "advantage_std": float(of_trained.std()),
            "advantage_abs_max": float(abs(max(of_trained.max(), -of_trained.min()))),
        }
    if batch.group_ids is not None and not (batch.rewards is None and batch.token_rewards is None):
        metrics["zero_variance_groups"] = zero_variance_share(scores_of(batch), batch.group_ids)
    return metrics
