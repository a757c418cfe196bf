"""What is decided about a batch before any rank works: that it will do, its advantages, and its plan.

The driver of a Ray group decides it once, without torch, and ships it: ranks neither check nor plan again. Under
torchrun every rank decides it for itself, and all of them compare what came out, in one exchange. A batch is checked
where the call is made; what then plans it may run later, in another thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from slimefsdp.algorithms.registry import LossName
from slimefsdp.batching.cost import CostModel
from slimefsdp.batching.plan import Plan
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError, ConfigError
from slimefsdp.preparation.plan import plan_everything, plan_training, samples_together
from slimefsdp.preparation.validate import check_batch, check_plan, require_batch
from slimefsdp.rpc import Role, require_loss


@dataclass(frozen=True, eq=False, slots=True)
class PreparedBatch:
    """A batch that fits the settings, and all that ranks need to know to work on it; make one with `BatchPlanner`."""

    batch: RolloutBatch
    plan: Plan
    loss: LossName | None = None  # None: a forward alone
    # of a policy, float64 [R]; None: another loss, or a KL in the reward enters them, which ranks compute first
    advantages: np.ndarray | None = None
    gae_lambda: float | None = None  # of a critic's targets; None: advantage.gae_lambda
    kl_coefficient: float | None = None  # of the KL in a critic's targets; None: its own
    denominator: float | None = None  # of the loss; None: what the samples of an update count


Planning = Callable[[], PreparedBatch]
"""Called, it plans a batch that was checked; errors of the batch were raised by the check."""


@dataclass(frozen=True, slots=True)
class BatchPlanner:
    """Checks the batches of one group, and plans them.

    Args:
        vocab_size: of the group's model.
        max_sample_tokens: positions that the model learned; None: it has no such limit.
        cost: what plans are balanced by, as `slimefsdp.preparation.plan.cost_model_of` the model.
    """

    config: RunConfig
    role: Role
    vocab_size: int
    max_sample_tokens: int | None
    cost: CostModel

    @property
    def data_ranks(self) -> int:
        """Ranks that get packs of their own."""
        return math.prod(self.config.mesh_of(self.role))

    def for_forward(self, batch: RolloutBatch, model: str = "actor") -> Planning:
        """For log-probs or values of every response token.

        Args:
            model: `actor` or `ref`, which log-probs may be of.

        Raises:
            BatchError: the batch does not fit the settings. ConfigError: the group has no such model.
        """
        if model not in ("actor", "ref") or (model == "actor" and self.role == "ref"):
            problem = f"model={model!r} on a group of role {self.role!r}"
            raise ConfigError(problem, field="model", hint="use ref, or actor on an actor")
        self._check(batch, None)
        return lambda: PreparedBatch(batch, self._one_update(batch, None))

    def for_gradients(
        self, batch: RolloutBatch, loss: LossName = "policy", denominator: float | None = None
    ) -> Planning:
        """For `forward_backward`: every sample in one update.

        Raises:
            BatchError: the batch does not fit the settings. ConfigError: the role has no such loss.
        """
        require_loss(loss, self.role)
        if denominator is not None and not (isinstance(denominator, int | float) and 0 < denominator < math.inf):
            problem = f"denominator={denominator!r} is no finite number above 0"
            raise BatchError(problem, field="denominator", hint="leave it out, or give what the loss is divided by")
        advantages = self._check(batch, loss)
        return lambda: PreparedBatch(batch, self._one_update(batch, loss), loss, advantages, denominator=denominator)

    def for_training(
        self,
        batch: RolloutBatch,
        plan: Plan | None = None,
        gae_lambda: float | None = None,
        kl_coefficient: float | None = None,
    ) -> Planning:
        """For `train_step`: the updates of `plan_training`, or those of a plan of the caller's.

        Raises:
            BatchError: the batch does not fit the settings, or the plan not the batch.
            ConfigError: a critic's options are given to another role, or are no numbers in range.
        """
        config = self.config
        loss: LossName = "value" if self.role == "critic" else config.loss_name
        _check_value_options(loss, gae_lambda, kl_coefficient)
        advantages = self._check(batch, loss)
        if plan is not None:
            together = samples_together(config, batch, loss)
            limits: dict[str, Any] = {"max_pack_tokens": config.max_pack_tokens, "together": together}
            check_plan(plan, batch, dp=self.data_ranks, **limits)

        def planned() -> PreparedBatch:
            found = plan
            if found is None:
                found = plan_training(config, batch, self.cost, loss=loss, advantages=advantages)
            return PreparedBatch(batch, found, loss, advantages, gae_lambda, kl_coefficient)

        return planned

    def _check(self, batch: RolloutBatch, loss: LossName | None) -> np.ndarray | None:
        require_batch(batch)
        return check_batch(self.config, batch, self.vocab_size, loss=loss, max_sample_tokens=self.max_sample_tokens)

    def _one_update(self, batch: RolloutBatch, loss: LossName | None) -> Plan:
        return plan_everything(self.config, batch, self.cost, data_ranks=self.data_ranks, loss=loss)


def _check_value_options(loss: LossName, gae_lambda: object, kl_coefficient: object) -> None:
    if loss != "value" and (gae_lambda, kl_coefficient) != (None, None):
        name = "kl_coefficient" if gae_lambda is None else "gae_lambda"
        raise ConfigError(f"{name} is for the targets of a critic", field=name, hint="set it in the settings")
    for name, value, most in (("gae_lambda", gae_lambda, 1.0), ("kl_coefficient", kl_coefficient, 1e30)):
        if value is not None and not (isinstance(value, int | float) and 0 <= value <= most):
            raise ConfigError(f"{name}={value!r} is no number in [0, {most:g}]", field=name, hint="leave it out")
