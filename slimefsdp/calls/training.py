"""Defines the calls that compute and train, and the calls for the adapters of one base model."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import numpy as np

from slimefsdp.algorithms.registry import LossName
from slimefsdp.batching.plan import Plan
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import ConfigError, StateError, short_repr
from slimefsdp.results import AdapterInfo, ForwardBackward, LogProbs
from slimefsdp.rpc import Arguments, Call, JobCheckpoint, UpdateSettings, call, is_finite, require_name
from slimefsdp.training.prepare import BatchPlanner, PreparedBatch

if TYPE_CHECKING:
    from slimefsdp.training.adapters import Adapters
    from slimefsdp.training.step import RankState
    from slimefsdp.weight_sync.receive import WeightReceiver


class Calls:
    """Base of the classes whose methods are calls.

    A `Trainer` runs the body of a call, which uses the attributes below. A driver's handle has none of these attributes
    and runs no body; its `_make` sends the call to the ranks.
    """

    _state: RankState
    _adapters: Adapters | None  # None means that the run has no adapters
    receiver: WeightReceiver  # in a reference group, receives the actor's weights
    _frozen_source: str  # identifies the values of the frozen weights; replaced when they may have changed
    job: JobCheckpoint | None = None  # set by a driver for the `save` or `load` that follows

    def _make(self, call: Call, arguments: Arguments) -> Any:
        raise NotImplementedError

    def _require_adapters(self, name: str) -> Adapters:
        """Returns the adapters, or raises ConfigError if the run has none."""
        if self._adapters is None:
            raise ConfigError(f"{name}() on a run without adapters", field="lora.rank", hint="set lora.rank")
        return self._adapters


def _check_adapter_name(role: str, arguments: Arguments) -> None:
    require_name(arguments["name"], "an adapter")


def _check_new_adapter(role: str, arguments: Arguments) -> None:
    require_name(arguments["name"], "an adapter")
    for name, least in (("rank", 1), ("seed", 0)):
        value = arguments[name]
        if value is not None and (type(value) is not int or not least <= value < 2**63):
            problem = f"{name}={short_repr(value)} of an adapter is no whole number of {least} or more"
            raise ConfigError(problem, field=name, hint="leave it out, to use the settings of the run")
    alpha = arguments["alpha"]
    if alpha is not None and not (is_finite(alpha) and 0 < alpha <= 1e30):
        problem = f"alpha={short_repr(alpha)} of an adapter is no finite number above 0"
        raise ConfigError(problem, field="alpha", hint="leave it out, to use lora.alpha")


def _check_log_probs(role: str, arguments: Arguments) -> None:
    wanted = arguments["with_log_probs"]
    if not isinstance(wanted, bool) or (wanted and role == "critic"):
        problem = f"with_log_probs={short_repr(wanted)} on a group of role {role!r}"
        raise ConfigError(problem, field="with_log_probs", hint="give true or false, and true only to a policy")


def _check_update_settings(role: str, arguments: Arguments) -> None:
    settings = arguments["settings"]
    if settings is not None and not isinstance(settings, UpdateSettings):
        problem = f"settings={short_repr(settings)} is a {type(settings).__name__}"
        raise ConfigError(problem, field="settings", hint="give slimefsdp.rpc.UpdateSettings, or leave it out")


class TrainingCalls(Calls):
    """Calls for forward passes and updates, and for the adapters of an actor with `lora.rank`.

    Callers pass a `RolloutBatch`. When the body of a method runs, `batch` is a `PreparedBatch` in spite of the
    annotation, because the caller's batch has been checked and planned before.
    """

    @call("actor", "ref", prepare=BatchPlanner.for_forward)
    def compute_log_probs(self, batch: RolloutBatch, model: Literal["actor", "ref"] = "actor") -> LogProbs:
        """Computes the log-prob and entropy of every response token, including masked ones.

        Args:
            model: `actor` means the group's own weights; `ref` the frozen reference model of an actor group, which is
                loaded at its first use.

        Raises:
            BatchError: the batch does not fit the settings. ConfigError: the group has no such model.
            StateError: the reference model is a separate group; make the call on that group.
        """
        from slimefsdp.training import step

        state = self._state
        if model == "ref" and state.role == "actor":
            with step.reference_in_use(state) as reference:
                values = step.token_outputs(state, reference, cast(PreparedBatch, batch), trained_only=False)
            experts = None
        else:
            if state.role != "ref":
                state.updater.require_whole("compute_log_probs")
            state.memory_manager.wake_up(("parameters",))
            values, experts = step.policy_outputs(state, cast(PreparedBatch, batch), trained_only=False)
        log_probs, entropy = values.float().numpy()
        return LogProbs(log_probs, entropy, experts)

    @call("critic", prepare=BatchPlanner.for_forward, needs_whole_weights=True)
    def compute_values(self, batch: RolloutBatch) -> np.ndarray:
        """Computes a critic's value of every response token, including masked ones: float32 [R] in batch order.

        Raises:
            BatchError: the batch does not fit the settings. StateError: the group is not a critic.
        """
        from slimefsdp.training import step

        state = self._state
        state.memory_manager.wake_up(("parameters",))
        (values,) = (
            step.token_outputs(state, state.model, cast(PreparedBatch, batch), trained_only=False).float().numpy()
        )
        return values

    @call("actor", "critic", changes_state=True, prepare=BatchPlanner.for_training, needs_whole_weights=True)
    def train_step(
        self,
        batch: RolloutBatch,
        plan: Plan | None = None,
        *,
        gae_lambda: float | None = None,
        kl_coefficient: float | None = None,
    ) -> dict[str, float]:
        """Takes all updates of one rollout batch; returns the mean of the updates' metrics.

        If an error or loss.max_kl ends the call early, the gradients of the unfinished update are dropped.

        Args:
            plan: the result of `slimefsdp.training.plan.plan_training`; None means that this call makes the plan.
            gae_lambda, kl_coefficient: replace the settings of these names when a critic's targets are computed.

        Raises:
            BatchError: the batch does not fit the settings; nothing was changed.
            ConfigError: an option of critics is passed to another group, or is out of range.
            StateError: forward_backward has left unused gradients, which are kept; or too many gradient norms in a row
                were not finite; or an earlier update failed halfway.
        """
        from slimefsdp.training import step

        if self._state.updater.has_gradients:
            raise StateError(
                "train_step() with gradients of forward_backward that no optimizer_step has used",
                field="train_step",
                hint="call optimizer_step to use them, or zero_grad to drop them",
            )
        return step.train_step(self._state, cast(PreparedBatch, batch), time.perf_counter())

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
        prepare=BatchPlanner.for_gradients,
        needs_whole_weights=True,
        check=_check_log_probs,
    )
    def forward_backward(
        self,
        batch: RolloutBatch,
        loss: LossName = "policy",
        denominator: float | None = None,
        settings: Mapping[str, Any] | None = None,
        with_log_probs: bool = False,
    ) -> dict[str, float] | ForwardBackward:
        """Adds the gradients of all samples of a batch to the gradients of the next update; returns metrics.

        Args:
            batch: if it has no `old_log_probs`, the current log-probs are used, and the ratio is 1.
            loss: `policy` (the batch has advantages, or the estimator's inputs), `sft`, or `value` for a critic.
            denominator: the divisor of the loss; None means the divisor of this batch. Two calls with half of a batch
                each equal one call if both get `slimefsdp.algorithms.reduction.update_denominator` of the whole batch.
            settings: settings of `loss` for this call only, such as {"policy": "cispo", "clip_high": 0.3}: the policy
                loss and its parameters, `reduction`, `constant_length` and `entropy_coefficient`.
            with_log_probs: whether the call returns a `ForwardBackward`: the metrics, and the log-probs of this forward
                pass in batch order.

        Raises:
            BatchError: the batch does not fit the settings; no gradient was added.
            ConfigError: the loss is unknown, or a setting in `settings` cannot be chosen per call.
        """
        from slimefsdp.training import step

        state, prepared = self._state, cast(PreparedBatch, batch)
        state.memory_manager.wake_up(("parameters",))
        inputs, prepared = step.token_inputs(state, prepared)
        with step.reference_on_device(state, prepared):
            if not with_log_probs:
                return step.forward_backward(state, prepared, 0, inputs)
            return step.forward_backward_with_log_probs(state, prepared, inputs)

    @call("actor", "critic", changes_state=True, check=_check_update_settings)
    def optimizer_step(self, settings: UpdateSettings | None = None) -> dict[str, float]:
        """Takes one optimiser update with the accumulated gradients, clipped by their global norm.

        If the norm is not finite, the update is skipped.

        Args:
            settings: overrides settings of `optim` in this update only.

        Raises:
            StateError: there are no gradients, too many updates in a row were skipped, or an earlier update
                failed halfway.
            ConfigError: `settings` are not valid, or have an `eps` under SGD.
        """
        from slimefsdp.training import step

        return step.optimizer_step(self._state, settings)

    @call("actor", "critic", changes_state=True)
    def zero_grad(self) -> None:
        """Drops the gradients that forward_backward has accumulated; idempotent."""
        from slimefsdp.training import step

        self._state.memory_manager.wake_up(("parameters",))  # while asleep, parameters have no gradients to drop
        step.drop_gradients(self._state)

    @call("actor", changes_state=True, adapter="by_name", check=_check_new_adapter)
    def create_adapter(
        self, name: str, rank: int | None = None, alpha: float | None = None, seed: int | None = None
    ) -> None:
        """Creates another adapter of the base model with new weights, and makes it the current adapter.

        Args:
            rank: at most lora.rank, which is the default.
            alpha: the default is lora.alpha.
            seed: the seed of A's random weights; the default is run.seed.

        Raises:
            ConfigError: the run has no adapters, or a value is out of range. StateError: the name is taken.
            ResourceError: the host has no memory for the adapter that was current before.
        """
        adapters, config = self._require_adapters("create_adapter"), self._state.config
        assert config.lora.rank is not None
        if rank is not None and rank > config.lora.rank:
            problem = f"rank={rank} of an adapter is more than lora.rank={config.lora.rank}, for which there is room"
            raise ConfigError(
                problem, field="rank", hint="choose a smaller rank, or start the run with a larger lora.rank"
            )
        self._state.memory_manager.wake_up(("parameters", "optimizer"))
        with self._state.exchanging(adapters):
            adapters.create(
                name,
                rank or config.lora.rank,
                alpha or config.lora.alpha,
                config.run.seed if seed is None else seed,
            )

    @call("actor", changes_state=True, adapter="by_name", check=_check_adapter_name)
    def delete_adapter(self, name: str) -> None:
        """Deletes an adapter; its checkpoints and exports stay on disk.

        Raises:
            StateError: there is no adapter of this name, or it is the run's own.
            ConfigError: the run has no adapters, or the name is not valid.
        """
        adapters = self._require_adapters("delete_adapter")
        self._state.memory_manager.wake_up(("parameters", "optimizer"))
        with self._state.exchanging(adapters):
            adapters.delete(name)

    @call("actor", adapter="any")
    def adapters(self) -> list[AdapterInfo]:
        """Returns all adapters in the order of their creation.

        Raises:
            ConfigError: the run has no adapters.
        """
        return self._require_adapters("adapters").listed()
