"""Items of known tokens and costs, placed in packs over ranks: no pack over the cap, work as even as can be.

An item is what stays in one pack: a sample, a pair that a loss compares, or samples that share a prefix. It takes
n log n steps:

1. first-fit decreasing finds how many packs suffice, and so, rounded up to a multiple of dp, how many each rank gets;
2. the same items are placed again, longest first, each on the rank with least work so far and there into the pack
   with least work so far, among those with room for it. This evens out ranks and, within a rank, micro-batches;
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


def balanced_packs(tokens: np.ndarray, costs: np.ndarray, *, dp: int, cap: int) -> list[list[np.ndarray]]:
    """[dp_rank][pack] -> items, equally many packs for every rank, its costliest first.

    11/9 of the fewest possible packs at most, plus one and the rounding to dp (first-fit decreasing, Dosa 2007).

    Args:
        tokens: int64 [items], each in [1, cap]; at least one.
        costs: float64 [items].
    """
    longest_first = np.argsort(-tokens, kind="stable")  # ties in the order given
    tokens, costs = tokens[longest_first], costs[longest_first]
    tight = _fewest_packs(tokens.tolist(), cap)
    micro_batches = -(-len(tight) // dp)
    packs = _balanced_packs(tokens.tolist(), costs, dp, micro_batches, cap)
    if packs is None:
        packs = _deal(_split_costliest(tight, costs, dp * micro_batches), costs, dp)
    members, pack_of = _flat(packs)
    sizes, pack_tokens = np.bincount(pack_of, minlength=len(packs)), np.bincount(pack_of, tokens[members])
    assert sizes.sum() == len(tokens) and pack_tokens.max() <= cap
    arrays = np.split(longest_first[members], np.cumsum(sizes)[:-1])
    by_cost = np.argsort(-_costs_of(packs, costs).reshape(dp, micro_batches), axis=1, kind="stable")
    return [[arrays[rank * micro_batches + index] for index in order] for rank, order in enumerate(by_cost.tolist())]


def _fewest_packs(tokens: Sequence[int], cap: int) -> Packs:
    """First-fit decreasing, pack by pack: a pack takes the longest item left that fits until none does."""
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


def _balanced_packs(tokens: Sequence[int], costs: np.ndarray, dp: int, micro_batches: int, cap: int) -> Packs | None:
    """dp x micro_batches packs, rank by rank: longest item first, to the rank and there to the pack with least work.

    Returns None if an item finds no room. Groups only get shorter, so a pack without room for the present one is
    parked and reopened once it has room, and so is a rank without an open pack: a few heap operations per item,
    however tight the cap.
    """
    num_packs = dp * micro_batches
    packs: Packs = [[] for _ in range(num_packs)]
    room = [cap] * num_packs
    # A key is work x num_packs + index. One int compares several times faster than a tuple, and adding to it adds work.
    # Work counts in 2^-20 of the costliest item, at least 1 so that an empty pack always comes first.
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
