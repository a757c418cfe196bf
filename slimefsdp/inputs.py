"""What the ranks agree on before a phase, and the per-token tensors that its losses read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from slimefsdp import phase
from slimefsdp.config import RunConfig
from slimefsdp.credit import check_functions, response_advantages, value_targets
from slimefsdp.data.plan import Plan
from slimefsdp.data.rollout import RolloutBatch
from slimefsdp.errors import StateError
from slimefsdp.loss.kl import kl_estimate
from slimefsdp.loss.objective import LossName, TokenInputs
from slimefsdp.models.folder import ModelFolder
from slimefsdp.parallel.agree import all_equal, run_together


def check_together(
    config: RunConfig,
    batch: RolloutBatch,
    folder: ModelFolder,
    loss: LossName | None,
    group: dist.ProcessGroup,
    *,
    given: object = None,
) -> np.ndarray | None:
    """Collective: `phase.check_batch` for a folder's model; all ranks refuse the batch or none.

    Args:
        given: what else the call was given, and must be equal on all ranks.

    Returns:
        The advantages that `phase.check_batch` found, the same on all ranks.

    Raises:
        StateError: ranks hold different batches. BatchError: the batch does not fit the settings. ConfigError: a
            function of the user's own cannot be imported. What such a function raises on any rank.
    """
    # what is no batch is compared too: a rank that refused it alone would leave its peers waiting
    digest = phase.batch_digest(batch) if isinstance(batch, RolloutBatch) else type(batch).__name__
    if not all_equal(f"{digest} {given!r}", group):
        raise StateError(
            "ranks hold different batches, or other arguments",
            field="batch",
            hint="call every rank with the same batch and arguments",
        )

    phase.require_batch(batch)
    advantages: np.ndarray | None = None

    def check() -> None:
        nonlocal advantages
        if loss == "policy":
            check_functions(config)
        advantages = phase.check_batch(
            config, batch, folder.vocab_size, loss=loss, max_sample_tokens=folder.max_sample_tokens
        )

    run_together(check, group)  # a function of the user's own may fail on one machine alone
    if advantages is not None and ":" in config.estimator and batch.advantages is None:
        _require_equal_advantages(config, advantages, group)
    return advantages


def _require_equal_advantages(config: RunConfig, advantages: np.ndarray, group: dist.ProcessGroup) -> None:
    if not all_equal(hashlib.sha256(advantages.tobytes()).hexdigest(), group):
        raise StateError(
            f"advantage.estimator={config.estimator} gave ranks different advantages",
            field="advantage.estimator",
            hint="let it depend on its arguments alone: no random numbers, no clock, no order of sets",
        )


def agreed_plan(
    config: RunConfig, plan: Plan, batch: RolloutBatch, loss: LossName, group: dist.ProcessGroup, *, data_ranks: int
) -> Plan:
    """Collective: the plan, once it is known to fit the batch and the loss, and to be the same everywhere.

    Raises:
        BatchError: it does not fit the batch or the mesh. StateError: ranks hold different plans.
    """
    together = phase.samples_together(config, batch, loss)
    limits: dict[str, Any] = {"dp": data_ranks, "max_pack_tokens": config.max_pack_tokens, "together": together}
    run_together(lambda: phase.check_plan(plan, batch, **limits), group)
    if not all_equal(plan.digest(), group):
        raise StateError(
            "ranks hold different plans", field="plan", hint="call every rank with the same batch and settings"
        )
    return plan


def first_epoch_packs(plan: Plan, data_rank: int) -> list[np.ndarray]:
    """One data rank's packs of the plan's first epoch: every sample of the phase once."""
    return [pack for update in plan.updates[: plan.num_first_epoch_updates] for pack in update[data_rank]]


def training_inputs(
    config: RunConfig,
    batch: RolloutBatch,
    plan: Plan,
    loss: LossName,
    log_probs: Callable[[Literal["actor", "ref"]], torch.Tensor],
    kl_coefficient: float,
    group: dist.ProcessGroup,
    *,
    advantages: np.ndarray | None = None,
    gae_lambda: float | None = None,
) -> TokenInputs:
    """Collective: everything the phase's losses read, [R] each; weights are set per update.

    Args:
        log_probs: collective; [2, R] log-probs and entropies of a model now, called only for what the batch lacks.
        kl_coefficient: of the KL that loss.kl_in=reward takes off each token's reward.
        advantages: of a policy, float64 [R], that the ranks agreed on; None: such a KL enters them.
        gae_lambda: of a critic's targets; None: advantage.gae_lambda.
    """
    inputs = TokenInputs(
        weights=torch.zeros(batch.num_response_tokens),
        sample_ids=torch.from_numpy(batch.sample_ids),
        num_samples=batch.num_samples,
        group_ids=_numbered(phase.samples_together(config, batch, loss), batch.sample_ids),
    )
    old, reference = _tensor(batch.old_log_probs), _tensor(batch.ref_log_probs)
    if loss == "sft" or not plan.updates:
        return inputs
    if loss == "value":
        penalty = _kl_penalty(config, old, reference, kl_coefficient) if batch.returns is None else None
        targets = torch.from_numpy(value_targets(config, batch, penalty, gae_lambda))
        return replace(inputs, old_values=_tensor(batch.values), returns=targets)
    how = config.loss.old_log_probs
    needs_old = len(plan.updates) > 1 or (config.has_kl_in_reward and batch.advantages is None)
    is_rollout = old is None and how == "rollout"
    if is_rollout:
        old = _tensor(batch.rollout_log_probs)
    elif old is None and (how == "recompute" or needs_old):
        old = log_probs("actor")[0]
    if not config.needs_reference or (config.kl_estimator == "full" and config.loss.policy != "dpo"):
        reference = None
    elif reference is None:
        reference = log_probs("ref")[0]
    if advantages is None:
        penalty = _kl_penalty(config, old, reference, kl_coefficient)
        advantages = _penalized_advantages(config, batch, penalty, group)
    return replace(
        inputs,
        advantages=torch.from_numpy(advantages),
        old_log_probs=old,
        old_is_rollout=is_rollout,
        ref_log_probs=reference,
        rollout_log_probs=_tensor(batch.rollout_log_probs),
    )


def _penalized_advantages(
    config: RunConfig, batch: RolloutBatch, penalty: np.ndarray | None, group: dist.ProcessGroup
) -> np.ndarray:
    """Collective: advantages that a KL enters, float64 [R], the same on all ranks."""
    if ":" not in config.estimator:
        return response_advantages(config, batch, penalty)
    found: list[np.ndarray] = []
    run_together(lambda: found.append(response_advantages(config, batch, penalty)), group)
    _require_equal_advantages(config, found[0], group)
    return found[0]


def _kl_penalty(
    config: RunConfig, old: torch.Tensor | None, reference: torch.Tensor | None, kl_coefficient: float
) -> np.ndarray | None:
    """What the KL takes off each token's reward, float64 [R]; None where it is no part of the reward."""
    if not config.has_kl_in_reward:
        return None
    assert old is not None and reference is not None
    return (kl_coefficient * kl_estimate(old.double(), reference.double(), config.kl_estimator)).numpy()


def _numbered(group_ids: np.ndarray | None, sample_ids: np.ndarray) -> torch.Tensor | None:
    """The pair of each response token, as numbers from 0."""
    if group_ids is None:
        return None
    return torch.from_numpy(np.unique(group_ids, return_inverse=True)[1][sample_ids])


def _tensor(values: np.ndarray | None) -> torch.Tensor | None:
    return None if values is None else torch.tensor(values)
