"""What a mesh would make of samples, without running it: schedule, balance, bytes sent, memory and FLOPs.

The plan and the layouts are the ones that training uses, so counts are exact; time is the planner's estimate. Numpy
only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from slimefsdp.attention.select import repeated_kv_heads
from slimefsdp.batching.cost import STRATEGIES, CostModel, Strategy
from slimefsdp.batching.cp_sharding import (
    Layout,
    hybrid_layout,
    layout_time,
    sent_rows,
    tokens_of,
    work_of,
    zigzag_layout,
)
from slimefsdp.batching.plan import PackLimits, Plan, UpdateCut, plan_batch
from slimefsdp.batching.prefix_tree import Forest, forest_of
from slimefsdp.errors import ConfigError
from slimefsdp.model_spec import ModelSpec
from slimefsdp.perf_model.flops import Flops, forward_flops, training_flops
from slimefsdp.perf_model.memory import (
    SHARDINGS,
    ByteSizes,
    Computing,
    Memory,
    MicroBatches,
    Sharding,
    ShardingTraffic,
    sharding_traffic,
    step_memory,
)

_PAIRS = CostModel(linear=0.0, quadratic=0.5, comm=0.0)  # work that is nothing but attention pairs (n^2 / 2 of them)


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Ranks by axis; cp ranks share packs, dp x cp share a copy of the model."""

    dp_replicate: int = 1
    dp: int = 1
    cp: int = 1

    @property
    def data_ranks(self) -> int:
        return self.dp_replicate * self.dp

    @property
    def ranks(self) -> int:
        return self.dp_replicate * self.dp * self.cp


@dataclass(frozen=True, slots=True)
class UpdateSchedule:
    """One optimiser update."""

    samples: int
    tokens: int  # of the samples, shared ones as often as they occur
    micro_batches: int  # of every data rank


@dataclass(frozen=True, slots=True)
class CpImbalance:
    """Fullest cp rank over the mean one, 1 is ideal; summed over packs, since ranks wait for each other in each."""

    tokens: float
    pairs: float  # of attention
    work: float  # estimated: matrices and attention
    worst_tokens: float  # in the worst pack
    worst_work: float


@dataclass(frozen=True, slots=True)
class Imbalance:
    """Slowest over mean, 1 is ideal."""

    data_ranks: float  # estimated time, summed over updates
    micro_batches: float  # the same where data ranks wait for each other after every micro-batch
    cp: CpImbalance
    zigzag: CpImbalance  # were every sequence cut


