"""Plans which samples each dp rank trains on, micro-batch by micro-batch, in every update of a step.

A plan depends only on lengths and shared prefixes, and is equal on every machine that computes it, so ranks need not
communicate. In an update all ranks have the same number of micro-batches, and no pack exceeds the cap. This module
cuts the batch into updates, and decides by the estimated time whether packs compute shared prefixes once: this saves
work, but prefix groups are harder to balance than single samples. `slimefsdp.batching.balance` assigns items to packs.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from slimefsdp.batching.balance import balanced_packs
from slimefsdp.batching.cost import DEFAULT_COST_MODEL, CostModel
from slimefsdp.batching.groups import Groups, PrefixGroups, SampleCosts, groups, singles
from slimefsdp.batching.prefix_tree import SharedPrefixes
from slimefsdp.errors import BatchError

MIN_GAIN = 0.05  # if sharing saves a smaller part of the estimated time, its additional attention calls cost more

Update = tuple[tuple[np.ndarray, ...], ...]  # [dp_rank][micro_batch] -> ascending sample indices


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """Holds the packs of a step: updates[u][dp_rank][micro_batch] -> ascending int64 sample indices.

    Within an update every dp rank has equally many micro-batches, its costliest first. A rank with fewer samples than
    micro-batches has dummies at the end: packs without samples, of weight zero.
    """

    updates: tuple[Update, ...]
    num_dropped: int  # samples of the batch left out because none of their tokens trains, counted once for all epochs
    num_skipped_updates: int  # updates in which no sample trains, over all epochs; they are not in `updates`
    num_first_epoch_updates: int  # number of updates of the first epoch
    max_pack_tokens: int
    shared: SharedPrefixes | None = None  # prefixes that packs compute once; None means that every sample is whole
    # [u] -> ascending int64 indices of the samples in the denominators of an update, including samples that are not
    # computed; None means exactly the computed samples
    counted: tuple[np.ndarray, ...] | None = None

    def digest(self) -> str:
        """Returns the sha256 of the plan's content as hex."""
        counts = (self.num_dropped, self.num_skipped_updates, self.num_first_epoch_updates, self.max_pack_tokens)
        # every list is preceded by its length, so that different plans give different numbers
        parts = [np.array([*counts, len(self.updates)])]
        for update in self.updates:
            packs = [pack for micro_batches in update for pack in micro_batches]
            parts += [np.array([len(update), *map(len, update)]), np.array([len(pack) for pack in packs]), *packs]
        if self.shared is not None:
            parts += [self.shared.place, self.shared.shared]
        if self.counted is not None:  # -1 marks this part: nothing else is negative
            parts += [np.array([-1, *map(len, self.counted)]), *self.counted]
        return hashlib.sha256(np.concatenate(parts).astype("<i8").tobytes()).hexdigest()

    def samples_of(self, update: int) -> np.ndarray:
        """Returns all sample indices of one update, ascending; int64 [samples]."""
        return np.sort(np.concatenate([pack for packs in self.updates[update] for pack in packs]))

    def counted_of(self, update: int) -> np.ndarray:
        """Returns the samples in the denominator of one update's loss, ascending; int64, a superset of `samples_of`."""
        return self.samples_of(update) if self.counted is None else self.counted[update]

    def imbalance(self, lengths: np.ndarray, cost_model: CostModel = DEFAULT_COST_MODEL, cp: int = 1) -> float:
        """Returns the cost of the busiest dp rank / the mean cost; 1 is ideal.

        Both costs are summed over updates, because ranks wait for each other after each update.

        Args:
            lengths: int64 [B], tokens per sample of the batch that was planned.
            cp: context-parallel ranks that the batch was planned for.
        """
        costs = SampleCosts(lengths, cost_model, cp, self.max_pack_tokens, self.shared)
        if not self.updates:
            return 1.0
        by_rank = np.array([_loads(*self.packs_of(update), costs) for update in range(len(self.updates))])
        return float(by_rank.max(axis=1).sum() / by_rank.mean(axis=1).sum())  # [updates, dp]

    def computed_tokens(self, lengths: np.ndarray) -> int:
        """Returns the number of tokens in all packs, for a batch of these lengths, [B]; shared tokens count once."""
        whole = SampleCosts(lengths, DEFAULT_COST_MODEL, 1, self.max_pack_tokens, self.shared)
        packs = (self.packs_of(update) for update in range(len(self.updates)))
        return sum(int(whole.tokens_each(samples, sizes.ravel()).sum()) for samples, sizes in packs)

    def packs_of(self, update: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the samples of one update, pack by pack and rank by rank, int64; and the pack sizes, [dp, packs]."""
        packs = [pack for of_rank in self.updates[update] for pack in of_rank]
        sizes = np.array([len(pack) for pack in packs], dtype=np.int64)
        return np.concatenate([*packs, np.zeros(0, dtype=np.int64)]), sizes.reshape(len(self.updates[update]), -1)


@dataclass(frozen=True, slots=True)
class PackLimits:
    dp: int  # data-parallel ranks; each rank gets different packs
    max_pack_tokens: int  # hard cap on the tokens of a pack: batch.max_tokens_per_rank x mesh.cp
    cp: int = 1  # context-parallel ranks that share each pack; a sample's cost is its time on all of them
    cost_model: CostModel = DEFAULT_COST_MODEL  # estimates the work that packs and ranks are balanced by


@dataclass(frozen=True, eq=False, slots=True)
class UpdateCut:
    """Describes how a batch of B samples is cut into the updates of a step."""

    # counted before samples are dropped; the last update of an epoch takes the rest. None puts all in one update
    samples_per_update: int | None = None
    epochs: int = 1  # how often every sample is used
    seed: int | None = None  # each epoch is shuffled by a generator seeded with (seed, epoch); None keeps the order
    # bool [B], False for samples in which no token trains (zero advantage, all masked). They are dropped after updates
    # are cut, so that the samples of an update do not depend on which others are dropped; an update in which no sample
    # trains is skipped. None means that all samples train
    trains: np.ndarray | None = None
    counts: np.ndarray | None = None  # bool [B], the samples in the denominators of their update; None: `trains`
    drop: bool = True  # leave samples that count but do not train out of the packs


@dataclass(frozen=True, eq=False, slots=True)
class PrefixSharing:
    """Holds the prefixes that samples may share in a pack, and the least gain for which they are shared."""

    shared: SharedPrefixes
    # int64 [B], predictions of each sample, if predictions of shared tokens are not shared: a pack has at most as many
    # predictions as it may have tokens, unless samples must stay together. None if they are shared like tokens
    pairs: np.ndarray | None = None
    min_gain: float = MIN_GAIN  # share only if this part of the estimated time is saved; minus infinity always shares


def plan_batch(
    lengths: np.ndarray,
    limits: PackLimits,
    cut: UpdateCut | None = None,
    *,
    together: np.ndarray | None = None,
    sharing: PrefixSharing | None = None,
) -> Plan:
    """Plans a whole training step over one batch of B samples.

    Args:
        lengths: int64 [B], tokens per sample.
        cut: how to cut the batch into updates; None means one update of all samples.
        together: int64 [B], samples with equal numbers stay in one pack, for losses that compare them. An update then
            has as many of these groups as fit in `samples_per_update`, at least one. None keeps no samples together.
        sharing: prefixes that packs may share; None means that every sample is computed whole.

    Raises:
        BatchError: a sample that trains, or a group that stays together, is longer than the cap.
    """
    cut = cut or UpdateCut()
    assert lengths.ndim == 1 and len(lengths) > 0 and cut.epochs >= 1, (lengths.shape, cut.epochs)
    trains = np.ones(len(lengths), dtype=bool) if cut.trains is None else cut.trains
    counts = trains if cut.counts is None else trains | cut.counts
    for flags in (trains, counts):
        assert flags.dtype == bool and flags.shape == lengths.shape, (flags.dtype, flags.shape)
    computed = trains if cut.drop else counts
    updates = _cut_updates(replace(cut, trains=trains, counts=counts), computed, together)
    first_epoch = updates.contents[: updates.num_first_epoch]
    planned_samples = np.sort(np.concatenate(first_epoch)) if first_epoch else np.zeros(0, dtype=np.int64)
    all_computed = sum(map(len, updates.counted)) == sum(map(len, updates.contents))
    counted = None if all_computed else tuple(updates.counted)
    cap, pairs = limits.max_pack_tokens, None if sharing is None else sharing.pairs

    def planned(shared: SharedPrefixes | None) -> tuple[Plan, float]:
        costs = SampleCosts(lengths, limits.cost_model, limits.cp, cap, shared, pairs)
        _refuse_over_the_cap(costs, planned_samples, together)  # checks all updates before the first is planned
        packs = tuple(plan_update(costs, samples, dp=limits.dp, together=together) for samples in updates.contents)
        num_dropped = len(lengths) - len(planned_samples)
        plan = Plan(packs, num_dropped, updates.num_skipped, updates.num_first_epoch, cap, shared, counted)
        return plan, sum(_time_of(*plan.packs_of(update), costs) for update in range(len(packs)))

    if sharing is None or not updates.contents:
        return planned(None)[0]
    with_sharing, time = planned(sharing.shared)
    whole = SampleCosts(lengths, limits.cost_model, limits.cp, cap)
    # a lower bound on the time without sharing: all work spread evenly
    least = sum(float(whole.each[samples].sum()) for samples in updates.contents) / limits.dp
    if time <= (1 - sharing.min_gain) * least * (1 - 1e-9):
        return with_sharing
    try:
        without, time_without = planned(None)
    except BatchError:  # without sharing, a group does not fit
        return with_sharing
    return with_sharing if time <= (1 - sharing.min_gain) * time_without else without


def plan_update(costs: SampleCosts, samples: np.ndarray, *, dp: int, together: np.ndarray | None = None) -> Update:
    """Plans one update as [dp_rank][micro_batch] -> ascending sample indices, each rank's costliest micro-batch first.

    The result does not depend on the order of `samples`.

    Args:
        costs: the costs of the batch's samples.
        samples: int64 [n], distinct indices of the samples to plan; at least one.
        together: int64 [B], samples with equal numbers stay in one pack; None means that no samples stay together.

    Raises:
        BatchError: a sample, or a group, is longer than the cap.
    """
    assert dp >= 1 and len(samples) > 0, (dp, len(samples))
    assert costs.lengths[samples].min() >= 1, "an empty sample"
    _refuse_over_the_cap(costs, samples, together)
    samples = np.sort(samples)
    if together is not None:
        return _placed(groups(costs, samples, together), costs, dp).update()
    if costs.shared is None:
        return _placed(singles(costs, samples), costs, dp).update()
    # larger prefix groups save more work but are harder to balance, so several sizes are tried
    prefix_groups = PrefixGroups(costs, samples)
    best, least_time = None, float("inf")
    longest, limit = int(costs.lengths[samples].max()), costs.max_pack_tokens
    while best is None or limit >= longest:
        items = prefix_groups.within(limit)
        placed = _placed(items, costs, dp)
        time = _time_of(*placed, costs)
        if time < least_time:
            best, least_time = placed, time
        # halve the distance between the largest group and the longest sample: smaller groups would hardly share
        largest = int(items.tokens.max())
        limit = (largest + longest) // 2 if largest > longest + 1 else longest - 1
    return best.update()


class _Updates(NamedTuple):
    """Holds the updates of a step in which at least one sample trains."""

    contents: list[np.ndarray]  # the samples to compute in each update
    counted: list[np.ndarray]  # the samples in the denominators of each update, ascending
    num_skipped: int  # updates in which no sample trains
    num_first_epoch: int  # updates of the first epoch


def _cut_updates(cut: UpdateCut, computed: np.ndarray, together: np.ndarray | None) -> _Updates:
    """Cuts all samples into updates, and then leaves out the samples that are not `computed`, bool [B].

    Args:
        cut: `trains` and `counts` must be set.
    """
    trains, counts, epochs, seed = cut.trains, cut.counts, cut.epochs, cut.seed
    assert trains is not None and counts is not None
    samples_per_update = cut.samples_per_update
    # a unit is never cut: a sample, or a group of samples that stay together
    unit_of = np.arange(len(trains)) if together is None else np.unique(together, return_inverse=True)[1]
    sizes = np.bincount(unit_of)
    members = np.split(np.argsort(unit_of, kind="stable"), np.cumsum(sizes)[:-1]) if together is not None else None
    trains_unit = np.bincount(unit_of, trains) > 0
    computed_unit = np.bincount(unit_of, computed) > 0
    num_units = len(sizes)
    stride = num_units if samples_per_update is None else max(1, samples_per_update // int(sizes.max()))

    def samples_of(units: np.ndarray) -> np.ndarray:
        return units if members is None else np.concatenate([members[unit] for unit in units])

    contents: list[np.ndarray] = []
    counted: list[np.ndarray] = []
    num_skipped = num_first_epoch = 0
    for epoch in range(epochs):
        order = np.arange(num_units) if seed is None else _shuffled(num_units, seed, epoch)
        for start in range(0, num_units, stride):
            units = order[start : start + stride]
            if not trains_unit[units].any():
                num_skipped += 1
                continue
            samples = samples_of(units)
            contents.append(samples_of(units[computed_unit[units]]))
            counted.append(np.sort(samples[counts[samples] | computed_unit[unit_of[samples]]]))
        if epoch == 0:
            num_first_epoch = len(contents)
            # old log-probs are computed over the first epoch's updates only, so samples of its skipped updates have
            # none and cannot train in a later epoch either
            first = np.concatenate(contents) if contents else np.zeros(0, dtype=np.int64)
            computed_unit &= np.bincount(unit_of[first], minlength=num_units) > 0
    return _Updates(contents, counted, num_skipped, num_first_epoch)


class _Placed(NamedTuple):
    samples: np.ndarray  # int64 [samples], ascending in every pack
    sizes: np.ndarray  # int64 [dp, micro_batches], samples of each pack

    def update(self) -> Update:
        ends = np.cumsum(self.sizes)
        starts = (ends - self.sizes.ravel()).reshape(self.sizes.shape).tolist()
        ends = ends.reshape(self.sizes.shape).tolist()
        return tuple(
            tuple(self.samples[start:end] for start, end in zip(*of_rank, strict=True))
            for of_rank in zip(starts, ends, strict=True)
        )


def _placed(items: Groups, costs: SampleCosts, dp: int) -> _Placed:
    placed, items_of_pack = balanced_packs(items.tokens, items.costs, dp=dp, cap=costs.max_pack_tokens)
    pack_of_item = np.repeat(np.arange(items_of_pack.size), items_of_pack.ravel())
    pack_of_given = np.empty_like(pack_of_item)  # in the order of `items`
    pack_of_given[placed] = pack_of_item
    num_samples = len(costs.lengths)
    by_pack = np.sort(np.repeat(pack_of_given, items.sizes) * num_samples + items.samples)
    pack_of, samples = np.divmod(by_pack, num_samples)
    return _Placed(samples, np.bincount(pack_of, minlength=items_of_pack.size).reshape(items_of_pack.shape))


def _time_of(samples: np.ndarray, sizes: np.ndarray, costs: SampleCosts) -> float:
    """Returns the estimated work of the busiest rank; arguments as the fields of `_Placed`."""
    ends = np.cumsum(sizes.sum(axis=1))
    ranks = costs.roughly(samples, sizes.ravel()).reshape(sizes.shape).sum(axis=1)
    busiest = np.flatnonzero(ranks >= ranks.max() * (1 - 1e-6))  # rounding moves a sum by far less
    of_busiest = np.concatenate([samples[ends[rank] - sizes[rank].sum() : ends[rank]] for rank in busiest.tolist()])
    return float(_loads(of_busiest, sizes[busiest], costs).max())


def _loads(samples: np.ndarray, sizes: np.ndarray, costs: SampleCosts) -> np.ndarray:
    """Returns the work of every rank, float64 [dp]; arguments as the fields of `_Placed`."""
    works = costs.works(samples, sizes.ravel()).reshape(sizes.shape)
    # summed one after another like Python's sum: np.sum would round depending on its block sizes
    return np.cumsum(works, axis=1)[:, -1] if sizes.shape[1] else np.zeros(len(sizes))


def _shuffled(num_units: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch]))).permutation(num_units)


def _refuse_over_the_cap(costs: SampleCosts, samples: np.ndarray, together: np.ndarray | None) -> None:
    if len(samples) == 0:
        return
    items = singles(costs, samples) if together is None else groups(costs, samples, together)
    longest = int(np.argmax(items.tokens))  # the error names the longest, so that the setting is raised only once
    length = int(items.tokens[longest])
    if length > costs.max_pack_tokens:
        of = f"sample {samples[longest]}" if together is None else f"group {np.unique(together[samples])[longest]}"
        raise BatchError(
            f"batch.max_tokens_per_rank x mesh.cp = {costs.max_pack_tokens} tokens cannot hold {of}, "
            f"which has {length}",
            field="batch.max_tokens_per_rank",
            hint=f"raise batch.max_tokens_per_rank or mesh.cp, so that their product is at least {length}",
        )
