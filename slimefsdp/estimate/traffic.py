"""Estimates the bytes that ranks send for sharding and attention, and chooses the level for `fsdp.sharding=auto`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slimefsdp.attention.select import repeated_kv_heads
from slimefsdp.batching.cost import Strategy
from slimefsdp.batching.cp_sharding import Layout, sent_rows, tokens_of
from slimefsdp.config import RunConfig
from slimefsdp.errors import ConfigError
from slimefsdp.estimate.hardware import HEADROOM
from slimefsdp.estimate.memory import MicroBatches, training_memory
from slimefsdp.estimate.setup import ByteSizes, MeshShape, Sharding, TrainingSetup, setup_of
from slimefsdp.model_spec import ModelSpec
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.rpc import Role

AUTO_LEVELS: tuple[Sharding, ...] = ("full", "keep_parameters", "optimizer")
"""The levels from which `fsdp.sharding=auto` chooses. `replicate` is not among them: it sends more than `optimizer`."""


@dataclass(frozen=True, slots=True)
class ShardingTraffic:
    """Holds the bytes that one rank sends in an update, assuming ring collectives."""

    all_gather: int
    reduce_scatter: int
    all_reduce: int
    copied: int = 0  # bytes that the device reads and writes to gather parameters and sum gradients

    @property
    def total(self) -> int:
        return self.all_gather + self.reduce_scatter + self.all_reduce


def gathered_parameters(setup: TrainingSetup, micro_batches: float) -> float:
    """Returns the number of parameters that a rank gathers in an update; a parameter counts as often as it is gathered.

    With `fsdp.sharding: full`, parameters are gathered in the forward pass of every micro-batch, and, except for the
    root's, again in backward. With `keep_parameters` they are gathered once in a micro-batch, and with `optimizer` once
    in an update.
    """
    if setup.sharding == "optimizer":
        return float(setup.parameters)
    if setup.sharding == "keep_parameters":
        return micro_batches * setup.parameters
    return micro_batches * (2 * setup.parameters - setup.model.root_parameters)


def sharding_traffic(setup: TrainingSetup, micro_batches: float = 1) -> ShardingTraffic:
    """Returns the bytes that a rank sends in an update to gather parameters and sum gradients.

    Gradients are summed over shards and then over copies of the model. This happens in every micro-batch, or once in an
    update if `fsdp.sharding` is `optimizer`.
    """
    shards, copies = setup.shards, setup.mesh.ranks // setup.shards
    gathered = gathered_parameters(setup, micro_batches) * setup.sizes.compute
    trained = setup.trained_parameters
    summed = (1 if setup.sharding == "optimizer" else micro_batches) * trained * setup.sizes.reduce
    others = (shards - 1) / shards
    return ShardingTraffic(
        all_gather=round(gathered * others),
        reduce_scatter=round(summed * others),
        all_reduce=round(2 * summed / shards * (copies - 1) / copies),
        copied=round(2 * (gathered + summed)),
    )


def shared_layer_bytes(setup: TrainingSetup, tokens: float) -> dict[str, int]:
    """Returns the bytes that a rank sends in an update because ranks share matrices or experts, by kind.

    - tensor: attention and MLP of a layer each gather their inputs and add up their outputs, in forward, backward
      and recomputation; a mixture of experts does not, since every rank computes its own tokens. The embedding adds up
      its outputs, and the head gathers its inputs, in forward and backward.
    - expert: each token goes to its experts and back, in forward, backward and recomputation.

    Args:
        tokens: tokens of the update on one cp rank.
    """
    model, passes = setup.model, 2 + setup.recomputed_share
    row = model.hidden * setup.sizes.compute
    routed = 2 * model.layers * passes * tokens / setup.tp * model.active_experts * row
    sent = {
        "tensor": _bytes_of_all_tokens(setup, tokens) * (setup.tp - 1) / setup.tp,
        "expert": routed * (setup.ep - 1) / setup.ep,
    }
    return {kind: round(count) for kind, count in sent.items() if count}


def copied_token_bytes(setup: TrainingSetup, tokens: float) -> int:
    """Returns the bytes that a rank's device reads and writes in an update to gather tokens and add up partial sums.

    Args:
        tokens: as in `shared_layer_bytes`.
    """
    return round(2 * _bytes_of_all_tokens(setup, tokens)) if setup.tp > 1 else 0


def _bytes_of_all_tokens(setup: TrainingSetup, tokens: float) -> float:
    """Returns the bytes of all tp ranks' tokens, summed over the collectives that `shared_layer_bytes` lists."""
    in_layer = 4 if setup.model.experts == 1 else 2
    collectives = in_layer * setup.model.layers * (2 + setup.recomputed_share) + 4
    return collectives * tokens * setup.model.hidden * setup.sizes.compute


