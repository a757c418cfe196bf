"""Items go where the plain greedy puts them, whichever of the ways to the same packs is taken."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from slimefsdp.batching.balance import balanced_packs
from tests.support.tiers import examples


def first_fit_decreasing(tokens: list[int], cap: int) -> int:
    """How many packs it makes."""
    rooms: list[int] = []
    for length in sorted(tokens, reverse=True):
        pack = next((index for index, room in enumerate(rooms) if room >= length), None)
        if pack is None:
            rooms.append(cap - length)
        else:
            rooms[pack] -= length
    return len(rooms)


def greedy(tokens: np.ndarray, costs: np.ndarray, dp: int, cap: int) -> list[list[list[int]]] | None:
    """[rank][pack] -> items, looking at every pack for every item; None where an item finds no room."""
    count = -(-first_fit_decreasing(tokens.tolist(), cap) // dp)
    work = np.maximum(np.rint(costs * (2**20 / costs.max())), 1).astype(np.int64)
    packs: list[list[list[int]]] = [[[] for _ in range(count)] for _ in range(dp)]
    for item in np.argsort(-tokens, kind="stable").tolist():

        def has_room(pack: list[int], item: int = item) -> bool:
            return int(tokens[pack].sum() + tokens[item]) <= cap

        ranks = [rank for rank in range(dp) if any(map(has_room, packs[rank]))]
        if not ranks:
            return None
        rank = min(ranks, key=lambda rank: sum(int(work[pack].sum()) for pack in packs[rank]))
        pack = min(filter(has_room, packs[rank]), key=lambda pack: int(work[pack].sum()))
        pack.append(item)
    return [sorted(of_rank, key=lambda pack: -sum(costs[item] for item in pack)) for of_rank in packs]


@given(st.data())
@examples(300)
def test_packs_are_those_of_the_plain_greedy_where_all_items_find_room(data: st.DataObject) -> None:
    cap = data.draw(st.integers(1, 40))
    longest = data.draw(st.integers(1, cap))  # short items leave room, long ones do not
    tokens = np.array(data.draw(st.lists(st.integers(1, longest), min_size=1, max_size=40)))
    dp = data.draw(st.integers(1, 6))
    costs = tokens * (1.0 + tokens / 64)  # exact: 64 is a power of two
    items, sizes = balanced_packs(tokens, costs, dp=dp, cap=cap)
    assert np.array_equal(np.sort(items), np.arange(len(tokens)))
    assert sizes.shape == (dp, -(-first_fit_decreasing(tokens.tolist(), cap) // dp))
    packs = iter(np.split(items, np.cumsum(sizes)[:-1]))
    found = [[next(packs).tolist() for _ in of_rank] for of_rank in sizes]
    assert all(tokens[pack].sum() <= cap for of_rank in found for pack in of_rank)
    expected = greedy(tokens, costs, dp, cap)
    if expected is not None:
        assert found == expected