@dataclass(frozen=True, slots=True)
class CommBytes:
    """Bytes that attention sends in one layer during an update, summed over all ranks; the mean over updates."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


@dataclass(frozen=True, slots=True)
class Simulation:
    """What `simulate` found."""

    mesh: MeshShape
    strategy: Strategy
    samples: int
    tokens: int  # of the samples, shared ones as often as they occur
    longest: int
    computed_tokens: int  # what samples of a pack share counted once, as on ranks, in memory and in operations below
    updates: tuple[UpdateSchedule, ...]
    tokens_per_rank: tuple[int, float, int]  # fewest, mean, most; over the whole step
    most_tokens_at_once: int  # of one rank in one micro-batch
    imbalance: Imbalance
    comm: dict[Strategy, CommBytes | None]  # None: the strategy cannot serve this model on this mesh
    attention_bytes_per_rank: int  # sent in an update by the mean rank, all layers, under `strategy`
    sharding: ShardingTraffic  # per rank and update
    memory: dict[Sharding, Memory]  # per rank at its fullest moment, for every level of sharding
    largest: MicroBatches  # the largest micro-batch of a rank, and the most micro-batches of an update
    needed_flops: Flops  # of an update on all ranks: forward and backward, nothing twice; the mean over updates
    forward_flops: Flops


def simulate(
    lengths: np.ndarray,
    model_spec: ModelSpec,
    mesh: MeshShape,
    *,
    max_tokens_per_rank: int,
    samples_per_update: int | None = None,
    are_pairs: bool = False,
    strategy: Strategy = "ring",
    sharding: Sharding = "full",
    sizes: ByteSizes | None = None,
    computing: Computing | None = None,
    counted_share: float = 1.0,
    cost: CostModel | None = None,
) -> Simulation:
    """Plans one step over samples of these lengths and measures it.

    Args:
        lengths: int64 [B], tokens per sample.
        max_tokens_per_rank: hard cap on the tokens of a micro-batch on one rank.
        samples_per_update: None: all samples in one update.
        are_pairs: samples 0 and 1 stay in one pack, and so do 2 and 3, and so on.
        sizes: bytes per element; default: bfloat16 over float32 masters and AdamW.
        computing: what is recomputed, and so sent again in backward, and what else memory depends on.
        counted_share: of the tokens, those whose log-probs are asked for.
        cost: what samples are balanced by; None: as the model's dimensions say.

    Raises:
        BatchError: a sample is longer than max_tokens_per_rank x cp.
        ConfigError: the strategy cannot serve this model on this mesh.
    """
    sizes, computing = sizes or ByteSizes(), computing or Computing()
    cost = cost or CostModel.of_model(model_spec, strategy=strategy, bytes_per_element=sizes.compute)
    plan = plan_batch(
        lengths,
        PackLimits(mesh.data_ranks, max_tokens_per_rank * mesh.cp, mesh.cp, cost),
        UpdateCut(samples_per_update),
        together=np.arange(len(lengths)) // 2 if are_pairs else None,
    )
    return simulate_plan(
        plan,
        lengths,
        model_spec,
        mesh,
        strategy=strategy,
        sharding=sharding,
        sizes=sizes,
        computing=computing,
        counted_share=counted_share,
        cost=cost,
    )


def simulate_plan(
    plan: Plan,
    lengths: np.ndarray,
    model_spec: ModelSpec,
    mesh: MeshShape,
    *,
    strategy: Strategy,
    sharding: Sharding,
    sizes: ByteSizes,
    computing: Computing,
    counted_share: float,
    cost: CostModel,
) -> Simulation:
    """Measures the updates of a plan for this mesh, of which there is at least one; arguments as of `simulate`."""
    planned = [plan.samples_of(update) for update in range(len(plan.updates))]
    lengths_of_updates = [lengths[samples] for samples in planned]
    tokens = sum(int(of_update.sum()) for of_update in lengths_of_updates)
    schedule = _schedule(plan, lengths)
    balance = _measured(schedule, mesh.cp, cost)
    comm = _comm_of_strategies(schedule, mesh.cp, strategy, model_spec, sizes, computing)
    chosen = comm[strategy]
    assert chosen is not None
    micro_batches = [len(update[0]) for update in plan.updates]
    num_updates, shard_ranks = len(micro_batches), mesh.dp * mesh.cp
    nodes, depths = _all_nodes(schedule)
    computed_tokens = int(nodes.sum())
    counted_of_computed = min(1.0, counted_share * tokens / computed_tokens)
    counted_rows = round(computed_tokens * counted_of_computed)
    most = balance.most_tokens_at_once
    adapters = computing.adapters_of(model_spec)
    beside = 0 if adapters is None else adapters.parameters
    largest = MicroBatches(most, max(1, round(most * counted_of_computed)), max(micro_batches))
    return Simulation(
        mesh=mesh,
        strategy=strategy,
        samples=sum(map(len, planned)),
        tokens=tokens,
        longest=max(int(of_update.max()) for of_update in lengths_of_updates),
        computed_tokens=computed_tokens,
        updates=tuple(
            UpdateSchedule(len(of_update), int(of_update.sum()), count)
            for of_update, count in zip(lengths_of_updates, micro_batches, strict=True)
        ),
        tokens_per_rank=balance.tokens_per_rank,
        most_tokens_at_once=balance.most_tokens_at_once,
        imbalance=balance.imbalance,
        comm=comm,
        attention_bytes_per_rank=chosen.total * model_spec.layers // mesh.ranks,
        sharding=sharding_traffic(
            model_spec,
            sharding,
            dp_replicate=mesh.dp_replicate,
            shard_ranks=shard_ranks,
            sizes=sizes,
            micro_batches=sum(micro_batches) / num_updates,
            trained_share=computing.trained_share,
            adapters=adapters,
        ),
        memory=_memory_of_levels(model_spec, mesh, largest, sizes, computing),
        largest=largest,
        needed_flops=training_flops(
            model_spec,
            nodes,
            counted_rows=counted_rows,
            depths=depths,
            trained_share=computing.trained_share,
            adapter_parameters=beside,
        ).over(num_updates),
        forward_flops=forward_flops(
            model_spec, nodes, counted_rows=counted_rows, depths=depths, adapter_parameters=beside
        ).over(num_updates),
    )


class _Pack(NamedTuple):
    """What lies in a pack: its samples, or nodes that samples share."""

    offsets: list[int]  # [nodes + 1], first 0
    forest: Forest | None = None  # None: no node goes on from another


_Schedule = list[list[list[_Pack | None]]]  # [update][data rank][micro-batch]; None: a dummy of one token


def _schedule(plan: Plan, lengths: np.ndarray) -> _Schedule:
    def packed(samples: np.ndarray) -> _Pack | None:
        if len(samples) == 0:
            return None
        if plan.shared is None:
            return _Pack([0, *accumulate(lengths[samples].tolist())])
        samples, shared = plan.shared.among(samples)
        forest, _, nodes, _ = forest_of(lengths[samples], shared)
        return _Pack([0, *accumulate(nodes.tolist())], forest)

    return [[[packed(samples) for samples in packs] for packs in update] for update in plan.updates]


def _packs_of(schedule: _Schedule) -> list[_Pack]:
    return [pack for update in schedule for packs in update for pack in packs if pack is not None]


def _all_nodes(schedule: _Schedule) -> tuple[np.ndarray, np.ndarray]:
    """Of every node of all packs its tokens and those above it, int64."""
    packs = _packs_of(schedule)
    tokens = np.concatenate([np.diff(pack.offsets) for pack in packs])
    depths = [np.zeros(len(p.offsets) - 1, np.int64) if p.forest is None else np.array(p.forest.depths) for p in packs]
    return tokens, np.concatenate(depths)


@dataclass(frozen=True, slots=True)
class _Balance:
    tokens_per_rank: tuple[int, float, int]
    most_tokens_at_once: int
    imbalance: Imbalance


def _measured(schedule: _Schedule, cp: int, cost: CostModel) -> _Balance:
    """Lays out every pack and adds up what its ranks hold and do."""
    slowest_rank = mean_rank = slowest_steps = 0.0
    per_rank = np.zeros((len(schedule[0]), cp), dtype=np.int64)
    hybrid, zigzag = _CpSums(cost), _CpSums(cost)
    for update in schedule:
        times = np.zeros((len(update), len(update[0])))
        for data_rank, micro_batches in enumerate(update):
            for step, pack in enumerate(micro_batches):
                if pack is None:
                    continue
                layout = hybrid_layout(pack.offsets, cp, cost, pack.forest)
                times[data_rank, step] = layout_time(layout, pack.offsets, cost, pack.forest)
                per_rank[data_rank] += hybrid.add(layout, pack)
                zigzag.add(zigzag_layout(pack.offsets, cp), pack)
        slowest_rank += times.sum(axis=1).max()
        mean_rank += times.sum(axis=1).mean()
        slowest_steps += times.max(axis=0).sum()
    return _Balance(
        tokens_per_rank=(int(per_rank.min()), float(per_rank.mean()), int(per_rank.max())),
        most_tokens_at_once=hybrid.most_tokens,
        imbalance=Imbalance(
            data_ranks=float(slowest_rank / mean_rank),
            micro_batches=float(slowest_steps / mean_rank),
            cp=hybrid.imbalance(),
            zigzag=zigzag.imbalance(),
        ),
    )


class _CpSums:
    """Most and mean over the cp ranks of every pack: tokens, pairs and work."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._most: list[np.ndarray] = []  # [3] of every pack
        self._mean: list[np.ndarray] = []

    def add(self, layout: Layout, pack: _Pack) -> np.ndarray:
        """Adds a pack; returns its tokens on every rank."""
        tokens = np.array(tokens_of(layout))
        pairs, work = (work_of(layout, pack.offsets, model, pack.forest) for model in (_PAIRS, self._cost.of_owner()))
        if self._cost.splits_heads:  # by tokens they may be uneven, by heads they are not
            pairs = np.full(len(layout), pairs.mean())
        self._most.append(np.array([values.max() for values in (tokens, pairs, work)]))
        self._mean.append(np.array([values.mean() for values in (tokens, pairs, work)]))
        return tokens

    @property
    def most_tokens(self) -> int:
        return int(max(most[0] for most in self._most))

    def imbalance(self) -> CpImbalance:
        most, mean = np.array(self._most), np.array(self._mean)  # [packs, 3]
        tokens, pairs, work = (most.sum(axis=0) / mean.sum(axis=0)).tolist()
        worst_tokens, _, worst_work = (most / mean).max(axis=0).tolist()
        return CpImbalance(tokens, pairs, work, worst_tokens, worst_work)


