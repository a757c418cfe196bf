"""Computes one rank's packs: a model's outputs for their tokens, and the gradients of one update's micro-batches.

Only `StepLoss`, `objective_for` and `check_policy_loss` read settings; the other functions get values as arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from slimefsdp import heartbeat
from slimefsdp.algorithms.objective import CorrectionOptions, MetricSums, Objective, TokenInputs
from slimefsdp.algorithms.policy_losses import (
    POLICY_LOSSES,
    PolicyLoss,
    PolicyLossFunction,
    PolicyOptions,
    PolicyTokens,
    Sequences,
)
from slimefsdp.algorithms.registry import LOOKS_AT_SEQUENCES, PAIRWISE, TRAINS_WITHOUT_ADVANTAGE, LossName
from slimefsdp.algorithms.value_loss import ValueObjective
from slimefsdp.attention.call_plan import PackAttention
from slimefsdp.attention.context_parallel import Attention
from slimefsdp.batching.packing import LocalShare, PackedBatch, local_share, on_device, pack
from slimefsdp.batching.prefix_tree import SharedPrefixes
from slimefsdp.config.callables import failure_of, load_function
from slimefsdp.data.fields import UNKNOWN_EXPERT
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.distributed.collectives import is_out_of_memory
from slimefsdp.distributed.fsdp import abandon_update, gradients_summed_once, reshard
from slimefsdp.distributed.mesh import Mesh, gather_pairs
from slimefsdp.errors import ConfigError
from slimefsdp.models.decoder import DecoderModel, PolicyModel
from slimefsdp.models.fused_log_probs import HeadInputs
from slimefsdp.models.lora import adapters_off
from slimefsdp.models.routing import ExpertLoad, RecordedExperts
from slimefsdp.monitoring.profiler import phase

if TYPE_CHECKING:  # a train step must be able to run without pydantic
    from slimefsdp.config import TrainerConfig

TOKENS = "micro_batch_tokens"
"""Attribute of an out-of-memory error with this rank's number of tokens in the micro-batch that raised the error."""


@dataclass(frozen=True, eq=False, slots=True)
class RankPacks:
    batch: RolloutBatch
    samples: Sequence[np.ndarray]  # int64 sample indices of each pack
    shared: SharedPrefixes | None = None  # the plan's shared prefixes; None means that no prefix is shared
    replays_experts: bool = False  # the passes choose the batch's `routed_experts`


@dataclass(frozen=True, eq=False, slots=True)
class PassOptions:
    """Holds options of the forward and backward passes of an update."""

    temperature: float = 1.0  # divides the logits of a policy
    entropy_grad: bool = False  # gradients flow through the entropy of a policy
    # if set, the policy's outputs include the KL to this model over the whole vocabulary. The model is on the device,
    # and has the policy's architecture; or it is the policy itself, evaluated with its adapters off
    reference: DecoderModel | None = None
    loss_scale: float = 1.0  # multiplies the gradients, for float16; metrics are not scaled
    sum_once: bool = False  # sum gradients over the ranks at the last micro-batch only; see `gradients_summed_once`


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Holds a pack, this rank's share of it on the device, and the attention over it."""

    packed: PackedBatch
    share: LocalShare
    attend: PackAttention


def micro_batches(packs: RankPacks, attention: Attention, mesh: Mesh, *, trained_only: bool) -> Iterator[MicroBatch]:
    """Yields this rank's packs one after the other.

    Args:
        attention: the attention of the model that computes the packs.
        trained_only: compute outputs only for the tokens under the loss mask.
    """
    for samples in packs.samples:
        packed = pack(
            packs.batch,
            samples,
            trained_only=trained_only,
            multiple_of=attention.padding_multiple,
            shared=packs.shared,
        )
        layout = attention.layout(packed.cu_seqlens, packed.forest)
        share = local_share(packed, layout, mesh.cp_rank)
        if packs.replays_experts:
            share = replace(share, routed_experts=_experts_of(packs.batch, share.token_index))
        share = share.to(mesh.device)
        parents = None if packed.forest is None else packed.forest.parents
        yield MicroBatch(packed, share, attention.for_pack(layout, mesh.device, parents))
        heartbeat.tick()


