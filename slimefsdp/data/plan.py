"""The plan says which samples each dp rank trains on, micro-batch by micro-batch, in every update of a phase.

It is made once, from lengths alone, and is equal on every machine that makes it, so ranks never negotiate: all of them
see the same number of micro-batches in an update, and no pack is longer than the cap. An update takes n log n steps:

1. first-fit decreasing finds how many packs suffice, and so, rounded up to a multiple of dp, how many each rank gets;
2. the same samples are placed again, longest first, each on the rank with least work so far and there into the pack
   with least work so far, among those with room for it. This evens out ranks and, within a rank, micro-batches;
3. where that does not fit (long samples, a tight cap), the packs of pass 1 are kept and dealt to ranks in tiers of
   similar cost, the costliest of a tier to the rank with least so far.

A rank's costliest micro-batch comes first: ranks that wait for each other in every collective hold similar work then,
and a pack that is too much for the device's memory shows at once.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain
from typing import Any

import numpy as np

from slimefsdp.data.cost import DEFAULT_COST_MODEL, CostModel
from slimefsdp.errors import BatchError

Packs = list[list[int]]  # positions in the order of descending length, pack by pack


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """updates[u][dp_rank][micro_batch] -> ascending int64 sample indices (empty: a zero-weight dummy).

    Within an update every dp rank has equally many micro-batches, its costliest first; only a rank that has fewer
    samples than micro-batches has dummies, and they come last.
    """

    updates: tuple[tuple[tuple[np.ndarray, ...], ...], ...]
    num_dropped: int  # samples of the batch left out because nothing in them trains, counted once for all epochs
    num_skipped_updates: int  # updates with nothing left to train on, over all epochs; they are not in `updates`
    num_first_epoch_updates: int  # updates[:this] are the first epoch
    max_pack_tokens: int

    def digest(self) -> str:
        """sha256 over the whole content, as hex; equal on every rank that made the same plan."""
        counts = (self.num_dropped, self.num_skipped_updates, self.num_first_epoch_updates, self.max_pack_tokens)
        # every count precedes what it counts, so no two plans write the same numbers
        parts = [np.array([*counts, len(self.updates)])]
        for update in self.updates:
            packs = [pack for micro_batches in update for pack in micro_batches]
            parts += [np.array([len(update), *map(len, update)]), np.array([len(pack) for pack in packs]), *packs]
        return hashlib.sha256(np.concatenate(parts).astype("<i8").tobytes()).hexdigest()

    def samples_of(self, update: int) -> np.ndarray:
        """All sample indices of one update, ascending; int64 [samples]."""
        return np.sort(np.concatenate([pack for packs in self.updates[update] for pack in packs]))

    def imbalance(self, lengths: np.ndarray, cost_model: CostModel = DEFAULT_COST_MODEL, cp: int = 1) -> float:
        """Cost of the busiest dp rank over the mean, summed update by update because ranks meet after each; 1 is ideal.

        Args:
            lengths: int64 [B], tokens per sample of the batch that was planned.
            cp: ranks that share each pack, as when it was planned.
        """
        costs = cost_model.cost_after_split(lengths, cp=cp, max_tokens_per_rank=self.max_pack_tokens // cp)
        loads = [[sum(costs[pack].sum() for pack in packs) for packs in update] for update in self.updates]
        if not loads:
            return 1.0
        by_rank = np.array(loads)  # [updates, dp]
        return float(by_rank.max(axis=1).sum() / by_rank.mean(axis=1).sum())


def plan_phase(
    lengths: np.ndarray,
    *,
    dp: int,
    max_pack_tokens: int,
    samples_per_update: int | None = None,
    epochs: int = 1,
    seed: int | None = None,
    trains: np.ndarray | None = None,
    together: np.ndarray | None = None,
    cost_model: CostModel = DEFAULT_COST_MODEL,
    cp: int = 1,
) -> Plan:
    """The plan of a whole update phase over one batch of B samples; one update of everything by default.

    Args:
        lengths: int64 [B], tokens per sample.
        max_pack_tokens: hard cap on the tokens of a pack, batch.max_tokens_per_rank x mesh.cp.
        samples_per_update: samples per update, before dropping; the last update of an epoch takes what is left over.
            None: all samples in one update.
        epochs: how often every sample is used.
        seed: shuffle each epoch, by a generator seeded with (seed, epoch). None: the order of the batch.
        trains: bool [B], False where nothing in a sample trains (zero advantage, all masked). Dropped after updates
            are cut, so that an update's content does not depend on what else is dropped. None: all train.
        together: int64 [B], samples of equal number stay in one pack, for losses that compare them; an update then
            holds as many of these groups as fill `samples_per_update`, at least one. None: every sample by itself.
        cp: context-parallel ranks that share each pack; a sample's cost is its time on all of them.

    Raises:
        BatchError: a sample that trains, or a group that stays together, is longer than max_pack_tokens.
    """
    if together is not None:
        return _plan_groups(
            lengths, together, dp=dp, max_pack_tokens=max_pack_tokens, samples_per_update=samples_per_update,
            epochs=epochs, seed=seed, trains=trains, cost_model=cost_model, cp=cp,
        )  # fmt: skip
    assert lengths.ndim == 1 and len(lengths) > 0 and epochs >= 1, (lengths.shape, epochs)
    num_samples = len(lengths)
    keep = np.ones(num_samples, dtype=bool) if trains is None else trains
    assert keep.dtype == bool and keep.shape == lengths.shape, (keep.dtype, keep.shape)
    stride = num_samples if samples_per_update is None else samples_per_update
    assert stride >= 1, stride
    _refuse_over_the_cap(lengths, np.flatnonzero(keep), max_pack_tokens)  # all updates, before any is planned

    updates = []
    num_skipped = num_first_epoch = 0
    for epoch in range(epochs):
        order = np.arange(num_samples) if seed is None else _shuffled(num_samples, seed, epoch)
        for start in range(0, num_samples, stride):
            samples = order[start : start + stride]
            samples = samples[keep[samples]]
            if len(samples) == 0:
                num_skipped += 1
                continue
            updates.append(
                plan_update(lengths, samples, dp=dp, max_pack_tokens=max_pack_tokens, cost=cost_model, cp=cp)
            )
        if epoch == 0:
            num_first_epoch = len(updates)
    return Plan(tuple(updates), num_samples - int(keep.sum()), num_skipped, num_first_epoch, max_pack_tokens)


def _plan_groups(
    lengths: np.ndarray,
    together: np.ndarray,
    *,
    samples_per_update: int | None,
    trains: np.ndarray | None,
    **settings: Any,
) -> Plan:
    """As `plan_phase`, of groups as if each were one long sample; balanced by that length's cost."""
    ids, group_of = np.unique(together, return_inverse=True)
    sizes, group_lengths = np.bincount(group_of), np.bincount(group_of, lengths).astype(np.int64)
    members = np.split(np.argsort(group_of, kind="stable"), np.cumsum(sizes)[:-1])
    group_trains = sizes > 0 if trains is None else np.bincount(group_of, trains) > 0
    _refuse_over_the_cap(
        group_lengths, np.flatnonzero(group_trains), settings["max_pack_tokens"], lambda group: f"group {ids[group]}"
    )
    plan = plan_phase(
        group_lengths,
        samples_per_update=None if samples_per_update is None else max(1, samples_per_update // int(sizes.max())),
        trains=group_trains,
        **settings,
    )

    def samples_in(pack: np.ndarray) -> np.ndarray:
        return np.sort(np.concatenate([members[group] for group in pack])) if len(pack) else pack

    updates = tuple(tuple(tuple(map(samples_in, packs)) for packs in update) for update in plan.updates)
    first = [pack for update in updates[: plan.num_first_epoch_updates] for packs in update for pack in packs]
    num_dropped = len(lengths) - sum(map(len, first))
    return replace(plan, updates=updates, num_dropped=num_dropped)


def plan_update(
    lengths: np.ndarray, samples: np.ndarray, *, dp: int, max_pack_tokens: int, cost: CostModel, cp: int = 1
) -> tuple[tuple[np.ndarray, ...], ...]:
    """One update as [dp_rank][micro_batch] -> ascending sample indices, each rank's costliest micro-batch first.

    Depends on which samples there are, not on their order. 11/9 of the fewest possible packs at most, plus one and the
    rounding to dp (first-fit decreasing, Dosa 2007).

    Args:
        lengths: int64 [B], tokens of every sample of the batch, each at least 1.
        samples: int64 [n], the distinct indices into lengths to plan; at least one.

    Raises:
        BatchError: a sample is longer than max_pack_tokens.
    """
    assert dp >= 1 and len(samples) > 0, (dp, len(samples))
    assert lengths[samples].min() >= 1, "an empty sample"
    _refuse_over_the_cap(lengths, samples, max_pack_tokens)
    samples = np.sort(samples)
    samples = samples[np.argsort(-lengths[samples], kind="stable")]  # longest first, ties by index
    tokens = lengths[samples]
    costs = cost.cost_after_split(tokens, cp=cp, max_tokens_per_rank=max_pack_tokens // cp)

    tight = _fewest_packs(tokens.tolist(), max_pack_tokens)
    micro_batches = -(-len(tight) // dp)
    packs = _balanced_packs(tokens.tolist(), costs, dp, micro_batches, max_pack_tokens)
    if packs is None:
        packs = _deal(_split_costliest(tight, costs, dp * micro_batches), costs, dp)

    members, pack_of = _flat(packs)
    sizes, pack_tokens = np.bincount(pack_of, minlength=len(packs)), np.bincount(pack_of, tokens[members])
    assert sizes.sum() == len(samples) and pack_tokens.max() <= max_pack_tokens
    ascending = samples[members][np.lexsort((samples[members], pack_of))]
    arrays = np.split(ascending, np.cumsum(sizes)[:-1])
    by_cost = np.argsort(-_costs_of(packs, costs).reshape(dp, micro_batches), axis=1, kind="stable")
    return tuple(
        tuple(arrays[rank * micro_batches + index] for index in order) for rank, order in enumerate(by_cost.tolist())
    )


def _shuffled(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch]))).permutation(num_samples)


