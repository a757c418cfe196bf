"""Takes one rank's train step, from a prepared batch to optimiser updates. Start reading at `train_step`.

All functions are collective: every rank of a group makes the same call with the same prepared batch.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist

from slimefsdp import heartbeat
from slimefsdp.algorithms.objective import Objective, TokenInputs
from slimefsdp.algorithms.policy_losses import kl_estimate, next_coefficient
from slimefsdp.algorithms.value_loss import value_metrics
from slimefsdp.config import TrainerConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.distributed.collectives import all_equal, attempt, gathered, raise_first, run_together, sendable
from slimefsdp.distributed.memory_manager import MemoryManager, forget_peak_memory
from slimefsdp.distributed.mesh import Mesh
from slimefsdp.errors import StateError
from slimefsdp.models.decoder import DecoderModel
from slimefsdp.models.hf_folder import ModelFolder
from slimefsdp.models.routing import ExpertLoad, RecordedExperts
from slimefsdp.monitoring.profiler import UpdateProfiler, phase
from slimefsdp.optim.optimizer_step import OptimizerStep
from slimefsdp.results import ForwardBackward, LogProbs
from slimefsdp.rpc import Role, UpdateSettings
from slimefsdp.training.adapters import Adapters
from slimefsdp.training.advantages import check_functions, response_advantages, value_targets
from slimefsdp.training.build import master_dtype
from slimefsdp.training.checkpointing import Checkpoints
from slimefsdp.training.metrics import Throughput, mean_over_updates
from slimefsdp.training.packs import PassOptions, RankPacks, StepLoss, accumulate_gradients, outputs_of_packs, reduced
from slimefsdp.training.plan import batch_metrics, loss_weights
from slimefsdp.training.prepare import PreparedBatch, batch_digest
from slimefsdp.training.reference_model import Reference


@dataclass(slots=True)
class RankState:
    """Holds the state of one rank of a group."""

    config: TrainerConfig
    role: Role
    folder: ModelFolder
    mesh: Mesh
    model: DecoderModel
    memory_manager: MemoryManager
    reference: Reference
    kl_coefficient: float  # changes under loss.kl_target
    loss: StepLoss = field(init=False)  # the loss that `train_step` trains
    checkpoints: Checkpoints = field(init=False)
    updater: OptimizerStep = field(init=False)  # this and the following fields exist only for roles that train
    throughput: Throughput = field(init=False)
    profiler: UpdateProfiler = field(init=False)

    def __post_init__(self) -> None:
        self.use(self.config)

    def use(self, config: TrainerConfig) -> None:
        """Makes later calls use these settings.

        Raises:
            ConfigError: loss.policy names a function that cannot be imported.
        """
        self.config = config
        self.loss = StepLoss.of(config, "value" if self.role == "critic" else config.loss_name)

    @contextmanager
    def exchanging(self, adapters: Adapters) -> Iterator[None]:
        """Stores the current adapter's state, and after the block loads that of the adapter that is then current."""
        adapters.current.kl_coefficient = self.kl_coefficient
        try:
            yield
        finally:
            now = adapters.current
            self.updater, self.checkpoints, self.kl_coefficient = now.updater, now.checkpoints, now.kl_coefficient


# ---------------------------------------------------------------------- the step


