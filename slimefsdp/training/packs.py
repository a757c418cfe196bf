"""A model at work on one rank's packs: what it says of their tokens, and the gradients of one update's micro-batches.

Functions take values here, not settings, but for `objective_for`, which has the loss of a micro-batch from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from slimefsdp import heartbeat
from slimefsdp.algorithms.objective import Objective, TokenInputs
from slimefsdp.algorithms.policy_losses import (
    POLICY_LOSSES,
    PolicyLoss,
    PolicyLossFunction,
    PolicyOptions,
    PolicyTokens,
    Sequences,
)
from slimefsdp.algorithms.registry import LOOKS_AT_SEQUENCES, TRAINS_WITHOUT_ADVANTAGE, LossName
from slimefsdp.algorithms.rollout_correction import CorrectionOptions
from slimefsdp.algorithms.value_loss import ValueObjective
from slimefsdp.attention.call_plan import PackAttention
from slimefsdp.attention.context_parallel import Attention
from slimefsdp.batching.packing import LocalShare, PackedBatch, local_share, on_device, pack
from slimefsdp.batching.prefix_tree import SharedPrefixes
from slimefsdp.config.callables import failure_of, load_function
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.distributed.fsdp import abandon_update, gradients_summed_once, reshard
from slimefsdp.distributed.mesh import Mesh, gather_pairs
from slimefsdp.distributed.torch_errors import is_out_of_memory
from slimefsdp.errors import ConfigError
from slimefsdp.models.decoder import DecoderModel, PolicyModel
from slimefsdp.models.fused_log_probs import HeadInputs
from slimefsdp.models.lora import adapters_off
from slimefsdp.monitoring.profiler import phase
from slimefsdp.training.metrics import MetricSums

if TYPE_CHECKING:  # a name for mypy only: the step alone runs where pydantic is not installed
    from slimefsdp.config import RunConfig

TOKENS = "micro_batch_tokens"
"""An attribute that an error of memory gets."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A pack, and what this rank computes of it, on the device."""

    packed: PackedBatch
    share: LocalShare
    attend: PackAttention


def micro_batches(
    batch: RolloutBatch,
    packs: Sequence[np.ndarray],
    attention: Attention,
    mesh: Mesh,
    *,
    trained_only: bool,
    shared: SharedPrefixes | None = None,
) -> Iterator[MicroBatch]:
    """This rank's packs, one after the other.

    Args:
        packs: int64 sample indices, one array for each micro-batch.
        attention: of the model that will evaluate them.
        trained_only: only tokens under the loss mask are predicted.
        shared: what the batch's samples have in common is in a pack once.
    """
    for indices in packs:
        packed = pack(batch, indices, trained_only=trained_only, multiple_of=attention.padding_multiple, shared=shared)
        layout = attention.layout(packed.cu_seqlens, packed.forest)
        share = local_share(packed, layout, mesh.cp_rank).to(mesh.device)
        parents = None if packed.forest is None else packed.forest.parents
        yield MicroBatch(packed, share, attention.for_pack(layout, mesh.device, parents))
        heartbeat.tick()


def evaluate(
    model: DecoderModel,
    micro_batch: MicroBatch,
    mesh: Mesh,
    *,
    temperature: float = 1.0,
    entropy_grad: bool = False,
    reference: HeadInputs | None = None,
) -> torch.Tensor:
    """What the model says of all tokens that the pack predicts, [outputs, predicted], on every cp rank.

    Args:
        temperature, entropy_grad, reference: of a policy, as in its forward; a value model has no use for them.
    """
    share, attend = micro_batch.share, micro_batch.attend
    if isinstance(model, PolicyModel):
        outputs = model(share, attend, temperature=temperature, entropy_grad=entropy_grad, reference=reference)
    else:
        outputs = model(share, attend)
    if mesh.cp > 1:
        outputs = gather_pairs(outputs, share.pairs, len(micro_batch.packed.rows), mesh)
    fan_out = micro_batch.packed.fan_out
    found: torch.Tensor = outputs if fan_out is None else outputs[:, on_device(fan_out, mesh.device)]
    return found