def _refuse_over_the_cap(
    lengths: np.ndarray,
    samples: np.ndarray,
    max_pack_tokens: int,
    name: Callable[[int], str] = lambda sample: f"sample {sample}",
) -> None:
    if len(samples) == 0:
        return
    longest = int(samples[np.argmax(lengths[samples])])  # naming the longest, one raise of the setting is enough
    length = int(lengths[longest])
    if length > max_pack_tokens:
        raise BatchError(
            f"batch.max_tokens_per_rank x mesh.cp = {max_pack_tokens} tokens cannot hold {name(longest)}, "
            f"which has {length}",
            field="batch.max_tokens_per_rank",
            hint=f"raise batch.max_tokens_per_rank or mesh.cp, so that their product is at least {length}",
        )


def _fewest_packs(tokens: Sequence[int], cap: int) -> Packs:
    """First-fit decreasing, pack by pack: a pack takes the longest sample left that fits until none does."""
    ascending = [-length for length in tokens]
    num_samples = len(tokens)
    next_left = list(range(num_samples + 1))  # union-find: leads to the first sample left at or after a position

    def first_left(position: int) -> int:
        while next_left[position] != position:
            next_left[position] = next_left[next_left[position]]
            position = next_left[position]
        return position

    packs: Packs = []
    while (position := first_left(0)) < num_samples:
        room, pack = cap, []
        while position < num_samples:
            pack.append(position)
            next_left[position] = position + 1
            room -= tokens[position]
            position = first_left(bisect_left(ascending, -room, lo=position))
        packs.append(pack)
    return packs