def train_step(state: RankState, work: PreparedBatch, began: float) -> dict[str, float]:
    """Takes all updates of the plan, and returns the metrics of the step.

    If an error occurs or loss.max_kl ends the step early, the gradients of the unfinished update are dropped.

    Args:
        began: the value of `time.perf_counter` at the beginning of the step.

    Raises:
        StateError: too many gradient norms in a row were not finite; or the advantages depend on a KL, and ranks
            computed different ones.
    """
    if state.role == "actor":  # a critic in the same process trains after the actor, and shares its peak memory
        forget_peak_memory(state.mesh.device)
    state.memory_manager.wake_up(("parameters",))
    if state.config.run.deterministic:  # a step's random numbers depend on its first update only, not on its past
        seed_generators(state.config.run.seed, state.updater.updates_taken, state.mesh.data_rank)
    inputs, work = token_inputs(state, work)
    reports: list[dict[str, float]] = []
    kl_old_stopped: float | None = None
    try:
        with reference_on_device(state, work):
            for update in range(len(work.plan.updates)):
                with state.profiler.profiled(state.updater.updates_taken + 1):
                    metrics = forward_backward(state, work, update, inputs)
                    if state.config.loss.max_kl is not None and metrics.get("kl_old", 0.0) > state.config.loss.max_kl:
                        kl_old_stopped = metrics["kl_old"]
                        break
                    reports.append(metrics | optimizer_step(state))
    finally:
        drop_gradients(state)  # of an unfinished update
    metrics = step_metrics(state, work, inputs, reports, time.perf_counter() - began, kl_old_stopped)
    follow_kl_target(state, metrics, work.batch.num_samples)
    return metrics


def seed_generators(seed: int, update: int, data_rank: int) -> None:
    """Seeds the global random generators of this process: torch's on host and device, Python's and numpy's.

    Args:
        data_rank: the data-parallel rank. cp ranks evaluate the loss of a pack together and must draw the same numbers.
    """
    states = np.random.SeedSequence([seed, update, data_rank]).generate_state(3)
    torch.manual_seed(int(states[0]))
    random.seed(int(states[1]))
    np.random.seed(int(states[2]))


def token_inputs(state: RankState, work: PreparedBatch) -> tuple[TokenInputs, PreparedBatch]:
    """Returns the loss's inputs for each response token, [R], and computes the inputs that the batch lacks.

    The weights are zeros; each update replaces them. The returned work's batch has the experts to replay.
    """
    loss, batch = _loss_of(state, work), work.batch
    config = loss.config
    inputs = TokenInputs(
        weights=torch.zeros(batch.num_response_tokens),
        sample_ids=torch.from_numpy(batch.sample_ids),
        num_samples=batch.num_samples,
        group_ids=_numbered(batch.group_ids if loss.compares_pairs else None, batch.sample_ids),
    )
    old, reference = _tensor(batch.old_log_probs), _tensor(batch.ref_log_probs)
    coefficient = state.kl_coefficient if work.kl_coefficient is None else work.kl_coefficient
    if loss.name == "sft" or not work.plan.updates:
        return inputs, work
    if loss.name == "value":
        penalty = _kl_penalty(loss, old, reference, coefficient) if batch.returns is None else None
        targets = torch.from_numpy(value_targets(config, batch, penalty, work.gae_lambda))
        return replace(inputs, old_values=_tensor(batch.values), returns=targets), work
    source = config.loss.old_log_probs
    needs_old = len(work.plan.updates) > 1 or (loss.has_kl_in_reward and batch.advantages is None)
    is_rollout = old is None and source == "rollout"
    if is_rollout:
        old = _tensor(batch.rollout_log_probs)
    elif old is None and (source == "recompute" or needs_old):
        with heartbeat.during("old_log_probs"), phase("old_log_probs"):
            outputs, experts = policy_outputs(state, work, trained_only=True)
        old = outputs[0]
        if experts is not None:
            work = replace(work, batch=batch.replace(routed_experts=experts))
    if not loss.reads_ref_log_probs:
        reference = None
    elif reference is None:
        with heartbeat.during("reference"), phase("reference"), reference_in_use(state) as model:
            reference = token_outputs(state, model, work, trained_only=True)[0]
    advantages = work.advantages
    if advantages is None:
        advantages = _penalized_advantages(state, batch, _kl_penalty(loss, old, reference, coefficient))
    inputs = replace(
        inputs,
        advantages=_tensor(advantages),
        old_log_probs=old,
        old_is_rollout=is_rollout,
        ref_log_probs=reference,
        rollout_log_probs=_tensor(batch.rollout_log_probs),
    )
    return inputs, work