def _experts_of(batch: RolloutBatch, token_index: torch.Tensor | None) -> torch.Tensor:
    assert batch.routed_experts is not None and token_index is not None
    experts = torch.from_numpy(batch.routed_experts[token_index.numpy()])  # a copy
    return experts.masked_fill_((token_index < 0)[:, None, None], UNKNOWN_EXPERT)


def evaluate(
    model: DecoderModel,
    micro_batch: MicroBatch,
    mesh: Mesh,
    *,
    temperature: float = 1.0,
    entropy_grad: bool = False,
    reference: HeadInputs | None = None,
) -> torch.Tensor:
    """Returns the model's outputs for every predicted token of the pack, [outputs, predicted], on every cp rank.

    Args:
        temperature, entropy_grad, reference: see `PolicyModel.forward`; a value model ignores them.
    """
    share, attend = micro_batch.share, micro_batch.attend
    if isinstance(model, PolicyModel):
        outputs = model(share, attend, temperature=temperature, entropy_grad=entropy_grad, reference=reference)
    else:
        outputs = model(share, attend)
    if mesh.cp > 1:
        outputs = gather_pairs(outputs, share.pairs, len(micro_batch.packed.rows), mesh)
    fan_out = micro_batch.packed.fan_out
    result: torch.Tensor = outputs if fan_out is None else outputs[:, on_device(fan_out, mesh.device)]
    return result


@torch.no_grad()
def outputs_of_packs(
    model: DecoderModel,
    packs: RankPacks,
    mesh: Mesh,
    *,
    trained_only: bool,
    temperature: float = 1.0,
    record: RecordedExperts | None = None,
) -> torch.Tensor:
    """Collective: returns the model's outputs for the response tokens, [outputs, R] on the CPU, equal on every rank.

    Outputs of samples that are in no rank's packs are 0.

    Args:
        packs: the packs of this rank; no sample may be in the packs of two data ranks.
        trained_only: compute only the tokens under the loss mask; the others are 0.
        temperature: divides the logits of a policy.
        record: gets the experts of this rank's tokens.
    """
    result: torch.Tensor | None = None
    for micro_batch in micro_batches(packs, model.attention, mesh, trained_only=trained_only):
        with tokens_noted_on_out_of_memory(len(micro_batch.share.tokens)):
            values = evaluate(model, micro_batch, mesh, temperature=temperature)
        if record is not None:
            record.add(*_chosen_experts(model, micro_batch))
        if result is None:
            result = values.new_zeros(len(values), packs.batch.num_response_tokens)
        result[:, on_device(micro_batch.packed.response_index, mesh.device)] = values
    assert result is not None
    # after a forward without a backward FSDP keeps the root gathered; it would be stale once the shards change
    reshard(model)
    if not mesh.is_first_of_pack:
        result.zero_()  # the ranks of a pack hold the same values, which must be summed once
    dist.all_reduce(result, group=mesh.group)  # adding zeros to a value changes no bit of the value
    return result.cpu()