@torch.no_grad()
def outputs_of_packs(
    model: DecoderModel,
    batch: RolloutBatch,
    packs: Sequence[np.ndarray],
    mesh: Mesh,
    *,
    trained_only: bool,
    shared: SharedPrefixes | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Collective: what a model says of the batch's response tokens, [outputs, R] on the CPU, the same on every rank.

    Where no pack looked they are 0.

    Args:
        packs: int64 sample indices of this rank, one array for each micro-batch; over the data ranks they are disjoint.
        trained_only: only of tokens under the loss mask; 0 elsewhere.
        shared: of the plan that the packs are of.
        temperature: of a policy, as in its forward.
    """
    result: torch.Tensor | None = None
    for micro_batch in micro_batches(batch, packs, model.attention, mesh, trained_only=trained_only, shared=shared):
        with at_work_on(len(micro_batch.share.tokens)):
            values = evaluate(model, micro_batch, mesh, temperature=temperature)
        if result is None:
            result = values.new_zeros(len(values), batch.num_response_tokens)
        result[:, on_device(micro_batch.packed.response_index, mesh.device)] = values
    assert result is not None
    # the root stays unsharded after a forward without backward; whoever changes the shards next must not be outrun
    reshard(model)
    if mesh.cp_rank != 0:
        result.zero_()  # cp ranks hold the same values: they are summed once
    dist.all_reduce(result, group=mesh.group)  # adding zeros to one value changes no bit of it
    return result.cpu()


def accumulate_gradients(
    model: DecoderModel,
    batch: RolloutBatch,
    packs: Sequence[np.ndarray],
    inputs: TokenInputs,
    objective: Callable[[torch.Tensor, TokenInputs, MetricSums], torch.Tensor],
    mesh: Mesh,
    sums: MetricSums,
    *,
    shared: SharedPrefixes | None = None,
    temperature: float = 1.0,
    entropy_grad: bool = False,
    reference: DecoderModel | None = None,
    loss_scale: float = 1.0,
    sum_once: bool = False,
    found: torch.Tensor | None = None,
) -> None:
    """Adds the gradients of this rank's micro-batches of one update; FSDP sums them over all ranks.

    Nothing here waits for the device, so that on CUDA the next micro-batch is prepared while one computes. After an
    error no gradient is left, not those of earlier calls either: half an update would be trained on as if it were one.

    Args:
        packs: int64 sample indices, one array for each micro-batch.
        inputs: per response token of the batch, [R], on the CPU.
        objective: from the model's outputs and what is known of their tokens to a pack's loss.
        sums: receives this rank's metrics.
        shared: of the plan that the packs are of.
        temperature, entropy_grad: of a policy, as in its forward.
        reference: the KL to this policy over the whole vocabulary is a further output of the model; awake, and of its
            architecture, or the model itself, which then counts without its adapters.
        loss_scale: makes the gradients this many times larger, for float16; the metrics are without it.
        sum_once: over the ranks at the last micro-batch alone; see `gradients_summed_once`.
        found: zeros [2, R] of the outputs' dtype on the device, which the first cp rank fills with log-probs and
            entropies of these packs' trained tokens, out of the very passes that are differentiated.
    """
    work = micro_batches(batch, packs, model.attention, mesh, trained_only=True, shared=shared)
    ref_inputs: HeadInputs | None = None
    try:
        with gradients_summed_once(model) if sum_once else nullcontext() as begin:
            for index, micro_batch in enumerate(work):
                here = inputs.at(micro_batch.packed.response_index).to(mesh.device)  # under way while the forward runs
                if begin is not None:
                    begin(index == len(packs) - 1)
                with at_work_on(len(micro_batch.share.tokens)):
                    if reference is not None:
                        assert isinstance(reference, PolicyModel)
                        with phase("reference"), torch.no_grad(), adapters_off(reference):
                            ref_inputs = reference.head_inputs(micro_batch.share, micro_batch.attend)
                    with phase("forward"):
                        outputs = evaluate(
                            model, micro_batch, mesh,
                            temperature=temperature, entropy_grad=entropy_grad, reference=ref_inputs,
                        )  # fmt: skip
                        if found is not None and mesh.cp_rank == 0:  # cp ranks hold the same values
                            places = on_device(micro_batch.packed.response_index, mesh.device)
                            found[:, places] = outputs.detach()[: len(found)]
                        loss = objective(outputs, here.as_dtype(outputs.dtype), sums)
                    with phase("backward"):
                        (loss * loss_scale).backward()
    except BaseException:
        abandon_update(model)
        raise


@contextmanager
def at_work_on(tokens: int) -> Iterator[None]:
    """Has an error of memory that leaves the block know the size of the micro-batch it came from.

    Args:
        tokens: of this rank.
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            setattr(error, TOKENS, tokens)
        raise


# ---------------------------------------------------------------------- the loss of a micro-batch


def objective_for(config: RunConfig, loss: LossName, kl_coefficient: float) -> Objective | ValueObjective:
    """The training loss.

    Args:
        kl_coefficient: as it is now; it moves under loss.kl_target.

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
        sapo_temperature_positive=settings.sapo_temperature_positive,
        sapo_temperature_negative=settings.sapo_temperature_negative,
        dpo_beta=settings.dpo_beta,
        dro_beta=settings.dro_beta,
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
        kl_unbiased=settings.kl_unbiased,
        entropy_coefficient=settings.entropy_coefficient,
    )


def check_policy_loss(config: RunConfig) -> None:
    """Tries a loss of the user's own on a pack without tokens, as a rank without samples will.

    Raises:
        ConfigError: it cannot be imported, fails there, or returns something else than a loss per token.
    """
    name = config.loss.policy
    if ":" not in name:
        return
    loss, nothing = _policy_loss(name), torch.zeros(0)
    nowhere = Sequences(torch.zeros(0, dtype=torch.int64), 1)
    reference = nothing if config.needs_reference else None
    tokens = PolicyTokens(nothing.clone().requires_grad_(), nothing, nothing, nowhere, None, reference)
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
        # never a typed error: those say that all ranks raised alike, and this rank's tokens are its own
        try:
            found: object = function(tokens, options)
        except (Exception, SystemExit) as error:
            raise RuntimeError(failure_of(name, error)) from error
        shape = tokens.log_probs.shape
        if not isinstance(found, PolicyLoss) or any(getattr(x, "shape", None) != shape for x in found):
            shapes = [tuple(getattr(x, "shape", ())) for x in found] if isinstance(found, PolicyLoss) else ""
            raise RuntimeError(f"{name} returned a {type(found).__name__} {shapes} for {len(tokens.log_probs)} tokens")
        if not found.loss.requires_grad:
            raise RuntimeError(f"{name} returned a loss without a graph; make it of tokens.log_probs")
        return found

    return checked