@heartbeat.during("forward_backward")
def forward_backward(
    state: RankState, work: PreparedBatch, update: int, inputs: TokenInputs, outputs: torch.Tensor | None = None
) -> dict[str, float]:
    """Adds the gradients of one update of the plan, and returns its metrics.

    Must be called within `reference_on_device`.

    Args:
        outputs: see `accumulate_gradients`.
    """
    loss, plan = _loss_of(state, work), work.plan
    objective = loss.objective
    if isinstance(objective, Objective) and objective.kl_coefficient:
        objective = replace(objective, kl_coefficient=state.kl_coefficient)
    weights = loss_weights(loss.config, work.batch, plan.counted_of(update), work.denominator)
    routing = state.model.routing
    load = None if routing is None else ExpertLoad(routing, state.mesh.device)
    sums = accumulate_gradients(
        state.model,
        RankPacks(
            work.batch, plan.updates[update][state.mesh.data_rank], plan.shared, _replays_experts(state, work.batch)
        ),
        replace(inputs, weights=torch.from_numpy(weights)),
        objective,
        state.mesh,
        PassOptions(
            temperature=loss.temperature,
            entropy_grad=loss.config.loss.entropy_coefficient != 0,
            reference=_model_of_reference(state) if _reads_hidden_states(state, work) else None,
            loss_scale=state.updater.loss_scale,
            sum_once=state.config.fsdp.sharding == "optimizer",
        ),
        outputs,
        load,
    )
    metrics = reduced(sums, state.mesh.group)
    if load is not None:
        metrics |= load.metrics(state.mesh.group)
    return value_metrics(metrics) if loss.name == "value" else metrics


def forward_backward_with_log_probs(state: RankState, work: PreparedBatch, inputs: TokenInputs) -> ForwardBackward:
    """Runs `forward_backward` for a plan's only update; also returns the log-probs and entropies of its passes."""
    tokens, dtype = work.batch.num_response_tokens, master_dtype(state.config)
    outputs = torch.zeros(2, tokens, dtype=dtype, device=state.mesh.device)
    metrics = forward_backward(state, work, 0, inputs, outputs)
    dist.all_reduce(outputs, group=state.mesh.group)  # each value is on one rank; the other ranks have 0
    log_probs, entropy = outputs.float().cpu().numpy()
    return ForwardBackward(metrics, LogProbs(log_probs, entropy))


@heartbeat.during("optimizer_step")
def optimizer_step(state: RankState, settings: UpdateSettings | None = None) -> dict[str, float]:
    """Takes one optimiser update with the accumulated gradients.

    Args:
        settings: overrides for this update only.

    Raises:
        StateError: there are no gradients, too many updates in a row were skipped, or an earlier one failed halfway.
    """
    state.memory_manager.wake_up(("parameters", "optimizer"))
    state.checkpoints.wait_for_copy()
    with phase("optimizer"):
        return state.updater.step(state.mesh.group, settings)


def drop_gradients(state: RankState) -> None:
    state.updater.optimizer.zero_grad(set_to_none=True)


def step_metrics(
    state: RankState,
    work: PreparedBatch,
    inputs: TokenInputs,
    reports: list[dict[str, float]],
    seconds: float,
    kl_old_stopped: float | None,
) -> dict[str, float]:
    """Returns the metrics of a step.

    Args:
        reports: the metrics of each completed update.
        kl_old_stopped: the KL at which loss.max_kl ended the step; None if the step was not ended early.
    """
    cost = state.model.attention.cost
    advantages = None if inputs.advantages is None else inputs.advantages.numpy()
    taken = [update for update, report in enumerate(reports) if not report["skipped_update"]]
    metrics = mean_over_updates(reports)
    metrics |= batch_metrics(state.config, work.plan, work.batch, cost, advantages=advantages)
    metrics |= state.throughput.metrics(work.plan, work.batch, seconds, taken)
    metrics["updates"] = float(len(taken))
    metrics["early_stopped_updates"] = float(len(work.plan.updates) - len(reports))
    if kl_old_stopped is not None:
        metrics["kl_old_stopped"] = kl_old_stopped
    if state.config.loss.kl_target is not None and state.role != "critic":  # a critic uses its actor's coefficient
        metrics["kl_coefficient"] = state.kl_coefficient
    return metrics