def _memory_of_levels(
    model_spec: ModelSpec, mesh: MeshShape, largest: MicroBatches, sizes: ByteSizes, computing: Computing
) -> dict[Sharding, Memory]:
    return {
        level: step_memory(
            model_spec,
            level,
            largest,
            shard_ranks=mesh.dp * mesh.cp,
            copies=mesh.dp_replicate,
            sizes=sizes,
            computing=computing,
        )
        for level in SHARDINGS
    }


def _comm_of_strategies(
    schedule: _Schedule,
    cp: int,
    chosen: Strategy,
    model_spec: ModelSpec,
    sizes: ByteSizes,
    computing: Computing,
) -> dict[Strategy, CommBytes | None]:
    """Of all strategies, None where heads do not divide; asked for all the same, the chosen one is refused there."""
    again = computing.recomputed_share(model_spec.layers)
    comm: dict[Strategy, CommBytes | None] = {}
    for name in STRATEGIES:
        if name != "ulysses" or model_spec.heads % cp == 0 or chosen == "ulysses":
            comm[name] = _comm_bytes(schedule, cp, name, model_spec, sizes, again)
        else:
            comm[name] = None
    return comm


def _comm_bytes(
    schedule: _Schedule,
    cp: int,
    strategy: Strategy,
    model_spec: ModelSpec,
    sizes: ByteSizes,
    recomputed_layers: float,
) -> CommBytes:
    """Over all packs, each laid out as this strategy would have it; the mean over updates."""
    cost = CostModel.of_model(model_spec, strategy=strategy, bytes_per_element=sizes.compute)
    forward = backward = 0
    for pack in _packs_of(schedule):
        sent = attention_comm_bytes(
            hybrid_layout(pack.offsets, cp, cost, pack.forest),
            strategy,
            heads=model_spec.heads,
            kv_heads=model_spec.kv_heads,
            head_dim=model_spec.head_dim,
            bytes_per_element=sizes.compute,
            grad_bytes_per_element=sizes.wide,
            parents=None if pack.forest is None else pack.forest.parents,
        )
        forward += sent[0]
        backward += sent[1]
    num_updates = len(schedule)
    return CommBytes(round(forward * (1 + recomputed_layers) / num_updates), round(backward / num_updates))


