"""Distributes items over the packs of all ranks: no pack exceeds the cap, and the work is as even as possible.

An item is one or more samples that stay in one pack: a single sample, a pair that a loss compares, or samples that
share a prefix. Three passes, O(n log n) in total:

1. First-fit decreasing finds how many packs suffice. Rounded up to a multiple of dp, this is the number of packs of
   all ranks. The pass is skipped if the bounds on its result already determine this number.
2. The items are placed, longest first, on the rank with the least work, in its pack with the least work.
   The first attempt ignores the cap; the second considers only packs that have room. This evens out the ranks and the
   micro-batches of a rank.
3. If pass 2 fails (long items, a tight cap), the packs of pass 1 are sorted by cost and dealt out in tiers of dp. The
   costliest pack of a tier goes to the rank with the least work so far.

Each rank's costliest pack comes first. Ranks wait for each other in every collective, so packs of similar cost should
run at the same time; and a pack that does not fit the device's memory fails at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain

import numpy as np

Packs = list[list[int]]  # [pack] -> positions of its items in the order of descending length


def balanced_packs(tokens: np.ndarray, costs: np.ndarray, *, dp: int, cap: int) -> tuple[np.ndarray, np.ndarray]:
    """Distributes items over packs. All ranks get equally many packs, and a rank's costliest pack is its first.

    The number of packs is at most 11/9 of the optimum, plus one, plus the rounding to dp (first-fit decreasing, Dosa
    2007).

    Args:
        tokens: int64 [items], each in [1, cap]; at least one item.
        costs: float64 [items], the estimated work of each item.

    Returns:
        The item indices, pack by pack, int64 [items]; and the number of items in each pack, int64 [dp, packs of a
        rank].
    """
    longest_first = np.argsort(-tokens, kind="stable")  # ties keep the order of the arguments
    tokens, costs = tokens[longest_first], costs[longest_first]
    fewest: Packs | None = None
    micro_batches, upper = (-(-packs // dp) for packs in _bounds_of_packs(tokens, cap))
    if micro_batches < upper:
        fewest = _fewest_packs(tokens.tolist(), cap)
        micro_batches = -(-len(fewest) // dp)
    num_packs = dp * micro_batches
    # Work in units of 2^-20 of the costliest item, at least 1, so that an empty pack always has the least work.
    work = np.maximum(np.rint(costs * (2**20 / costs.max())), 1).astype(np.int64)
    pack_of = _freely_balanced_packs(work, dp, micro_batches)
    if np.bincount(pack_of, tokens).max() > cap:
        capped = _balanced_packs(tokens.tolist(), work, dp, micro_batches, cap)
        if capped is None:
            fewest = _fewest_packs(tokens.tolist(), cap) if fewest is None else fewest
            capped = _dealt(_split_costliest(fewest, costs, num_packs), costs, dp)
        pack_of = capped
    pack_tokens = np.bincount(pack_of, tokens, num_packs)
    assert len(pack_of) == len(tokens) and pack_tokens.max() <= cap
    pack_costs = np.bincount(pack_of, costs, num_packs).reshape(dp, micro_batches)
    position = np.empty_like(pack_costs, dtype=np.int64)  # of every pack within its rank; the costliest pack has 0
    np.put_along_axis(position, np.argsort(-pack_costs, axis=1, kind="stable"), np.arange(micro_batches)[None], axis=1)
    pack_of = (np.arange(dp)[:, None] * micro_batches + position).ravel()[pack_of]
    sizes = np.bincount(pack_of, minlength=num_packs)
    return longest_first[np.argsort(pack_of, kind="stable")], sizes.reshape(dp, micro_batches)


def _bounds_of_packs(tokens: np.ndarray, cap: int) -> tuple[int, int]:
    """Returns a lower and an upper bound on the number of packs of first-fit decreasing.

    First-fit decreasing opens a pack only if no open pack has room for the item. So all packs but the last hold more
    than the cap minus the longest item.
    """
    total, longest = int(tokens.sum()), int(tokens[0])
    return -(-total // cap), (total - 1) // (cap - longest + 1) + 1


def _fewest_packs(tokens: Sequence[int], cap: int) -> Packs:
    """Packs by first-fit decreasing: each pack in turn takes the longest remaining items that fit, until none fits."""
    ascending = [-length for length in tokens]
    num_items = len(tokens)
    next_left = list(range(num_items + 1))  # union-find: leads to the first unpacked item at or after a position

    def first_left(position: int) -> int:
        while next_left[position] != position:
            next_left[position] = next_left[next_left[position]]
            position = next_left[position]
        return position

    packs: Packs = []
    while (position := first_left(0)) < num_items:
        room, pack = cap, []
        while position < num_items:
            pack.append(position)
            next_left[position] = position + 1
            room -= tokens[position]
            position = first_left(bisect_left(ascending, -room, lo=position))
        packs.append(pack)
    return packs


def _freely_balanced_packs(work: np.ndarray, dp: int, micro_batches: int) -> np.ndarray:
    """Returns the pack of every item, int64 [items], ignoring the cap.

    If no pack of the result exceeds the cap, the result equals that of `_balanced_packs`.
    """
    rank_of = _least_loaded(work, dp)
    if micro_batches == 1:
        return rank_of
    by_rank = np.argsort(rank_of, kind="stable")
    pack_of = np.empty_like(rank_of)
    for rank, items in enumerate(np.split(by_rank, np.cumsum(np.bincount(rank_of, minlength=dp))[:-1])):
        pack_of[items] = rank * micro_batches + _least_loaded(work[items], micro_batches)
    return pack_of


def _least_loaded(work: np.ndarray, bins: int) -> np.ndarray:
    """Assigns each item in turn to the bin with the least work, or the first of them; returns int64 [items]."""
    keys = list(range(bins))  # work x bins + index of the bin
    chosen = [heapreplace(keys, keys[0] + added) for added in (work * bins).tolist()]
    return np.array(chosen, dtype=np.int64) % bins


def _balanced_packs(
    tokens: Sequence[int], work: np.ndarray, dp: int, micro_batches: int, cap: int
) -> np.ndarray | None:
    """Places each item, longest first, in the pack with the least work of the rank with the least work.

    A pack without room for the current item is set aside until a later, shorter item fits. So is a rank all of whose
    packs are set aside. This takes a few heap operations per item, however tight the cap.

    Returns:
        The pack of every item, int64 [items], numbered rank by rank; None if an item finds no room.
    """
    num_packs = dp * micro_batches
    pack_of: list[int] = []
    room = [cap] * num_packs
    # A key is work x num_packs + index: one int compares several times faster than a tuple, and adding to it adds work.
    added_works = (work * num_packs).tolist()
    open_packs = [list(range(rank * micro_batches, (rank + 1) * micro_batches)) for rank in range(dp)]
    parked_packs: list[list[tuple[int, int]]] = [[] for _ in range(dp)]  # (-room, key)
    open_ranks = list(range(dp))
    parked_ranks: list[tuple[int, int]] = []  # (-room of the rank's roomiest pack, key)
    for length, added_work in zip(tokens, added_works, strict=True):
        if parked_ranks:
            _reopen(parked_ranks, open_ranks, length)
            if not open_ranks:
                return None
        rank_key = open_ranks[0]
        of_rank, parked = open_packs[rank_key % num_packs], parked_packs[rank_key % num_packs]
        if parked:
            _reopen(parked, of_rank, length)
        pack_key = of_rank[0]
        pack = pack_key % num_packs
        pack_of.append(pack)
        room[pack] -= length
        if room[pack] >= length:
            heapreplace(of_rank, pack_key + added_work)
        else:
            heappop(of_rank)
            heappush(parked, (-room[pack], pack_key + added_work))
        if of_rank:
            heapreplace(open_ranks, rank_key + added_work)
        else:
            heappop(open_ranks)
            heappush(parked_ranks, (parked[0][0], rank_key + added_work))
    return np.array(pack_of)


def _reopen(parked: list[tuple[int, int]], is_open: list[int], length: int) -> None:
    while parked and -parked[0][0] >= length:
        heappush(is_open, heappop(parked)[1])


def _split_costliest(packs: Packs, costs: np.ndarray, num_packs: int) -> Packs:
    """Halves the costliest pack of two items or more until there are enough packs; then adds empty packs."""
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


def _dealt(packs: Packs, costs: np.ndarray, dp: int) -> np.ndarray:
    """Deals packs to ranks in tiers of dp packs of similar cost; a tier's costliest pack goes to the least loaded rank.

    Returns:
        The pack of every item, int64 [items], numbered rank by rank.
    """
    pack_costs = _costs_of(packs, costs)
    tiers = np.argsort(-pack_costs, kind="stable").reshape(-1, dp)  # [micro_batches, dp]
    number = np.empty(len(packs), dtype=np.int64)  # new number of every pack; numbers count rank by rank
    work = np.zeros(dp)
    for micro_batch, tier in enumerate(tiers):
        ranks = np.argsort(work, kind="stable")
        number[tier] = ranks * len(tiers) + micro_batch
        work[ranks] += pack_costs[tier]
    positions, pack_of = _flat(packs)
    pack_of_item = np.empty_like(positions)
    pack_of_item[positions] = number[pack_of]
    return pack_of_item


def _flat(packs: Packs) -> tuple[np.ndarray, np.ndarray]:
    """Returns the positions in all packs, concatenated, and the pack of each position; both int64 [items]."""
    positions = np.fromiter(chain.from_iterable(packs), np.int64)
    return positions, np.repeat(np.arange(len(packs)), [len(pack) for pack in packs])


def _costs_of(packs: Packs, costs: np.ndarray) -> np.ndarray:
    positions, pack_of = _flat(packs)
    return np.bincount(pack_of, costs[positions], len(packs))
