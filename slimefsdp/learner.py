"""One rank's model at work on a batch: what it says of every token, and the gradients of an update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from slimefsdp import build, phase, progress
from slimefsdp.config import RunConfig
from slimefsdp.data.plan import Plan
from slimefsdp.data.rollout import RolloutBatch
from slimefsdp.determinism import seed_generators
from slimefsdp.errors import ConfigError
from slimefsdp.inputs import first_epoch_packs, training_inputs
from slimefsdp.loss.kl import next_coefficient
from slimefsdp.loss.objective import LossName, TokenInputs
from slimefsdp.loss.value import value_metrics
from slimefsdp.metrics import MetricSums
from slimefsdp.models.decoder import DecoderModel
from slimefsdp.parallel.mesh import Mesh
from slimefsdp.reference import ColocatedReference
from slimefsdp.surface import Role
from slimefsdp.update import accumulate_gradients, outputs_of_packs


class Learner:
    """Evaluates and differentiates the model of a role; whoever calls has woken it.

    Args:
        model: the role's own.
        reference: the one beside it.
    """

    def __init__(
        self, config: RunConfig, role: Role, model: DecoderModel, mesh: Mesh, reference: ColocatedReference
    ) -> None:
        self.kl_coefficient = config.loss.kl_coefficient  # moves under loss.kl_target
        self._config = config
        self._role = role
        self._model = model
        self._mesh = mesh
        self._reference = reference

    def plan_everything(self, batch: RolloutBatch, loss: LossName | None = None) -> Plan:
        """One update that holds every sample, in packs for this loss; None: for log-probs or values."""
        cost = self._model.attention.cost
        return phase.plan_everything(self._config, batch, cost, data_ranks=self._mesh.data_ranks, loss=loss)

    def seed_phase(self, update: int) -> None:
        """Under run.deterministic: what a phase draws depends on its first update, not on what was drawn before."""
        if self._config.run.deterministic:
            seed_generators(self._config.run.seed, update, self._mesh.data_rank)

    def outputs(self, batch: RolloutBatch, plan: Plan, *, trained_only: bool) -> torch.Tensor:
        """Collective: what the model says now, [outputs, R] on the CPU: log-probs and entropies, or values.

        Args:
            plan: by the packs of its first epoch.
            trained_only: only of tokens under the loss mask; 0 elsewhere.
        """
        return self._outputs_of(self._model, batch, plan, trained_only)

    def reference_outputs(self, batch: RolloutBatch, plan: Plan, *, trained_only: bool) -> torch.Tensor:
        """Collective: as `outputs`, of the colocated reference."""
        with self._reference.awake() as reference:
            return self._outputs_of(reference, batch, plan, trained_only)

    def inputs(
        self,
        batch: RolloutBatch,
        plan: Plan,
        loss: LossName,
        *,
        advantages: np.ndarray | None = None,
        gae_lambda: float | None = None,
        kl_coefficient: float | None = None,
    ) -> TokenInputs:
        """Collective: everything that the losses of a phase read; weights are set per update.

        Args:
            advantages: as for `slimefsdp.inputs.training_inputs`.
            gae_lambda: of a critic's targets; None: advantage.gae_lambda.
            kl_coefficient: of the KL in a critic's targets, which is its actor's; None: this learner's own.

        Raises:
            ConfigError: the loss is not a critic's, and one of them is given.
        """
        if loss != "value" and (gae_lambda, kl_coefficient) != (None, None):
            name = "kl_coefficient" if gae_lambda is None else "gae_lambda"
            raise ConfigError(f"{name} is for the targets of a critic", field=name, hint="set it in the settings")
        for name, value, most in (("gae_lambda", gae_lambda, 1.0), ("kl_coefficient", kl_coefficient, 1e30)):
            if value is not None and not (isinstance(value, int | float) and 0 <= value <= most):
                raise ConfigError(f"{name}={value!r} is no number in [0, {most:g}]", field=name, hint="leave it out")
        of_model: dict[str, Callable[..., torch.Tensor]] = {"actor": self.outputs, "ref": self.reference_outputs}

        def log_probs(model: Literal["actor", "ref"]) -> torch.Tensor:
            with progress.during("old_log_probs" if model == "actor" else "reference"):
                return of_model[model](batch, plan, trained_only=True)

        coefficient = self.kl_coefficient if kl_coefficient is None else kl_coefficient
        return training_inputs(
            self._config, batch, plan, loss, log_probs, coefficient, self._mesh.group,
            advantages=advantages, gae_lambda=gae_lambda,
        )  # fmt: skip

    def beside_reference(self, loss: LossName) -> AbstractContextManager[object]:
        """Collective: the reference on the device while gradients are added, where the loss reads its hidden states."""
        return self._reference.awake() if self._reads_hidden_states(loss) else nullcontext()

    @progress.during("forward_backward")
    def accumulate(
        self,
        batch: RolloutBatch,
        plan: Plan,
        update: int,
        inputs: TokenInputs,
        weights: np.ndarray,
        loss: LossName,
        *,
        loss_scale: float,
    ) -> dict[str, float]:
        """Collective: adds the gradients of one update, inside of `beside_reference`; returns its metrics.

        Args:
            update: which of the plan's.
            weights: [R], of the update's tokens.
        """
        sums = MetricSums(self._mesh.device, counted=self._mesh.cp_rank == 0)
        accumulate_gradients(
            self._model,
            batch,
            plan.updates[update][self._mesh.data_rank],
            replace(inputs, weights=torch.from_numpy(weights)),
            build.objective_for(self._config, loss, self.kl_coefficient),
            self._mesh,
            sums,
            shared=plan.shared,
            reference=self._reference.model if self._reads_hidden_states(loss) else None,
            loss_scale=loss_scale,
            sum_once=self._config.fsdp.sharding == "optimizer",
            **self._how(self._config.loss.entropy_coefficient != 0),
        )
        metrics = sums.reduce(self._mesh.group)
        return value_metrics(metrics) if loss == "value" else metrics

    def follow_kl_target(self, metrics: Mapping[str, float], samples: int) -> dict[str, float]:
        """After a step of so many samples: moves the KL coefficient towards what meets loss.kl_target.

        Returns:
            What it was in the step, as a metric; nothing without a target, or of a critic, which is told its actor's.
        """
        settings, used = self._config.loss, self.kl_coefficient
        if settings.kl_target is None or self._role == "critic":
            return {}
        if "kl_ref" in metrics:  # it is not where every update was left out
            self.kl_coefficient = next_coefficient(
                used, metrics["kl_ref"], settings.kl_target, samples, settings.kl_horizon
            )
        return {"kl_coefficient": used}

    def restore_kl_coefficient(self, saved: float | None) -> None:
        """Goes on from a checkpoint's coefficient, where loss.kl_target moves it; None: the checkpoint has none."""
        if saved is not None and self._config.loss.kl_target is not None:
            self.kl_coefficient = saved

    def _reads_hidden_states(self, loss: LossName) -> bool:
        return loss == "policy" and self._config.kl_estimator == "full"

    def _outputs_of(self, model: DecoderModel, batch: RolloutBatch, plan: Plan, trained_only: bool) -> torch.Tensor:
        packs = first_epoch_packs(plan, self._mesh.data_rank)
        return outputs_of_packs(
            model, batch, packs, self._mesh, trained_only=trained_only, shared=plan.shared, **self._how()
        )

    def _how(self, entropy_grad: bool = False) -> dict[str, Any]:
        """Further arguments of the model's forward."""
        if self._role == "critic":
            return {}
        return {"temperature": self._config.rollout.temperature, "entropy_grad": entropy_grad}