def follow_kl_target(state: RankState, metrics: dict[str, float], samples: int) -> None:
    """Adapts the KL coefficient to loss.kl_target after a step of `samples` samples."""
    settings = state.config.loss
    # a critic uses its actor's coefficient; kl_ref is missing if there was no update
    if settings.kl_target is not None and state.role != "critic" and "kl_ref" in metrics:
        state.kl_coefficient = next_coefficient(state.kl_coefficient, metrics["kl_ref"], settings.kl_target, samples)


def policy_outputs(
    state: RankState, work: PreparedBatch, *, trained_only: bool
) -> tuple[torch.Tensor, np.ndarray | None]:
    """Returns `token_outputs` of the policy; and under loss.routing_replay=old_log_probs the experts of every token.

    Returns:
        The outputs, and the experts as int16 [T, layers, experts of a token], or None.
    """
    batch, mesh = work.batch, state.mesh
    if state.config.loss.routing_replay != "old_log_probs" or state.role != "actor":
        replays = _replays_experts(state, batch)
        return token_outputs(state, state.model, work, trained_only=trained_only, replays_experts=replays), None
    assert state.model.routing is not None
    record = RecordedExperts(batch.num_tokens, state.model.routing.num_layers)
    outputs = token_outputs(state, state.model, work, trained_only=trained_only, record=record)
    return outputs, record.gathered(mesh.group, mesh.device, batch.lengths, work.plan.shared)


def _replays_experts(state: RankState, batch: RolloutBatch) -> bool:
    """Returns whether the policy chooses the experts of the batch; other models of the run always choose their own."""
    return state.role == "actor" and batch.routed_experts is not None


def token_outputs(
    state: RankState,
    model: DecoderModel,
    work: PreparedBatch,
    *,
    trained_only: bool,
    replays_experts: bool = False,
    record: RecordedExperts | None = None,
) -> torch.Tensor:
    """Returns a model's current outputs for a batch, [outputs, R] on the CPU, equal on every rank.

    The outputs are log-probs and entropies, or values. Each sample is computed once, in the packs of the first epoch.

    Args:
        model: the rank's own model or the reference; its parameters must be on the device.
        trained_only: compute only the tokens under the loss mask; the others are 0.
        replays_experts: whether the model chooses the batch's `routed_experts`.
        record: gets the experts of this rank's tokens.
    """
    first_epoch = work.plan.updates[: work.plan.num_first_epoch_updates]
    samples = [pack for update in first_epoch for pack in update[state.mesh.data_rank]]
    return outputs_of_packs(
        model,
        RankPacks(work.batch, samples, work.plan.shared, replays_experts),
        state.mesh,
        trained_only=trained_only,
        temperature=state.loss.temperature,
        record=record,
    )


@contextmanager
def reference_in_use(state: RankState) -> Iterator[DecoderModel]:
    """Yields the reference model on the device. Under reference.offload=swap the policy is on the host in the block.

    After an error the policy stays on the host until the next call that needs it.
    """
    swaps = state.config.reference.offload == "swap" and "parameters" not in state.memory_manager.asleep
    if swaps:
        state.checkpoints.wait_for_copy()
        state.memory_manager.sleep(("parameters", "optimizer"))
    with state.reference.awake() as model:
        yield model
    if swaps:
        state.memory_manager.wake_up(("parameters",))


def reference_on_device(state: RankState, work: PreparedBatch) -> AbstractContextManager[object]:
    """Returns a context that keeps the reference on the device, if the loss reads its hidden states."""
    if not _reads_hidden_states(state, work) or state.config.reference_is_policy:
        return nullcontext()
    return state.reference.awake()


def _model_of_reference(state: RankState) -> DecoderModel | None:
    """Returns the reference model; with adapters this is the policy, which is evaluated with its adapters off."""
    return state.model if state.config.reference_is_policy else state.reference.model


def _reads_hidden_states(state: RankState, work: PreparedBatch) -> bool:
    return work.loss == "policy" and state.loss.kl_estimator == "full"


