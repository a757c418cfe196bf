"""What the ranks agree on before a phase, and the per-token tensors that its losses read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from slimefsdp import phase
from slimefsdp.config import RunConfig
from slimefsdp.data.plan import Plan
from slimefsdp.data.rollout import RolloutBatch
from slimefsdp.errors import StateError
from slimefsdp.loss.objective import LossName, TokenInputs
from slimefsdp.models.folder import ModelFolder
from slimefsdp.parallel.agree import all_equal


def check_together(
    config: RunConfig, batch: RolloutBatch, folder: ModelFolder, loss: LossName | None, group: dist.ProcessGroup
) -> None:
    """Collective: `phase.check_batch` for a folder's model; all ranks hold the same batch, so all refuse it or none.

    Raises:
        StateError: ranks hold different batches. BatchError: the batch does not fit the settings.
    """
    if not all_equal(phase.batch_digest(batch), group):
        raise StateError("ranks hold different batches", hint="call every rank with the same batch")
    phase.check_batch(config, batch, folder.vocab_size, loss=loss, max_sample_tokens=folder.max_sample_tokens)


def agreed_plan(config: RunConfig, plan: Plan, batch: RolloutBatch, group: dist.ProcessGroup) -> Plan:
    """Collective: the plan, once it is known to fit the batch and to be the same everywhere.

    Raises:
        BatchError: it does not fit the batch or the mesh. StateError: ranks hold different plans.
    """
    phase.check_plan(plan, batch, dp=config.data_ranks, max_pack_tokens=config.max_pack_tokens)
    if not all_equal(plan.digest(), group):
        raise StateError("ranks hold different plans", hint="call every rank with the same batch and settings")
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
) -> TokenInputs:
    """Everything the phase's losses read, [R] each; weights are set per update.

    Args:
        log_probs: collective; [2, R] log-probs and entropies of a model now, called only for what the batch lacks.
    """
    nothing = torch.zeros(batch.num_response_tokens)
    if loss == "sft" or not plan.updates:
        return TokenInputs(nothing)
    old, reference = _tensor(batch.old_log_probs), _tensor(batch.ref_log_probs)
    how = config.loss.old_log_probs
    if old is None and how == "rollout":
        old = _tensor(batch.rollout_log_probs)
    elif old is None and (how == "recompute" or len(plan.updates) > 1):
        old = log_probs("actor")[0]
    if reference is None and config.needs_reference:
        reference = log_probs("ref")[0]
    return TokenInputs(
        weights=nothing,
        advantages=torch.from_numpy(phase.response_advantages(config, batch)),
        old_log_probs=old,
        ref_log_probs=reference if config.needs_reference else None,
        rollout_log_probs=_tensor(batch.rollout_log_probs),
    )


def _tensor(values: np.ndarray | None) -> torch.Tensor | None:
    return None if values is None else torch.tensor(values)
