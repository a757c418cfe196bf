"""The work of one rank: log-probs of its packs, and the gradients of one update's micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from slimefsdp.attention.strategy import Attention, PackAttention
from slimefsdp.data.pack import LocalShare, PackedBatch, local_share, pack
from slimefsdp.data.rollout import RolloutBatch
from slimefsdp.loss.objective import Objective, TokenInputs
from slimefsdp.metrics import MetricSums
from slimefsdp.models.policy import PolicyModel
from slimefsdp.parallel.fsdp import reshard
from slimefsdp.parallel.mesh import Mesh, gather_pairs


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A pack, and what this rank computes of it, on the device."""

    packed: PackedBatch
    share: LocalShare
    attend: PackAttention


def micro_batches(
    batch: RolloutBatch, samples: Sequence[np.ndarray], attention: Attention, mesh: Mesh, *, trained_only: bool
) -> Iterator[MicroBatch]:
    """This rank's packs, one after the other.

    Args:
        attention: of the policy that will evaluate them.
    """
    for indices in samples:
        packed = pack(batch, indices, trained_only=trained_only, multiple_of=attention.padding_multiple)
        layout = attention.layout(packed.cu_seqlens)
        share = local_share(packed, layout, mesh.cp_rank).to(mesh.device)
        yield MicroBatch(packed, share, attention.for_pack(layout, mesh.device))


def evaluate(
    policy: PolicyModel, micro_batch: MicroBatch, mesh: Mesh, *, temperature: float, entropy_grad: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of all pairs of the pack, [pairs] each, on every cp rank."""
    share = micro_batch.share
    log_probs, entropy = policy(
        share.tokens, share.positions, micro_batch.attend, share.rows, share.targets,
        temperature=temperature, with_entropy=True, entropy_grad=entropy_grad,
    )  # fmt: skip
    if mesh.cp == 1:
        return log_probs, entropy
    both = gather_pairs(torch.stack([log_probs, entropy]), share.pairs, len(micro_batch.packed.rows), mesh)
    return both[0], both[1] if entropy_grad else both[1].detach()


@torch.no_grad()
def log_probs_of_packs(
    policy: PolicyModel,
    batch: RolloutBatch,
    samples: Sequence[np.ndarray],
    mesh: Mesh,
    *,
    temperature: float,
    trained_only: bool,
) -> torch.Tensor:
    """Log-probs and entropies in the batch's order, [2, R] on the CPU, the same on every rank; 0 where no pack looked.

    Args:
        samples: this rank's packs; over the dp ranks they are disjoint.
        trained_only: only tokens under the loss mask.
    """
    result: torch.Tensor | None = None
    for micro_batch in micro_batches(batch, samples, policy.attention, mesh, trained_only=trained_only):
        values = torch.stack(evaluate(policy, micro_batch, mesh, temperature=temperature))
        if result is None:
            result = values.new_zeros(2, batch.num_response_tokens)
        result[:, micro_batch.packed.response_index.to(mesh.device)] = values
    assert result is not None
    # the root stays unsharded after a forward without backward; whoever changes the shards next must not be outrun
    reshard(policy)
    if mesh.cp_rank != 0:
        result.zero_()  # cp ranks hold the same values: they are summed once
    dist.all_reduce(result, group=mesh.group)  # adding zeros to one value changes no bit of it
    return result.cpu()


def accumulate_gradients(
    policy: PolicyModel,
    batch: RolloutBatch,
    samples: Sequence[np.ndarray],
    inputs: TokenInputs,
    objective: Objective,
    mesh: Mesh,
    sums: MetricSums,
    *,
    temperature: float,
    loss_scale: float = 1.0,
) -> None:
    """Adds the gradients of this rank's micro-batches of one update; FSDP sums them over all ranks.

    Args:
        inputs: per response token of the batch, [R], on the CPU.
        sums: receives this rank's metrics.
        loss_scale: makes the gradients this many times larger, for float16; the metrics are without it.
    """
    for micro_batch in micro_batches(batch, samples, policy.attention, mesh, trained_only=True):
        log_probs, entropy = evaluate(
            policy, micro_batch, mesh, temperature=temperature, entropy_grad=objective.entropy_coefficient != 0
        )
        here = inputs.at(micro_batch.packed.response_index).to(mesh.device, log_probs.dtype)
        loss = objective(log_probs, entropy, here, sums)
        (loss * loss_scale).backward()