def _balanced_packs(tokens: Sequence[int], costs: np.ndarray, dp: int, micro_batches: int, cap: int) -> Packs | None:
    """dp x micro_batches packs, rank by rank: longest sample first, to the rank and there to the pack with least work.

    Returns None if a sample finds no room. Samples only get shorter, so a pack without room for the present one is
    parked and reopened once it has room, and so is a rank without an open pack: a few heap operations per sample,
    however tight the cap.
    """
    num_packs = dp * micro_batches
    packs: Packs = [[] for _ in range(num_packs)]
    room = [cap] * num_packs
    # A key is work x num_packs + index. One int compares several times faster than a tuple, and adding to it adds work.
    # Work counts in 2^-20 of the costliest sample, at least 1 so that an empty pack always comes first.
    added = np.maximum(np.rint(costs * (2**20 / costs.max())), 1).astype(np.int64) * num_packs
    open_packs = [list(range(rank * micro_batches, (rank + 1) * micro_batches)) for rank in range(dp)]
    parked_packs: list[list[tuple[int, int]]] = [[] for _ in range(dp)]  # (-room, key)
    open_ranks = list(range(dp))
    parked_ranks: list[tuple[int, int]] = []  # (-room of its roomiest pack, key)
    for position, (length, work) in enumerate(zip(tokens, added.tolist(), strict=True)):
        _reopen(parked_ranks, open_ranks, length)
        if not open_ranks:
            return None
        rank_key = open_ranks[0]
        of_rank, parked = open_packs[rank_key % num_packs], parked_packs[rank_key % num_packs]
        _reopen(parked, of_rank, length)
        pack_key = of_rank[0]
        pack = pack_key % num_packs
        packs[pack].append(position)
        room[pack] -= length
        if room[pack] >= length:
            heapreplace(of_rank, pack_key + work)
        else:
            heappop(of_rank)
            heappush(parked, (-room[pack], pack_key + work))
        if of_rank:
            heapreplace(open_ranks, rank_key + work)
        else:
            heappop(open_ranks)
            heappush(parked_ranks, (parked[0][0], rank_key + work))
    return packs