def accumulate_gradients(
    model: DecoderModel,
    packs: RankPacks,
    inputs: TokenInputs,
    objective: Callable[[torch.Tensor, TokenInputs, MetricSums], torch.Tensor],
    mesh: Mesh,
    options: PassOptions,
    outputs: torch.Tensor | None = None,
    load: ExpertLoad | None = None,
) -> MetricSums:
    """Adds the gradients of this rank's micro-batches of one update; FSDP sums them over all ranks.

    Nothing here waits for the device, so that on CUDA the next micro-batch is prepared while one computes. After an
    error all gradients are dropped, including those of earlier calls, so that half an update is never trained on.

    Args:
        inputs: inputs of every response token of the batch, [R], on the CPU.
        objective: computes the loss of a pack from the model's outputs and the inputs of their tokens.
        outputs: zeros [2, R] in the dtype of the model's outputs, on the device. The first rank of a pack writes the
            log-probs and entropies of its trained tokens to it. None means that these values are not kept.
        load: counts the experts of the tokens.

    Returns:
        The metrics of this rank, before the reduction over ranks.
    """
    sums = MetricSums(mesh.device, counted=mesh.is_first_of_pack)
    reference_inputs: HeadInputs | None = None
    try:
        with gradients_summed_once(model) if options.sum_once else nullcontext() as begin:
            for index, micro_batch in enumerate(micro_batches(packs, model.attention, mesh, trained_only=True)):
                # copied to the device while the forward pass runs
                token_inputs = inputs.at(micro_batch.packed.response_index).to(mesh.device)
                if begin is not None:
                    begin(index == len(packs.samples) - 1)
                with tokens_noted_on_out_of_memory(len(micro_batch.share.tokens)):
                    if options.reference is not None:
                        assert isinstance(options.reference, PolicyModel)
                        with phase("reference"), torch.no_grad(), adapters_off(options.reference):
                            routed_freely = replace(micro_batch.share, routed_experts=None)
                            reference_inputs = options.reference.head_inputs(routed_freely, micro_batch.attend)
                    with phase("forward"):
                        values = evaluate(
                            model,
                            micro_batch,
                            mesh,
                            temperature=options.temperature,
                            entropy_grad=options.entropy_grad,
                            reference=reference_inputs,
                        )
                        if load is not None:
                            load.add(*_chosen_experts(model, micro_batch))
                        if outputs is not None and mesh.is_first_of_pack:
                            response_index = on_device(micro_batch.packed.response_index, mesh.device)
                            outputs[:, response_index] = values.detach()[: len(outputs)]
                        loss = objective(values, token_inputs.as_dtype(values.dtype), sums)
                    with phase("backward"):
                        (loss * options.loss_scale).backward()
    except BaseException:
        abandon_update(model)
        raise
    return sums


def _chosen_experts(model: DecoderModel, micro_batch: MicroBatch) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    assert model.routing is not None and micro_batch.share.token_index is not None
    return model.routing.chosen(micro_batch.share.token_index)


def reduced(sums: MetricSums, group: dist.ProcessGroup) -> dict[str, float]:
    """Collective: returns an update's metrics, equal on every rank; a mean over no values is left out."""
    if not sums.sums and not sums.maxima:
        return {}
    vector = torch.stack([*sums.sums.values(), *sums.counts.values()]) if sums.sums else torch.zeros(0)
    dist.all_reduce(vector, group=group)
    values = vector.tolist()
    counts = dict(zip(sums.counts, values[len(sums.sums) :], strict=True))
    result: dict[str, float] = {}
    for name, total in zip(sums.sums, values, strict=False):
        if counts.get(name, 1.0) > 0:
            result[name] = total / counts[name] if name in counts else total
    if sums.maxima:
        maxima = torch.stack(list(sums.maxima.values()))
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        result |= dict(zip(sums.maxima, maxima.tolist(), strict=True))
    return result


