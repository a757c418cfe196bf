"""What sharding a model costs: the bytes that a rank holds, and the bytes that it sends for a micro-batch.

Counted from the model's dimensions alone; activations are not in it. Backends may pad what does not divide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slimefsdp.data.dimensions import ModelDimensions

Sharding = Literal["full", "keep_parameters", "replicate"]
SHARDINGS: tuple[Sharding, ...] = ("full", "keep_parameters", "replicate")


@dataclass(frozen=True, slots=True)
class ByteSizes:
    """Bytes per element of what a training rank holds and sends."""

    compute: int = 2  # parameters and activations in forward and backward
    master: int = 4  # parameters, gradients and optimiser state at rest
    reduce: int = 4  # gradients while they are summed over ranks
    optimizer_states: int = 2  # tensors as large as the parameters: 2 in AdamW, 1 with momentum alone

    @property
    def attention_gradients(self) -> int:
        """The accumulators of the gradients of keys and values."""
        return max(4, self.compute)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank, without activations."""

    parameters: int
    gradients: int
    optimizer: int
    unsharded: int  # parameters gathered in the compute dtype at the fullest moment

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.unsharded


@dataclass(frozen=True, slots=True)
class ShardingTraffic:
    """Bytes that one rank sends."""

    all_gather: int
    reduce_scatter: int
    all_reduce: int

    @property
    def total(self) -> int:
        return self.all_gather + self.reduce_scatter + self.all_reduce


def memory_per_rank(dimensions: ModelDimensions, sharding: Sharding, *, shard_ranks: int, sizes: ByteSizes) -> Memory:
    """What a rank holds.

    Args:
        shard_ranks: ranks that share one copy of the model, mesh.dp x mesh.cp; `replicate` shares nothing.
    """
    held = -(-dimensions.parameters // (1 if sharding == "replicate" else shard_ranks))
    # the root stays whole from forward to backward; beside it one layer at a time, or everything
    gathered = dimensions.root_parameters + max(dimensions.layer_parameters, dimensions.embedding_unit_parameters)
    if sharding == "keep_parameters":
        gathered = dimensions.parameters
    return Memory(
        parameters=held * sizes.master,
        gradients=held * sizes.master,
        optimizer=held * sizes.master * sizes.optimizer_states,
        unsharded=min(gathered, dimensions.parameters) * sizes.compute,
    )


def sharding_traffic(
    dimensions: ModelDimensions, sharding: Sharding, *, dp_replicate: int, shard_ranks: int, sizes: ByteSizes
) -> ShardingTraffic:
    """What a rank sends for the forward and backward of one micro-batch, by ring collectives.

    Parameters are gathered in forward and, but for the root's, again in backward; `keep_parameters` gathers them once.
    Gradients are summed over the shards, then over the copies of the model.
    """
    if sharding == "replicate":
        dp_replicate, shard_ranks = dp_replicate * shard_ranks, 1
    parameters = dimensions.parameters
    gathered = parameters if sharding == "keep_parameters" else 2 * parameters - dimensions.root_parameters
    others = shard_ranks - 1
    return ShardingTraffic(
        all_gather=gathered * sizes.compute * others // shard_ranks,
        reduce_scatter=parameters * sizes.reduce * others // shard_ranks,
        all_reduce=2 * (parameters // shard_ranks) * sizes.reduce * (dp_replicate - 1) // dp_replicate,
    )
