"""Reads samples for `slimefsdp plan`, and computes the load of their plan on a mesh: tokens, balance, bytes and FLOPs.

Plans and layouts are computed as in training, so counts are exact. Times are estimates of the planner's cost model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from slimefsdp.attention.select import AttentionShape, serving_strategies
from slimefsdp.batching.cost import STRATEGIES, CostModel, Strategy
from slimefsdp.batching.cp_sharding import Layout, hybrid_layout, layout_time, tokens_of, work_of, zigzag_layout
from slimefsdp.batching.plan import Plan
from slimefsdp.batching.prefix_tree import Forest, forest_of
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError, ConfigError
from slimefsdp.estimate.flops import Flops, forward_flops, training_flops
from slimefsdp.estimate.memory import MicroBatches
from slimefsdp.estimate.setup import TrainingSetup
from slimefsdp.estimate.traffic import attention_comm_bytes
from slimefsdp.io.user_files import NoPath, parse_json, path_of, read_plain

MAX_LENGTH = 2**40  # the sum of a million such lengths fits int64
_DISTRIBUTION = re.compile(r"\s*(fixed|uniform|lognormal)\s*\(([^()]*)\)\s*")
_MAX_BYTES = 100_000_000  # about ten million lengths
_HINT = (
    "write fixed(512), uniform(16, 4096) or lognormal(1000, 0.8, 16, 8192) (mean in tokens, sigma of the logarithm, "
    "shortest, longest), or name a file: of RolloutBatch.save, or a JSON list of lengths"
)
_PAIRS = CostModel(linear=0.0, quadratic=0.5, comm=0.0)  # counts only the (query, key) pairs of attention, n^2 / 2


@dataclass(frozen=True, slots=True)
class UpdateSchedule:
    samples: int
    tokens: int  # of all samples; a shared prefix counts in each of them
    micro_batches: int  # of each data rank


@dataclass(frozen=True, slots=True)
class CpImbalance:
    """Holds ratios of the busiest cp rank's load to the mean load.

    The ideal is 1. Both loads are summed over packs, because ranks wait for each other in every pack.
    """

    tokens: float
    pairs: float  # pairs of attention
    work: float  # estimated time of matrix products and attention
    worst_tokens: float  # the ratio of the worst pack
    worst_work: float


@dataclass(frozen=True, slots=True)
class Imbalance:
    data_ranks: float  # ratio of estimated times, summed over updates
    micro_batches: float  # the same, for data ranks that wait for each other after every micro-batch
    cp: CpImbalance
    zigzag: CpImbalance  # for a layout that cuts every sequence


@dataclass(frozen=True, slots=True)
class CommBytes:
    """Holds the bytes that all ranks together send for attention in one layer in an update, as a mean over updates."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


@dataclass(frozen=True, slots=True)
class Schedule:
    """Holds the load of a plan on the ranks of a mesh."""

    strategy: Strategy
    samples: int
    tokens: int  # of all samples; a shared prefix counts in each of them
    longest: int
    computed_tokens: int  # here and below, a shared prefix counts once per pack
    updates: tuple[UpdateSchedule, ...]
    tokens_per_rank: tuple[int, float, int]  # (fewest, mean, most) over the whole step
    largest: MicroBatches  # the largest micro-batch of a rank, and the largest number of micro-batches of an update
    imbalance: Imbalance
    comm: dict[Strategy, tuple[float, float] | None]  # CommBytes without recomputation; None if heads do not divide
    needed_flops: Flops  # forward and backward of the mean update without recomputation, over all ranks
    forward_flops: Flops

    @property
    def micro_batches_per_update(self) -> float:
        return sum(update.micro_batches for update in self.updates) / len(self.updates)

    def comm_bytes(self, strategy: Strategy, setup: TrainingSetup) -> CommBytes | None:
        """Returns the bytes that a strategy sends, including recomputation, or None if the strategy is not possible."""
        if (once := self.comm[strategy]) is None:
            return None
        return CommBytes(round(once[0] * (1 + setup.recomputed_share)), round(once[1]))

    def attention_bytes_per_rank(self, setup: TrainingSetup) -> int:
        """Returns the mean over ranks of the bytes sent for attention in an update, in all layers."""
        sent = self.comm_bytes(self.strategy, setup)
        assert sent is not None
        return sent.total * setup.model.layers // setup.mesh.ranks


