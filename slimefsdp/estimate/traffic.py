"""Bytes that ranks send for sharding and for attention, and the choice of `fsdp.sharding=auto` that follows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slimefsdp.attention.select import repeated_kv_heads
from slimefsdp.batching.cost import Strategy
from slimefsdp.batching.cp_sharding import Layout, sent_rows, tokens_of
from slimefsdp.errors import ConfigError
from slimefsdp.estimate.hardware import HEADROOM
from slimefsdp.estimate.memory import MicroBatches, training_memory
from slimefsdp.estimate.setup import ByteSizes, Sharding, TrainingSetup
from slimefsdp.model_spec import ModelSpec

AUTO_LEVELS: tuple[Sharding, ...] = ("full", "keep_parameters", "optimizer")
"""What `fsdp.sharding=auto` chooses from. `replicate` sends more than `optimizer`."""


@dataclass(frozen=True, slots=True)
class ShardingTraffic:
    """Bytes that one rank sends in an update, by ring collectives."""

    all_gather: int
    reduce_scatter: int
    all_reduce: int
    copied: int = 0  # read and written on the device to gather parameters and to sum gradients

    @property
    def total(self) -> int:
        return self.all_gather + self.reduce_scatter + self.all_reduce


def gathered_parameters(setup: TrainingSetup, micro_batches: float) -> float:
    """Returns how many parameters a rank gathers in an update, each counted as often as it is gathered.

    They are gathered in forward and, except for the root's, again in backward; under `keep_parameters` once in a
    micro-batch, under `optimizer` once.
    """
    if setup.sharding == "optimizer":
        return float(setup.parameters)
    if setup.sharding == "keep_parameters":
        return micro_batches * setup.parameters
    return micro_batches * (2 * setup.parameters - setup.model.root_parameters)


def sharding_traffic(setup: TrainingSetup, micro_batches: float = 1) -> ShardingTraffic:
    """Returns what a rank sends to gather parameters and to sum gradients in an update.

    Gradients are summed over the shards, then over the copies of the model, in every micro-batch; under `optimizer`
    once.
    """
    shards, copies = setup.shards, setup.mesh.ranks // setup.shards
    gathered = gathered_parameters(setup, micro_batches) * setup.sizes.compute
    trained = setup.model.parameters * setup.trained_share + setup.adapter_parameters
    summed = (1 if setup.sharding == "optimizer" else micro_batches) * trained * setup.sizes.reduce
    others = (shards - 1) / shards
    return ShardingTraffic(
        all_gather=round(gathered * others),
        reduce_scatter=round(summed * others),
        all_reduce=round(2 * summed / shards * (copies - 1) / copies),
        copied=round(2 * (gathered + summed)),
    )


def choose_sharding(setup: TrainingSetup, max_tokens_per_rank: int, memory_bytes: int | None) -> Sharding:
    """Returns the level that sends least, and then copies least, of those whose memory fits; else the smallest.

    Equal arguments give equal levels. The level of `setup` is ignored.

    Args:
        memory_bytes: what is free for a rank; None: more than enough.
    """
    # with a single micro-batch, gradients are summed once at every level
    batch = MicroBatches(max_tokens_per_rank, rows=max_tokens_per_rank, count=2)
    limit = sys.maxsize if memory_bytes is None else int(HEADROOM * memory_bytes)
    setups = [replace(setup, sharding=level) for level in AUTO_LEVELS]
    held = {one.sharding: training_memory(one, batch).total for one in setups}
    sent = {one.sharding: sharding_traffic(one, batch.count) for one in setups}
    fitting = [level for level in AUTO_LEVELS if held[level] <= limit]
    if not fitting:
        return min(AUTO_LEVELS, key=lambda level: held[level])
    return min(fitting, key=lambda level: (sent[level].total, sent[level].copied, held[level]))


def attention_comm_bytes(
    layout: Layout,
    strategy: Strategy,
    model: ModelSpec,
    sizes: ByteSizes,
    parents: Sequence[int | None] | None = None,
) -> tuple[int, int]:
    """Returns the (forward, backward) bytes sent for one pack in one layer, summed over the cp ranks.

    `sent_rows` says which rows travel. ring: their K and V are passed on cp - 1 times, once more in backward, and the
    gradients as often. all_gather: their K and V go to cp - 1 ranks and are kept, and gradients come back from as many.
    ulysses: q, k, v and the output of every token go to the ranks that hold their heads, except for the share of
    1 / cp that is there already; their gradients do the same in backward. Ring and all_gather accumulate gradients in
    `sizes.wide`, and Ulysses sends them in the compute dtype.

    Args:
        parents: the parent of every node of the pack, where samples share a prefix.

    Raises:
        ConfigError: Ulysses, and heads that cp does not divide.
    """
    cp = len(layout)
    if cp == 1:
        return 0, 0
    if strategy == "ulysses":
        if model.heads % cp:
            raise ConfigError(
                f"Ulysses cannot divide {model.heads} attention heads over mesh.cp={cp} ranks",
                field="attention.strategy",
                hint="use ring or all_gather, or a mesh.cp that divides the heads",
            )
        sent_heads = 2 * model.heads + 2 * repeated_kv_heads(model.heads, model.kv_heads, cp)  # q and output, k and v
        forward = sum(tokens_of(layout)) * (sent_heads // cp) * model.head_dim * (cp - 1) * sizes.compute
        return forward, forward
    elements = (cp - 1) * sum(sent_rows(layout, parents)) * 2 * model.kv_heads * model.head_dim
    again = sizes.compute if strategy == "ring" else 0
    return elements * sizes.compute, elements * (again + sizes.wide)
