"""Prepares a batch before any rank works: checks it, computes its advantages and plans it.

The driver of a Ray group prepares a batch once, without torch, and sends the result to the ranks; these neither check
nor plan again. Under torchrun every rank prepares the batch itself, and all ranks compare the results in one exchange.
The check runs in the caller; the planning may run later, in another thread.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slimefsdp.algorithms.registry import PAIRWISE, LossName
from slimefsdp.batching.cost import CostModel
from slimefsdp.batching.groups import SampleCosts
from slimefsdp.batching.plan import Plan
from slimefsdp.batching.prefix_tree import SharedPrefixes
from slimefsdp.config import TrainerConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError, ConfigError
from slimefsdp.rpc import Role, require_loss
from slimefsdp.training.advantages import (
    check_pairs,
    require,
    response_advantages,
    value_targets,
)
from slimefsdp.training.plan import plan_everything, plan_training, samples_together


@dataclass(frozen=True, eq=False, slots=True)
class PreparedBatch:
    """Holds a checked batch, its plan and everything else that ranks need for a call; made by `BatchPlanner`."""

    batch: RolloutBatch
    plan: Plan
    loss: LossName | None = None  # None means a forward pass only
    # of a policy, float64 [R]; None for other losses, and if ranks must first compute a KL that advantages depend on
    advantages: np.ndarray | None = None
    gae_lambda: float | None = None  # for a critic's targets; None means advantage.gae_lambda
    kl_coefficient: float | None = None  # of the KL in a critic's targets; None means the rank state's coefficient
    denominator: float | None = None  # divides the loss; None means the denominator of each update's samples
    loss_settings: dict[str, Any] | None = None  # argument of `TrainerConfig.with_loss`; None for the settings' loss


Planning = Callable[[], PreparedBatch]
"""Plans a batch that has been checked; the check has already raised all errors of the batch."""


@dataclass(frozen=True, slots=True)
class BatchPlanner:
    """Checks and plans the batches of one group.

    Args:
        vocab_size: vocabulary size of the group's model.
        max_sample_tokens: number of positions that the model learned; None means that there is no such limit.
        cost: the cost model that plans are balanced by; see `slimefsdp.training.plan.cost_model_of`.
    """

    config: TrainerConfig
    role: Role
    vocab_size: int
    max_sample_tokens: int | None
    cost: CostModel
    loss_settings: dict[str, Any] | None = None  # loss settings of a single call, which `config` already includes
    experts: tuple[int, int, int] | None = None  # see `ModelSpec.routed_experts`

    @property
    def data_ranks(self) -> int:
        return math.prod(self.config.mesh_of(self.role))

    def for_forward(self, batch: RolloutBatch, model: str = "actor") -> Planning:
        """Prepares the computation of log-probs or values of every response token.

        Args:
            model: the model that computes log-probs, `actor` or `ref`.

        Raises:
            BatchError: the batch does not fit the settings. ConfigError: the group has no such model.
        """
        if model not in ("actor", "ref") or (model == "actor" and self.role == "ref"):
            problem = f"model={model!r} on a group of role {self.role!r}"
            raise ConfigError(problem, field="model", hint="use ref, or actor on an actor")
        self._advantages(batch, None)
        return lambda: PreparedBatch(batch, self._one_update(batch, None))

    def for_gradients(
        self,
        batch: RolloutBatch,
        loss: LossName = "policy",
        denominator: float | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> Planning:
        """Prepares `forward_backward`, with every sample in one update.

        Raises:
            BatchError: the batch does not fit the settings. ConfigError: the role has no such loss, or
                `TrainerConfig.with_loss` refuses `settings`.
        """
        require_loss(loss, self.role)
        if settings is not None:
            return self._with_loss(loss, settings).for_gradients(batch, loss, denominator)
        if denominator is not None and not (isinstance(denominator, int | float) and 0 < denominator < math.inf):
            problem = f"denominator={denominator!r} is no finite number above 0"
            raise BatchError(problem, field="denominator", hint="leave it out, or give what the loss is divided by")
        advantages = self._advantages(batch, loss)
        return lambda: PreparedBatch(
            batch,
            self._one_update(batch, loss),
            loss,
            advantages,
            denominator=denominator,
            loss_settings=self.loss_settings,
        )

    def _with_loss(self, loss: LossName, settings: Mapping[str, Any]) -> BatchPlanner:
        if loss == "value":
            problem = "settings of a loss for a critic, whose loss is in the section critic"
            raise ConfigError(problem, field="settings", hint="leave them out")
        return dataclasses.replace(self, config=self.config.with_loss(settings), loss_settings=dict(settings))

    def for_training(
        self,
        batch: RolloutBatch,
        plan: Plan | None = None,
        gae_lambda: float | None = None,
        kl_coefficient: float | None = None,
    ) -> Planning:
        """Prepares `train_step`: the updates of `plan_training`, or of the caller's plan.

        Raises:
            BatchError: the batch does not fit the settings, or the plan does not fit the batch.
            ConfigError: a critic's options are given to another role, or are out of range.
        """
        config = self.config
        loss: LossName = "value" if self.role == "critic" else config.loss_name
        _check_value_options(loss, gae_lambda, kl_coefficient)
        advantages = self._advantages(batch, loss)
        if plan is not None:
            together = samples_together(config, batch, loss)
            limits: dict[str, Any] = {"max_pack_tokens": config.max_pack_tokens, "together": together}
            check_plan(plan, batch, dp=self.data_ranks, **limits)

        def planned() -> PreparedBatch:
            training_plan = plan
            if training_plan is None:
                training_plan = plan_training(config, batch, self.cost, loss=loss, advantages=advantages)
            return PreparedBatch(batch, training_plan, loss, advantages, gae_lambda, kl_coefficient)

        return planned

    def _advantages(self, batch: RolloutBatch, loss: LossName | None) -> np.ndarray | None:
        require_batch(batch)
        if self.role == "actor":
            self._check_experts(batch, loss)
        return checked_advantages(
            self.config, batch, self.vocab_size, loss=loss, max_sample_tokens=self.max_sample_tokens
        )

    def _check_experts(self, batch: RolloutBatch, loss: LossName | None) -> None:
        replay = self.config.loss.routing_replay
        experts = batch.routed_experts
        if experts is None:
            if loss == "policy" and (
                replay == "rollout" or (replay == "old_log_probs" and batch.old_log_probs is not None)
            ):
                way_out = "take them from the engine" if replay == "rollout" else "add those of compute_log_probs"
                require(batch, "routed_experts", f"loss.routing_replay={replay} repeats them", way_out)
            return
        hint = "pass the experts that were chosen for these tokens by this model"
        if replay == "none":
            problem = "routed_experts would be ignored under loss.routing_replay=none"
            raise BatchError(problem, field="routed_experts", hint="set loss.routing_replay=rollout, or remove them")
        layers, count, of_token = self.experts or (0, 0, 0)
        if experts.shape[1:] != (layers, of_token):
            problem = f"routed_experts has shape {experts.shape}; the model has {layers} layers and chooses {of_token} "
            raise BatchError(f"{problem}experts for a token", field="routed_experts", hint=hint)
        if (largest := int(experts.max())) >= count:
            problem = f"routed_experts has expert {largest}; the model has {count}"
            raise BatchError(problem, field="routed_experts", hint=hint)

    def _one_update(self, batch: RolloutBatch, loss: LossName | None) -> Plan:
        return plan_everything(self.config, batch, self.cost, data_ranks=self.data_ranks, loss=loss)


def _check_value_options(loss: LossName, gae_lambda: object, kl_coefficient: object) -> None:
    if loss != "value" and (gae_lambda, kl_coefficient) != (None, None):
        name = "kl_coefficient" if gae_lambda is None else "gae_lambda"
        raise ConfigError(f"{name} is for the targets of a critic", field=name, hint="set it in the settings")
    for name, value, most in (("gae_lambda", gae_lambda, 1.0), ("kl_coefficient", kl_coefficient, 1e30)):
        if value is not None and not (isinstance(value, int | float) and 0 <= value <= most):
            raise ConfigError(f"{name}={value!r} is no number in [0, {most:g}]", field=name, hint="leave it out")


# ---------------------------------------------------------------------- checks


def batch_digest(batch: RolloutBatch) -> str:
    """Returns the sha256 of all fields as hex, which is equal on ranks that hold the same batch."""
    digest = hashlib.sha256()
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        content = np.zeros(0, np.uint8) if value is None else np.ascontiguousarray(value)
        digest.update(f"{field.name} {value is None} {content.nbytes} ".encode())
        digest.update(content.data)
    return digest.hexdigest()


def require_batch(batch: object) -> None:
    """Checks that an argument is a batch.

    Raises:
        BatchError: the argument is not a batch.
    """
    if not isinstance(batch, RolloutBatch):
        raise BatchError(
            f"a {type(batch).__name__} was given for a batch",
            field="batch",
            hint="make one with RolloutBatch.from_samples",
        )


def checked_advantages(
    config: TrainerConfig,
    batch: RolloutBatch,
    vocab_size: int,
    *,
    loss: LossName | None,
    max_sample_tokens: int | None = None,
) -> np.ndarray | None:
    """Checks a batch against the settings, and returns a policy's advantages, float64 [R].

    The batch's internal consistency was checked when it was made. The advantages are not computed again later, because
    a user's own estimator might return different ones.

    Args:
        vocab_size: vocabulary size of the model.
        loss: its inputs are also checked (rewards, groups, log-probs, values). None checks only the tokens.
        max_sample_tokens: number of positions that the model learned; None means that it has no such limit.

    Returns:
        The advantages; None for other losses, and if they depend on a KL in the reward, which needs log-probs first.

    Raises:
        BatchError: the batch does not fit the settings or the model.
    """
    batch.check_token_ids(vocab_size)
    budget = config.max_pack_tokens
    longest = int(batch.lengths.argmax())
    if batch.lengths[longest] > budget:
        needed = -(-int(batch.lengths[longest]) // config.mesh.cp)
        raise BatchError(
            f"sample {longest} has {batch.lengths[longest]} tokens, the budget is {budget} (batch.max_tokens_per_rank"
            f"={config.batch.max_tokens_per_rank} x mesh.cp={config.mesh.cp})",
            field="lengths",
            hint=f"raise batch.max_tokens_per_rank to {needed}, or leave sample {longest} out of the batch",
        )
    if max_sample_tokens is not None and batch.lengths[longest] > max_sample_tokens:
        raise BatchError(
            f"sample {longest} has {batch.lengths[longest]} tokens, the model learned {max_sample_tokens} positions",
            field="lengths",
            hint=f"leave sample {longest} out of the batch, or train a model with rotary positions",
        )
    if batch.temperature is not None and batch.temperature != config.temperature:
        raise BatchError(
            f"temperature={batch.temperature}, but rollout.temperature={config.temperature}",
            field="temperature",
            hint="sample and train at one temperature",
        )
    advantages = _policy_advantages(config, batch) if loss == "policy" else None
    if loss == "value":
        _check_value_inputs(config, batch)
    if loss is not None and config.loss.reduction == "prompt_mean":
        require(batch, "group_ids", "loss.reduction=prompt_mean counts prompts", "choose another reduction")
    return advantages


def _policy_advantages(config: TrainerConfig, batch: RolloutBatch) -> np.ndarray | None:
    lacks_kl = config.has_kl_in_reward and batch.advantages is None
    advantages = None
    if not (lacks_kl and ":" in config.estimator):  # a user's estimator is called once a step, when the KL is known
        advantages = response_advantages(config, batch)  # also checks rewards, values and groups
    if config.loss.old_log_probs == "rollout" and batch.old_log_probs is None:
        require(batch, "rollout_log_probs", "loss.old_log_probs=rollout reads it", "set loss.old_log_probs=recompute")
    if config.correction.reads_rollout_log_probs:
        way_out = "switch the correction off"
        require(batch, "rollout_log_probs", "the correction of its mismatch reads it", way_out)
    if config.loss.policy in PAIRWISE:
        check_pairs(config, batch, advantages)
    return None if lacks_kl else advantages


def _check_value_inputs(config: TrainerConfig, batch: RolloutBatch) -> None:
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
    """Checks that a caller's plan fits this batch and this group.

    Args:
        together: the result of `samples_together`.

    Raises:
        BatchError: the plan does not fit; the message says why.
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
        elif any(len(samples) != len(np.unique(samples)) for samples in map(plan.samples_of, range(len(plan.updates)))):
            fault = "has a sample twice in an update"
        elif not all(_counts_all(plan, update, batch) for update in range(len(plan.updates))):
            fault = "does not count every sample of an update once in its denominators"
        elif plan.shared is not None and not plan.shared.fit(batch.tokens, batch.lengths, batch.routed_experts):
            fault = "says that samples share what they do not"
        elif any((_pack_tokens(plan, batch, update) > max_pack_tokens).any() for update in range(len(plan.updates))):
            fault = f"has packs of more than {max_pack_tokens} tokens"
        elif together is not None and _splits_groups(together, packs):
            fault = "parts samples that the loss compares"
        elif len(_samples(first)) != len(np.unique(_samples(first))):
            fault = f"has a sample twice in its first epoch, its first {plan.num_first_epoch_updates} updates"
        elif not np.isin(_samples(plan.updates), _samples(first)).all():
            fault = f"has samples in later epochs that its first {plan.num_first_epoch_updates} updates do not have"
        else:
            return
    raise BatchError(
        f"plan {fault}", field="plan", hint="make it with slimefsdp.training.plan.plan_training for this batch"
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
        # a plan from which updates were removed may still list the samples of more updates
        counts = plan.counted is None or (len(plan.counted) >= len(plan.updates) and all(map(is_indices, plan.counted)))
        return all(count and good for count, good in packs) and first >= 0 and counts
    except TypeError:  # a field is not a sequence, or not a number
        return False


def _counts_all(plan: Plan, update: int, batch: RolloutBatch) -> bool:
    if plan.counted is None:
        return True
    counted = plan.counted[update]
    are_samples = ((counted >= 0) & (counted < batch.num_samples)).all() and (np.diff(counted) > 0).all()
    return bool(are_samples and np.isin(plan.samples_of(update), counted).all())


def _pack_tokens(plan: Plan, batch: RolloutBatch, update: int) -> np.ndarray:
    samples, sizes = plan.packs_of(update)
    return SampleCosts(batch.lengths, CostModel(), 1, plan.max_pack_tokens, plan.shared).tokens_each(
        samples, sizes.ravel()
    )


def _splits_groups(together: np.ndarray, packs: Sequence[np.ndarray]) -> bool:
    """Returns whether any pack has some but not all samples of a group; a pack must not have a sample twice."""
    _, groups, sizes = np.unique(together, return_inverse=True, return_counts=True)
    return any(sizes[np.unique(groups[pack])].sum() != len(pack) for pack in packs)


def _samples(updates: Sequence[Sequence[Sequence[np.ndarray]]]) -> np.ndarray:
    packs = [pack for update in updates for packs in update for pack in packs]
    return np.concatenate(packs) if packs else np.zeros(0, dtype=np.int64)