def measure_schedule(
    plan: Plan,
    lengths: np.ndarray,
    setup: TrainingSetup,
    *,
    strategy: Strategy,
    cost: CostModel,
    counted_share: float = 1.0,
) -> Schedule:
    """Returns the load of a plan, of at least one update, on the ranks of the setup's mesh.

    Args:
        lengths: int64 [B], tokens of each sample.
        strategy: how cp ranks exchange keys and values.
        cost: the cost model with which the plan was balanced.
        counted_share: share of the tokens whose log-probs are computed.

    Raises:
        ConfigError: the strategy cannot divide the model's heads over cp ranks.
    """
    model, num_updates = setup.model, len(plan.updates)
    lengths_of_updates = [lengths[plan.samples_of(update)] for update in range(num_updates)]
    tokens = sum(int(of_update.sum()) for of_update in lengths_of_updates)
    micro_batches = [len(update[0]) for update in plan.updates]
    packs = list(_packs_of(plan, lengths))
    imbalance, tokens_per_rank, most_tokens = _balance(plan, packs, setup.mesh.cp, cost)
    nodes = np.concatenate([np.diff(pack.offsets) for pack in packs])
    depths = np.concatenate([pack.depths for pack in packs])
    computed_tokens = int(nodes.sum())
    counted_share = min(1.0, counted_share * tokens / computed_tokens)
    counted_rows = round(computed_tokens * counted_share)
    adapters = setup.adapter_parameters
    needed = training_flops(
        model, nodes, counted_rows=counted_rows, depths=depths,
        trained_share=setup.trained_share, adapter_parameters=adapters,
    )  # fmt: skip
    forward = forward_flops(model, nodes, counted_rows=counted_rows, depths=depths, adapter_parameters=adapters)
    return Schedule(
        strategy=strategy,
        samples=sum(map(len, lengths_of_updates)),
        tokens=tokens,
        longest=max(int(of_update.max()) for of_update in lengths_of_updates),
        computed_tokens=computed_tokens,
        updates=tuple(
            UpdateSchedule(len(of_update), int(of_update.sum()), count)
            for of_update, count in zip(lengths_of_updates, micro_batches, strict=True)
        ),
        tokens_per_rank=tokens_per_rank,
        largest=MicroBatches(most_tokens, max(1, round(most_tokens * counted_share)), max(micro_batches)),
        imbalance=imbalance,
        comm={
            name: _comm_bytes(packs, setup, name, num_updates)
            # the strategy in use is always computed, so that it raises its error
            if name != "ulysses" or model.heads % setup.mesh.cp == 0 or strategy == name
            else None
            for name in STRATEGIES
        },
        needed_flops=needed.over(num_updates),
        forward_flops=forward.over(num_updates),
    )


def lightest_strategy(schedule: Schedule, setup: TrainingSetup) -> Strategy:
    """Returns the strategy that sends least for these samples, among the strategies that support the model."""
    sent = {
        name: comm.total
        for name in serving_strategies(AttentionShape.of_model_spec(setup.model), setup.mesh.cp)
        if (comm := schedule.comm_bytes(name, setup)) is not None
    }
    # of equal strategies, the strategy in use is preferred
    return min(sent, key=lambda name: (sent[name], name != schedule.strategy))


class _Pack(NamedTuple):
    """Holds the samples of one micro-batch of one data rank, or their nodes if samples share prefixes."""

    update: int
    data_rank: int
    step: int
    offsets: list[int]  # [nodes + 1], first 0
    forest: Forest | None  # None: no prefix is shared

    @property
    def depths(self) -> np.ndarray:
        """Returns the number of tokens that precede each node in its samples, int64 [nodes]."""
        return np.zeros(len(self.offsets) - 1, np.int64) if self.forest is None else np.array(self.forest.depths)


def _packs_of(plan: Plan, lengths: np.ndarray) -> Iterator[_Pack]:
    """Yields the packs that have samples; empty packs are left out."""
    for index, update in enumerate(plan.updates):
        for data_rank, of_rank in enumerate(update):
            for step, samples in enumerate(of_rank):
                if not len(samples):
                    continue
                nodes, forest = lengths[samples], None
                if plan.shared is not None:
                    ordered, shared = plan.shared.among(samples)
                    forest, _, nodes, _ = forest_of(lengths[ordered], shared)
                yield _Pack(index, data_rank, step, [0, *accumulate(nodes.tolist())], forest)


def _balance(plan: Plan, packs: list[_Pack], cp: int, cost: CostModel) -> tuple[Imbalance, tuple[int, float, int], int]:
    """Lays out every pack over the cp ranks, and compares their loads.

    Returns:
        The imbalance; (fewest, mean, most) tokens of a rank in the step; and the most tokens of a rank in a pack.
    """
    times = [np.zeros((len(update), len(update[0]))) for update in plan.updates]  # [data ranks, micro-batches] each
    per_rank = np.zeros((len(plan.updates[0]), cp), dtype=np.int64)
    hybrid, zigzag = np.empty((2, len(packs), 3, cp))
    for index, pack in enumerate(packs):
        layout = hybrid_layout(pack.offsets, cp, cost, pack.forest)
        times[pack.update][pack.data_rank, pack.step] = layout_time(layout, pack.offsets, cost, pack.forest)
        per_rank[pack.data_rank] += tokens_of(layout)
        hybrid[index] = _loads(layout, pack, cost)
        zigzag[index] = _loads(zigzag_layout(pack.offsets, cp), pack, cost)
    mean = sum(of_update.sum(axis=1).mean() for of_update in times)
    imbalance = Imbalance(
        data_ranks=float(sum(of_update.sum(axis=1).max() for of_update in times) / mean),
        micro_batches=float(sum(of_update.max(axis=0).sum() for of_update in times) / mean),
        cp=_cp_imbalance(hybrid),
        zigzag=_cp_imbalance(zigzag),
    )
    return imbalance, (int(per_rank.min()), float(per_rank.mean()), int(per_rank.max())), int(hybrid[:, 0].max())