@contextmanager
def tokens_noted_on_out_of_memory(tokens: int) -> Iterator[None]:
    """Sets the attribute `TOKENS` of an out-of-memory error that leaves the block.

    Args:
        tokens: this rank's tokens of the micro-batch.
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            setattr(error, TOKENS, tokens)
        raise


# ---------------------------------------------------------------------- the loss of a micro-batch


@dataclass(frozen=True, eq=False, slots=True)
class StepLoss:
    """Holds a loss, and the values that a step derives from the settings for this loss."""

    name: LossName
    config: TrainerConfig
    objective: Objective | ValueObjective
    temperature: float  # temperature of the rollouts; passes without a loss use it too
    compares_pairs: bool
    has_kl_in_reward: bool
    kl_estimator: str
    reads_ref_log_probs: bool

    @classmethod
    def of(cls, config: TrainerConfig, name: LossName) -> StepLoss:
        """Returns a loss under these settings; raises ConfigError like `objective_for`."""
        return cls(
            name,
            config,
            objective_for(config, name, config.loss.kl_coefficient),
            temperature=config.temperature,
            compares_pairs=name == "policy" and config.loss.policy in PAIRWISE,
            has_kl_in_reward=config.has_kl_in_reward,
            kl_estimator=config.kl_estimator,
            reads_ref_log_probs=config.needs_reference
            and (config.kl_estimator != "full" or config.loss.policy == "dpo"),
        )


def objective_for(config: TrainerConfig, loss: LossName, kl_coefficient: float) -> Objective | ValueObjective:
    """Returns the function that computes the loss of a micro-batch.

    Args:
        kl_coefficient: the current value, which changes under loss.kl_target.

    Raises:
        ConfigError: loss.policy names a function that cannot be imported.
    """
    if loss == "value":
        return ValueObjective(config.critic.clip)
    settings, correction = config.loss, config.correction
    options = PolicyOptions(
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
        beta=settings.beta,
    )
    bounds = CorrectionOptions(correction.low, correction.high, correction.veto_below, correction.opsm_threshold)
    return Objective(
        policy=_policy_loss(settings.policy) if loss == "policy" else None,
        options=options,
        looks_at_sequences=settings.policy in LOOKS_AT_SEQUENCES or ":" in settings.policy,
        trains_without_advantage=settings.policy in TRAINS_WITHOUT_ADVANTAGE,
        correction=correction.method,
        correction_options=bounds,
        kl_coefficient=kl_coefficient if settings.kl_in == "loss" else 0.0,
        kl_estimator=config.kl_estimator,
        kl_unbiased=config.is_kl_unbiased,
        entropy_coefficient=settings.entropy_coefficient,
    )


def check_policy_loss(config: TrainerConfig) -> None:
    """Calls the user's own policy loss, if loss.policy names one, without tokens, as on a rank without samples.

    Raises:
        ConfigError: the function cannot be imported, raises, or does not return a loss per token.
    """
    name = config.loss.policy
    if ":" not in name:
        return
    loss, nothing = _policy_loss(name), torch.zeros(0)
    no_sequences = Sequences(torch.zeros(0, dtype=torch.int64), 1)
    reference = nothing if config.needs_reference else None
    tokens = PolicyTokens(nothing.clone().requires_grad_(), nothing, nothing, no_sequences, None, reference)
    try:
        loss(tokens, PolicyOptions())
    except Exception as error:  # the user's function may raise anything
        raise ConfigError(
            f"loss.policy={name}, tried on a pack without tokens: {error}",
            field="loss.policy",
            hint="return a PolicyLoss whose fields are as long as log_probs, of which there may be none",
        ) from error


def _policy_loss(name: str) -> PolicyLossFunction:
    if name in POLICY_LOSSES:
        return POLICY_LOSSES[name]
    function = load_function(name, field="loss.policy", example="my_losses:my_loss", takes=("tokens", "options"))

    def checked(tokens: PolicyTokens, options: PolicyOptions) -> PolicyLoss:
        # RuntimeError, because a typed error states that all ranks raised it, and other ranks have other tokens
        try:
            result: object = function(tokens, options)
        except (Exception, SystemExit) as error:
            raise RuntimeError(failure_of(name, error)) from error
        shape = tokens.log_probs.shape
        if not isinstance(result, PolicyLoss) or any(getattr(x, "shape", None) != shape for x in result):
            shapes = [tuple(getattr(x, "shape", ())) for x in result] if isinstance(result, PolicyLoss) else ""
            raise RuntimeError(f"{name} returned a {type(result).__name__} {shapes} for {len(tokens.log_probs)} tokens")
        if not result.loss.requires_grad:
            raise RuntimeError(f"{name} returned a loss without a graph; make it of tokens.log_probs")
        return result

    return checked