def _loss_of(state: RankState, work: PreparedBatch) -> StepLoss:
    if work.loss is None or (work.loss == state.loss.name and work.loss_settings is None):
        return state.loss
    config = state.config if work.loss_settings is None else state.config.with_loss(work.loss_settings)
    return StepLoss.of(config, work.loss)


# ---------------------------------------------------------------------- agreement of ranks


def prepared_together(
    state: RankState, batch: RolloutBatch, prepare: Callable[[], PreparedBatch], other_arguments: object
) -> PreparedBatch:
    """Prepares a batch on every rank and checks that all ranks got the same result.

    Either all ranks refuse the batch or none does.

    Args:
        other_arguments: the arguments of the call besides the batch, which must be equal on all ranks.

    Raises:
        StateError: ranks have different batches, arguments or plans, or a user's estimator returned different values.
        ConfigError: a user's function cannot be imported.
        BatchError: raised by `prepare`.
    """
    # an argument that is not a batch is compared too: if one rank alone refused it, the others would wait for that rank
    content = batch_digest(batch) if isinstance(batch, RolloutBatch) else type(batch).__name__

    def prepare_and_check() -> PreparedBatch:
        prepared = prepare()
        if prepared.loss == "policy":
            check_functions(state.config)
        return prepared

    prepared, error = attempt(prepare_and_check)  # a user's function may fail on one machine only
    digests = [] if prepared is None else [_digest(prepared.advantages), prepared.plan.digest()]
    if all_equal(f"{content} {other_arguments!r} {digests}", state.mesh.group) and prepared is not None:
        return prepared
    reports = gathered((f"{content} {other_arguments!r}", sendable(error), digests), state.mesh.group)
    if len({arguments for arguments, _, _ in reports}) > 1:
        raise StateError(
            "ranks hold different batches, or other arguments",
            field="batch",
            hint="call every rank with the same batch and arguments",
        )
    raise_first([error for _, error, _ in reports], error, state.mesh.group)
    if len({advantages for _, _, (advantages, _) in reports}) > 1:
        raise _different_advantages(state.config)
    raise StateError(
        "ranks hold different plans", field="plan", hint="call every rank with the same batch and settings"
    )


def _penalized_advantages(state: RankState, batch: RolloutBatch, penalty: np.ndarray | None) -> np.ndarray:
    """Returns advantages from rewards minus a KL penalty, float64 [R], equal on all ranks."""
    config, group = state.config, state.mesh.group
    if ":" not in config.estimator:
        return response_advantages(config, batch, penalty)
    advantages = run_together(lambda: response_advantages(config, batch, penalty), group)
    if not all_equal(_digest(advantages), group):
        raise _different_advantages(config)
    return advantages


def _different_advantages(config: TrainerConfig) -> StateError:
    return StateError(
        f"advantage.estimator={config.estimator} gave ranks different advantages",
        field="advantage.estimator",
        hint="let it depend on its arguments alone: no random numbers, no clock, no order of sets",
    )


def _digest(values: np.ndarray | None) -> str:
    return "" if values is None else hashlib.sha256(values.tobytes()).hexdigest()


def _kl_penalty(
    loss: StepLoss, old: torch.Tensor | None, reference: torch.Tensor | None, kl_coefficient: float
) -> np.ndarray | None:
    """Returns the KL that is subtracted from each token's reward, float64 [R]; None if rewards have no KL."""
    if not loss.has_kl_in_reward:
        return None
    assert old is not None and reference is not None
    return (kl_coefficient * kl_estimate(old.double(), reference.double(), loss.kl_estimator)).numpy()


def _numbered(group_ids: np.ndarray | None, sample_ids: np.ndarray) -> torch.Tensor | None:
    """Returns the group of each response token, numbered from 0; int64 [R]."""
    if group_ids is None:
        return None
    return torch.from_numpy(np.unique(group_ids, return_inverse=True)[1][sample_ids])


def _tensor(values: np.ndarray | None) -> torch.Tensor | None:
    return None if values is None else torch.tensor(values)