def _loads(layout: Layout, pack: _Pack, cost: CostModel) -> np.ndarray:
    """Returns tokens, pairs and work of every cp rank, [3, cp]."""
    pairs, work = (work_of(layout, pack.offsets, model, pack.forest) for model in (_PAIRS, cost.of_owner()))
    if cost.splits_heads:  # every rank has the same number of heads, and thus of pairs
        pairs = np.full(len(layout), pairs.mean())
    return np.array([tokens_of(layout), pairs, work])


def _cp_imbalance(loads: np.ndarray) -> CpImbalance:
    largest, mean = loads.max(axis=2), loads.mean(axis=2)
    tokens, pairs, work = (largest.sum(axis=0) / mean.sum(axis=0)).tolist()
    worst_tokens, _, worst_work = (largest / mean).max(axis=0).tolist()
    return CpImbalance(tokens, pairs, work, worst_tokens, worst_work)


def _comm_bytes(packs: list[_Pack], setup: TrainingSetup, strategy: Strategy, num_updates: int) -> tuple[float, float]:
    """Returns the (forward, backward) bytes sent in one layer in the mean update, with this strategy's layouts."""
    cost = CostModel.of_model(setup.model, strategy=strategy, bytes_per_element=setup.sizes.compute)
    sent = np.zeros(2)
    for pack in packs:
        layout = hybrid_layout(pack.offsets, setup.mesh.cp, cost, pack.forest)
        parents = None if pack.forest is None else pack.forest.parents
        sent += attention_comm_bytes(layout, strategy, setup.model, setup.sizes, parents)
    forward, backward = (sent / num_updates).tolist()
    return forward, backward


def read_samples(text: str, num_samples: int, *, seed: int = 0) -> np.ndarray | RolloutBatch:
    """Returns the samples that `--lengths` names: a saved batch, the lengths in a file, or drawn lengths.

    Raises:
        ConfigError: the text is neither a distribution of `draw_lengths` nor a file.
        BatchError: the file is not a RolloutBatch or a JSON list of lengths.
    """
    if _DISTRIBUTION.fullmatch(text):
        return draw_lengths(text, num_samples, seed=seed)
    try:
        path = path_of(text)
        is_file = path.is_file()
    except NoPath as error:
        raise ConfigError(f"--lengths={text!r} {error.rule}", field="--lengths", hint=error.hint) from None
    except OSError:  # the name is too long
        is_file = False
    if not is_file:
        raise ConfigError(f"--lengths={text!r} is neither a distribution nor a file", field="--lengths", hint=_HINT)
    if path.suffix != ".json":
        return RolloutBatch.load(path)
    try:
        values = parse_json(read_plain(path, _MAX_BYTES))
    except (OSError, ValueError) as error:
        raise BatchError(f"{path} cannot be read as JSON: {error}", field="--lengths", hint=_HINT) from None
    are_lengths = isinstance(values, list) and values and all(type(n) is int and 1 <= n < MAX_LENGTH for n in values)
    if not are_lengths:
        raise BatchError(f"{path} is not a list of lengths in tokens", field="--lengths", hint=_HINT)
    return np.array(values, dtype=np.int64)


def draw_lengths(text: str, num_samples: int, *, seed: int = 0) -> np.ndarray:
    """Returns lengths in tokens, int64 [num_samples], drawn from a distribution such as `uniform(16, 4096)`.

    In lognormal(mean, sigma, min, max), `mean` is the mean before values are clipped to [min, max].

    Raises:
        ConfigError: the text is not a distribution of positive lengths.
    """
    named, rng = _DISTRIBUTION.fullmatch(text), np.random.default_rng(seed)
    try:
        kind, numbers = (named[1], [float(part) for part in named[2].split(",")]) if named else ("", [])
    except ValueError:
        kind, numbers = "", []
    match kind, numbers:
        case "fixed", [length] if _are_bounds(length, length) and length.is_integer():
            return np.full(num_samples, int(length), dtype=np.int64)
        case "uniform", [low, high] if _are_bounds(low, high) and low.is_integer() and high.is_integer():
            return rng.integers(int(low), int(high), num_samples, endpoint=True)
        case "lognormal", [mean, sigma, *bounds] if 1 <= mean <= MAX_LENGTH and 0 <= sigma <= 10 and len(bounds) <= 2:
            low, high = [*bounds, *(1.0, float(MAX_LENGTH))[len(bounds) :]]
            if _are_bounds(low, high):
                drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, num_samples)
                return np.rint(np.clip(drawn, low, high)).astype(np.int64)
    raise ConfigError(f"--lengths={text!r} is not a distribution of lengths", field="--lengths", hint=_HINT)


def _are_bounds(low: float, high: float) -> bool:
    return 1 <= low <= high <= MAX_LENGTH
