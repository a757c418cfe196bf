"""Places items of known tokens and costs in packs over ranks: no pack over the cap, work as even as possible.

An item is what stays in one pack: a sample, a pair that a loss compares, or samples that share a prefix. It takes
n log n steps:

1. first-fit decreasing finds how many packs suffice, and so, rounded up to a multiple of dp, how many each rank gets;
   where bounds on it tell as much, it is not made;
2. the same items are placed again, longest first, each on the rank with least work so far and there into the pack
   with least work so far, among those with room for it: at first as if all had. This evens out ranks and, within a
   rank, micro-batches;
3. where that does not fit (long items, a tight cap), the packs of pass 1 are kept and dealt to ranks in tiers of
   similar cost, the costliest of a tier to the rank with least so far.

A rank's costliest pack comes first: ranks that wait for each other in every collective hold similar work then, and a
pack that is too much for the device's memory shows at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain

import numpy as np

Packs = list[list[int]]  # positions in the order of descending length, pack by pack


def balanced_packs(tokens: np.ndarray, costs: np.ndarray, *, dp: int, cap: int) -> tuple[np.ndarray, np.ndarray]:
    """Packs items for every rank: equally many packs each, a rank's costliest first.

    11/9 of the fewest possible packs at most, plus one and the rounding to dp (first-fit decreasing, Dosa 2007).

    Args:
        tokens: int64 [items], each in [1, cap]; at least one.
        costs: float64 [items].

    Returns:
        The items, int64 [items], and how many of them each pack has, int64 [dp, packs of a rank].
    """
    longest_first = np.argsort(-tokens, kind="stable")  # ties in the order given
    tokens, costs = tokens[longest_first], costs[longest_first]
    tight: Packs | None = None
    micro_batches, most = (-(-packs // dp) for packs in _bounds_of_packs(tokens, cap))
    if micro_batches < most:
        tight = _fewest_packs(tokens.tolist(), cap)
        micro_batches = -(-len(tight) // dp)
    num_packs = dp * micro_batches
    # Work counts in 2^-20 of the costliest item, at least 1 so that an empty pack always comes first.
    work = np.maximum(np.rint(costs * (2**20 / costs.max())), 1).astype(np.int64)
    pack_of = _freely_balanced_packs(work, dp, micro_batches)
    if np.bincount(pack_of, tokens).max() > cap:
        held = _balanced_packs(tokens.tolist(), work, dp, micro_batches, cap)
        if held is None:
            tight = _fewest_packs(tokens.tolist(), cap) if tight is None else tight
            held = _dealt(_split_costliest(tight, costs, num_packs), costs, dp)
        pack_of = held
    pack_tokens = np.bincount(pack_of, tokens, num_packs)
    assert len(pack_of) == len(tokens) and pack_tokens.max() <= cap
    pack_costs = np.bincount(pack_of, costs, num_packs).reshape(dp, micro_batches)
    place = np.empty_like(pack_costs, dtype=np.int64)  # of every pack among its rank's, the costliest first
    np.put_along_axis(place, np.argsort(-pack_costs, axis=1, kind="stable"), np.arange(micro_batches)[None], axis=1)
    pack_of = (np.arange(dp)[:, None] * micro_batches + place).ravel()[pack_of]
    sizes = np.bincount(pack_of, minlength=num_packs)
    return longest_first[np.argsort(pack_of, kind="stable")], sizes.reshape(dp, micro_batches)


def _bounds_of_packs(tokens: np.ndarray, cap: int) -> tuple[int, int]:
    """Returns the least and the most packs that first-fit decreasing can make.

    It opens a pack for an item only where no other has room for it: all of those hold more than the cap less the
    longest item.
    """
    total, longest = int(tokens.sum()), int(tokens[0])
    return -(-total // cap), (total - 1) // (cap - longest + 1) + 1


def _fewest_packs(tokens: Sequence[int], cap: int) -> Packs:
    """Packs by first-fit decreasing, pack by pack: a pack takes the longest remaining item that fits
    until none does.
    """
    ascending = [-length for length in tokens]
    num_items = len(tokens)
    next_left = list(range(num_items + 1))  # union-find: leads to the first item left at or after a position

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
    """Balances without a cap. If no pack of the result exceeds the cap, it is the result of `_balanced_packs`."""
    rank_of = _least_loaded(work, dp)
    if micro_batches == 1:
        return rank_of
    by_rank = np.argsort(rank_of, kind="stable")
    pack_of = np.empty_like(rank_of)
    for rank, items in enumerate(np.split(by_rank, np.cumsum(np.bincount(rank_of, minlength=dp))[:-1])):
        pack_of[items] = rank * micro_batches + _least_loaded(work[items], micro_batches)
    return pack_of


def _least_loaded(work: np.ndarray, places: int) -> np.ndarray:
    """Assigns each item in turn to the bin with the least work, the first of equal ones; int64 [items]."""
    keys = list(range(places))
    taken = [heapreplace(keys, keys[0] + added) for added in (work * places).tolist()]
    return np.array(taken, dtype=np.int64) % places


def _balanced_packs(
    tokens: Sequence[int], work: np.ndarray, dp: int, micro_batches: int, cap: int
) -> np.ndarray | None:
    """Returns the pack of every item, int64, numbered rank by rank: longest item first, to the rank and pack with the
    least work.

    Returns None if an item finds no room. Items only get shorter, so a pack without room for the present one is
    parked and reopened once it has room, and so is a rank without an open pack: a few heap operations per item,
    however tight the cap.
    """
    num_packs = dp * micro_batches
    pack_of: list[int] = []
    room = [cap] * num_packs
    # A key is work x num_packs + index. One int compares several times faster than a tuple, and adding to it adds work.
    added = (work * num_packs).tolist()
    open_packs = [list(range(rank * micro_batches, (rank + 1) * micro_batches)) for rank in range(dp)]
    parked_packs: list[list[tuple[int, int]]] = [[] for _ in range(dp)]  # (-room, key)
    open_ranks = list(range(dp))
    parked_ranks: list[tuple[int, int]] = []  # (-room of its roomiest pack, key)
    for length, more in zip(tokens, added, strict=True):
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
            heapreplace(of_rank, pack_key + more)
        else:
            heappop(of_rank)
            heappush(parked, (-room[pack], pack_key + more))
        if of_rank:
            heapreplace(open_ranks, rank_key + more)
        else:
            heappop(open_ranks)
            heappush(parked_ranks, (parked[0][0], rank_key + more))
    return np.array(pack_of)


def _reopen(parked: list[tuple[int, int]], is_open: list[int], length: int) -> None:
    while parked and -parked[0][0] >= length:
        heappush(is_open, heappop(parked)[1])


def _split_costliest(packs: Packs, costs: np.ndarray, num_packs: int) -> Packs:
    """Halves the costliest pack that can be halved until there are enough packs; adds empty ones if none can."""
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
    """Returns the pack of every item, rank by rank: of every dp packs of similar cost, the costliest goes to the least
    loaded rank.
    """
    pack_costs = _costs_of(packs, costs)
    tiers = np.argsort(-pack_costs, kind="stable").reshape(-1, dp)  # [micro_batches, dp]
    number = np.empty(len(packs), dtype=np.int64)  # of every pack, rank by rank
    work = np.zeros(dp)
    for micro_batch, tier in enumerate(tiers):
        ranks = np.argsort(work, kind="stable")
        number[tier] = ranks * len(tiers) + micro_batch
        work[ranks] += pack_costs[tier]
    positions, pack_of = _flat(packs)
    found = np.empty_like(positions)
    found[positions] = number[pack_of]
    return found


def _flat(packs: Packs) -> tuple[np.ndarray, np.ndarray]:
    """Returns concatenated positions and the pack of each; int64 [samples] both."""
    positions = np.fromiter(chain.from_iterable(packs), np.int64)
    return positions, np.repeat(np.arange(len(packs)), [len(pack) for pack in packs])


def _costs_of(packs: Packs, costs: np.ndarray) -> np.ndarray:
    positions, pack_of = _flat(packs)
    return np.bincount(pack_of, costs[positions], len(packs))
