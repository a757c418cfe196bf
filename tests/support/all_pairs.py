"""Cases of a test with several parameters, without their whole product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any


def all_pairs(*axes: Sequence[Any], where: Callable[..., bool] = lambda *case: True) -> list[tuple[Any, ...]]:
    """Returns cases in which any two values of two different axes occur together, as few as a greedy choice finds.

    Args:
        where: whether a case is possible.
    """
    cases = [case for case in product(*axes) if where(*case)]

    def pairs_of(case: tuple[Any, ...]) -> set[tuple[int, str, int, str]]:
        return {(i, repr(case[i]), j, repr(case[j])) for i, j in combinations(range(len(axes)), 2)}

    left = set().union(*map(pairs_of, cases))
    chosen = []
    while left:
        best = max(cases, key=lambda case: len(left & pairs_of(case)))
        left -= pairs_of(best)
        chosen.append(best)
    return sorted(chosen, key=cases.index)
