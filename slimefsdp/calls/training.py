"""Calls for log-probs, values and training steps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal, overload

import numpy as np

from slimefsdp.algorithms.registry import LossName
from slimefsdp.batching.plan import Plan
from slimefsdp.calls.base import Calls, planned
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import StateError
from slimefsdp.results import ForwardBackward, LogProbs
from slimefsdp.rpc import UpdateSettings, call, check_log_probs, check_update_settings
from slimefsdp.training.prepare import BatchPlanner


class TrainingCalls(Calls):
    """Calls for forward passes and updates."""

    @call("actor", "ref", planned=BatchPlanner.for_forward)
    def compute_log_probs(self, batch: RolloutBatch, model: Literal["actor", "ref"] = "actor") -> LogProbs:
        """Computes the log-prob and entropy of every response token, including masked ones.

        Args:
            model: the group's own weights, or the frozen reference model of an actor (loaded on first use).

        Raises:
            BatchError: the batch does not fit the settings. ConfigError: the group has no such model.
            StateError: the reference model is a group of its own, which must be called instead.
        """
        from slimefsdp.training import step

        state = self._state
        if model == "ref" and state.role == "actor":
            with step.reference_in_use(state) as reference:
                values = step.token_outputs(state, reference, planned(batch), trained_only=False)
        else:
            if state.role != "ref":
                state.updater.require_whole("compute_log_probs")
            state.memory_manager.wake_up(("parameters",))
            values = step.token_outputs(state, state.model, planned(batch), trained_only=False)
        log_probs, entropy = values.float().numpy()
        return LogProbs(log_probs, entropy)

    @call("critic", planned=BatchPlanner.for_forward, needs_whole_weights=True)
    def compute_values(self, batch: RolloutBatch) -> np.ndarray:
        """Computes a critic's value of every response token, including masked ones: float32 [R] in batch order.

        Raises:
            BatchError: the batch does not fit the settings. StateError: the group is not a critic.
        """
        from slimefsdp.training import step

        state = self._state
        state.memory_manager.wake_up(("parameters",))
        (values,) = step.token_outputs(state, state.model, planned(batch), trained_only=False).float().numpy()
        return values

    @call("actor", "critic", changes_state=True, planned=BatchPlanner.for_training, needs_whole_weights=True)
    def train_step(
        self,
        batch: RolloutBatch,
        plan: Plan | None = None,
        *,
        gae_lambda: float | None = None,
        kl_coefficient: float | None = None,
    ) -> dict[str, float]:
        """Takes all updates of one rollout batch; returns their mean metrics.

        After an error, or an end by loss.max_kl, there are no gradients left.

        Args:
            plan: a plan of `slimefsdp.training.plan.plan_training`; None: it is made here.
            gae_lambda, kl_coefficient: replace the settings in the computation of a critic's targets.

        Raises:
            BatchError: the batch does not fit the settings; nothing was changed.
            ConfigError: an option of critics is passed to another group, or is out of range.
            StateError: there are unused gradients of forward_backward, which stay; or too many non-finite gradient
                norms in a row; or an earlier update failed halfway.
        """
        from slimefsdp.training import step

        if self._state.updater.has_gradients:
            raise StateError(
                "train_step() with gradients of forward_backward that no optimizer_step has used",
                field="train_step",
                hint="call optimizer_step to use them, or zero_grad to drop them",
            )
        return step.train_step(self._state, planned(batch), time.perf_counter())

    @overload
    def forward_backward(
        self,
        batch: RolloutBatch,
        loss: LossName = "policy",
        denominator: float | None = None,
        settings: Mapping[str, Any] | None = None,
        with_log_probs: Literal[False] = False,
    ) -> dict[str, float]: ...

    @overload
    def forward_backward(
        self,
        batch: RolloutBatch,
        loss: LossName = "policy",
        denominator: float | None = None,
        settings: Mapping[str, Any] | None = None,
        *,
        with_log_probs: Literal[True],
    ) -> ForwardBackward: ...

    @call(
        *("actor", "critic"),
        changes_state=True,
        planned=BatchPlanner.for_gradients,
        needs_whole_weights=True,
        check=check_log_probs,
    )
    def forward_backward(
        self,
        batch: RolloutBatch,
        loss: LossName = "policy",
        denominator: float | None = None,
        settings: Mapping[str, Any] | None = None,
        with_log_probs: bool = False,
    ) -> dict[str, float] | ForwardBackward:
        """Adds the gradients of one batch to those of the next update; drops no sample. Returns its metrics.

        Args:
            batch: if it has no `old_log_probs`, the current ones are used, and the ratio is 1.
            loss: `policy` (needs advantages, or what they are computed from), `sft`, or `value` for a critic.
            denominator: the divisor of the loss; default: this call's own count. Two halves with the denominator of
                the whole (`slimefsdp.algorithms.reduction.update_denominator`) equal one call with the whole.
            settings: settings of `loss` for this call only, such as {"policy": "cispo", "clip_high": 0.3}: the policy
                loss and its parameters, `reduction`, `constant_length` and `entropy_coefficient`.
            with_log_probs: returns a `ForwardBackward` with the metrics, and the log-probs of this forward pass in
                batch order.

        Raises:
            BatchError: the batch does not fit the settings; no gradient was added.
            ConfigError: the loss is unknown, or `settings` cannot be chosen per call.
        """
        from slimefsdp.training import step

        state, work = self._state, planned(batch)
        state.memory_manager.wake_up(("parameters",))
        inputs = step.token_inputs(state, work)
        with step.reference_on_device(state, work):
            if not with_log_probs:
                return step.forward_backward(state, work, 0, inputs)
            return step.forward_backward_with_log_probs(state, work, inputs)

    @call("actor", "critic", changes_state=True, check=check_update_settings)
    def optimizer_step(self, settings: UpdateSettings | None = None) -> dict[str, float]:
        """Takes one optimiser update with the gathered gradients; clips by global norm, skips a non-finite one.

        Args:
            settings: replace those of `optim` in this update: learning rate, betas, eps, weight decay and the norm
                for clipping.

        Raises:
            StateError: there are no gradients, too many were skipped in a row, or an earlier update
                failed halfway.
            ConfigError: `settings` are not valid, or have an `eps` under SGD.
        """
        from slimefsdp.training import step

        return step.optimizer_step(self._state, settings)

    @call("actor", "critic", changes_state=True)
    def zero_grad(self) -> None:
        """Drops the gradients that forward_backward has gathered; idempotent."""
        from slimefsdp.training import step

        self._state.memory_manager.wake_up(("parameters",))  # while asleep, parameters have no gradients to drop
        step.drop_gradients(self._state)