def choose_sharding(setup: TrainingSetup, max_tokens_per_rank: int, memory_bytes: int | None) -> Sharding:
    """Returns the level that sends least among those that fit the memory; of equal levels, the one that copies least.

    If no level fits, returns the level that needs least memory. `setup.sharding` is ignored.

    Args:
        memory_bytes: free memory of a rank; None means unlimited.
    """
    # two micro-batches, because with one the levels would not differ in how often gradients are summed
    batch = MicroBatches(max_tokens_per_rank, rows=max_tokens_per_rank, count=2)
    limit = sys.maxsize if memory_bytes is None else int(HEADROOM * memory_bytes)
    setups = [replace(setup, sharding=level) for level in AUTO_LEVELS]
    memory_of = {candidate.sharding: training_memory(candidate, batch).total for candidate in setups}
    traffic_of = {candidate.sharding: sharding_traffic(candidate, batch.count) for candidate in setups}
    fitting = [level for level in AUTO_LEVELS if memory_of[level] <= limit]
    if not fitting:
        return min(AUTO_LEVELS, key=lambda level: memory_of[level])
    return min(fitting, key=lambda level: (traffic_of[level].total, traffic_of[level].copied, memory_of[level]))


def setup_of_folders(
    config: RunConfig, model: ModelSpec, *, on_cpu: bool, memory_bytes: int | None = None
) -> TrainingSetup:
    """Returns the setup from which memory and time are estimated. In `config`, mesh.dp must be a number.

    Args:
        model: the sizes of the policy; the sizes of reference and critic are read from config.json files.
        memory_bytes: memory of a rank's device, by which fsdp.sharding=auto is resolved; None means no limit.
    """
    assert config.mesh.dp != "auto"
    mesh = MeshShape(config.mesh.dp_replicate, config.mesh.dp, config.mesh.cp)

    def model_of(role: Role) -> ModelSpec:
        path, field = config.folder_of(role)
        return ModelSpec.from_config(read_model_folder(path, field=field, with_weights=False).config, field=field)

    setup = setup_of(config, model, mesh, on_cpu=on_cpu, reference=model_of("ref"), critic=model_of("critic"))
    if config.fsdp.sharding != "auto":
        return setup
    return replace(setup, sharding=choose_sharding(setup, config.batch.max_tokens_per_rank, memory_bytes))


def attention_comm_bytes(
    layout: Layout,
    strategy: Strategy,
    model: ModelSpec,
    sizes: ByteSizes,
    parents: Sequence[int | None] | None = None,
) -> tuple[int, int]:
    """Returns the (forward, backward) bytes sent for one pack in one layer, summed over the cp ranks.

    - ring: K and V of the rows in `sent_rows` are passed on cp - 1 times, and again in backward with their gradients.
    - all_gather: K and V of these rows are sent to cp - 1 ranks and kept; their gradients are sent back.
    - ulysses: q, k, v and the output of every token are sent to the ranks of their heads, except for a share of 1 / cp
      that is already there. Backward sends the gradients in the same way.

    Ring and all_gather send gradients with `sizes.wide` bytes per element, Ulysses in the compute dtype.

    Args:
        parents: the parent of every node of the pack's prefix tree; None means that samples share no prefix.

    Raises:
        ConfigError: the strategy is `ulysses`, and cp does not divide the heads.
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