def _reopen(parked: list[tuple[int, int]], is_open: list[int], length: int) -> None:
    while parked and -parked[0][0] >= length:
        heappush(is_open, heappop(parked)[1])


def _split_costliest(packs: Packs, costs: np.ndarray, num_packs: int) -> Packs:
    """As many packs as asked for, by halving the costliest that can be halved; empty ones only where none can."""
    packs = list(packs)
    splittable = [
        (-cost, index) for index, cost in enumerate(_costs_of(packs, costs).tolist()) if len(packs[index]) > 1
    ]
    heapify(splittable)
    while splittable and len(packs) < num_packs:
        index = heappop(splittable)[1]
        packs.append(packs[index][1::2])
        packs[index] = packs[index][::2]
        for half in (index, len(packs) - 1):
            if len(packs[half]) > 1:
                heappush(splittable, (-float(costs[packs[half]].sum()), half))
    return packs + [[] for _ in range(num_packs - len(packs))]


def _deal(packs: Packs, costs: np.ndarray, dp: int) -> Packs:
    """The packs, rank by rank: of every dp packs of similar cost, the costliest to the rank with least work so far."""
    pack_costs = _costs_of(packs, costs)
    tiers = np.argsort(-pack_costs, kind="stable").reshape(-1, dp)  # [micro_batches, dp]
    dealt = np.empty_like(tiers)
    work = np.zeros(dp)
    for micro_batch, tier in enumerate(tiers):
        ranks = np.argsort(work, kind="stable")
        dealt[micro_batch, ranks] = tier
        work[ranks] += pack_costs[tier]
    return [packs[pack] for pack in dealt.T.ravel().tolist()]


def _flat(packs: Packs) -> tuple[np.ndarray, np.ndarray]:
    """(positions end to end, the pack each is in); int64 [samples] both."""
    positions = np.fromiter(chain.from_iterable(packs), np.int64)
    return positions, np.repeat(np.arange(len(packs)), [len(pack) for pack in packs])


def _costs_of(packs: Packs, costs: np.ndarray) -> np.ndarray:
    positions, pack_of = _flat(packs)
    return np.bincount(pack_of, costs[positions], len(packs))