def attention_comm_bytes(
    layout: Layout,
    strategy: Strategy,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    bytes_per_element: int,
    grad_bytes_per_element: int,
    parents: Sequence[int | None] | None = None,
) -> tuple[int, int]:
    """(forward, backward) bytes sent for one pack in one layer, summed over the cp ranks.

    Rows that travel are those of `sent_rows`. ring: K and V of each are passed on cp - 1 times, in backward again, and
    their gradients as often. all_gather: K and V of each go to cp - 1 ranks and are kept, gradients come back from as
    many. ulysses: every token's q, k, v and output go to the ranks that hold their heads, of which 1 / cp stays where
    it is; in backward so do their gradients.

    Args:
        bytes_per_element: of q, k, v and the output.
        grad_bytes_per_element: of the accumulators of dK and dV (ring, all_gather); Ulysses sends gradients in the
            compute dtype.
        parents: of every node of the pack, where samples share what they begin with.

    Raises:
        ConfigError: Ulysses, and heads that cp does not divide.
    """
    cp = len(layout)
    if cp == 1:
        return 0, 0
    if strategy == "ulysses":
        if heads % cp:
            raise ConfigError(
                f"Ulysses cannot divide {heads} attention heads over mesh.cp={cp} ranks",
                field="attention.strategy",
                hint="use ring or all_gather, or a mesh.cp that divides the heads",
            )
        sent_heads = 2 * heads + 2 * repeated_kv_heads(heads, kv_heads, cp)  # q and output, k and v
        forward = sum(tokens_of(layout)) * (sent_heads // cp) * head_dim * (cp - 1) * bytes_per_element
        return forward, forward
    elements = (cp - 1) * sum(sent_rows(layout, parents)) * 2 * kv_heads * head_dim
    again = bytes_per_element if strategy == "ring" else 0
    return elements * bytes_per_element, elements * (again + grad_bytes_per_element)
