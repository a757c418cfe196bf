"""What stays together in a pack: a sample, a group that a loss compares, or samples that begin alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from slimefsdp.batching.cost import CostModel
from slimefsdp.batching.prefix_tree import SharedPrefixes


class Groups(NamedTuple):
    """Samples that are placed as one, item after item."""

    samples: np.ndarray  # int64 [samples]
    sizes: np.ndarray  # int64 [items], samples of each
    tokens: np.ndarray  # int64 [items], what it takes in a pack, or its pairs where they are more
    costs: np.ndarray  # float64 [items]


@dataclass(frozen=True, eq=False)
class SampleCosts:
    """What the samples of a batch take, alone and together."""

    lengths: np.ndarray  # int64 [B]
    model: CostModel
    cp: int  # ranks that share each pack
    max_pack_tokens: int
    shared: SharedPrefixes | None = None  # what is shared is computed once
    pairs: np.ndarray | None = None  # int64 [B], predictions that a sample shares with none; None: as tokens are
    is_cut: np.ndarray = field(init=False)  # bool [B], whether its tokens travel between the cp ranks
    each: np.ndarray = field(init=False)  # float64 [B], the cost of every sample alone

    def __post_init__(self) -> None:
        # what no rank may hold whole; shorter samples are taken to stay whole, though `hybrid_layout` may cut some
        is_cut = self.lengths > self.max_pack_tokens // self.cp
        object.__setattr__(self, "is_cut", is_cut)
        object.__setattr__(self, "each", self.model.cost_after_split(self.lengths, cp=self.cp, is_cut=is_cut))

    def tokens(self, samples: np.ndarray) -> int:
        """Of these samples in one pack."""
        return int(self.lengths[samples].sum()) if self.shared is None else self.shared.tokens(self.lengths, samples)

    def work(self, samples: np.ndarray) -> float:
        """Cost of these samples in one pack."""
        total = float(self.each[samples].sum())
        if self.shared is not None and len(samples) > 1:
            total -= float(self.saved(*self.shared.among(samples)).sum())
        return total

    def saved(self, samples: np.ndarray, shared: np.ndarray) -> np.ndarray:
        """What each sample costs less because its first `shared` tokens are in the pack already; float64 [samples].

        As if all samples that share were cut or none: where some are longer than a rank's cap and others not, what is
        sent for their prefix is an estimate.
        """
        return self.model.cost_after_split(shared, cp=self.cp, is_cut=self.is_cut[samples])


def singles(costs: SampleCosts, samples: np.ndarray) -> Groups:
    """Every sample by itself."""
    return Groups(samples, np.ones_like(samples), costs.lengths[samples], costs.each[samples])


def groups(costs: SampleCosts, samples: np.ndarray, together: np.ndarray) -> Groups:
    """Samples of equal number in `together` [B], in the order of these numbers."""
    _, group_of = np.unique(together[samples], return_inverse=True)
    sizes = np.bincount(group_of)
    members = np.split(samples[np.argsort(group_of, kind="stable")], np.cumsum(sizes)[:-1])
    return Groups(
        np.concatenate(members),
        sizes,
        np.array([costs.tokens(group) for group in members]),
        np.array([costs.work(group) for group in members]),
    )


def prefix_groups(costs: SampleCosts, samples: np.ndarray, limit: int) -> Groups:
    """Samples with a common beginning, as many as make at most `limit` tokens and pairs, or one sample.

    What shares more stays together longer: a range of samples that is too large is parted where neighbours have least
    in common, and what that leaves is joined again up to about equally large prefix groups.
    """
    assert costs.shared is not None
    samples, shared = costs.shared.among(samples)
    own = costs.lengths[samples] - shared  # tokens that each adds to those before it
    new = np.concatenate([[0], np.cumsum(own)])
    pairs = np.zeros_like(new) if costs.pairs is None else np.concatenate([[0], np.cumsum(costs.pairs[samples])])
    spent = np.concatenate([[0.0], np.cumsum(costs.each[samples] - costs.saved(samples, shared))])
    starts: list[int] = []

    def tokens_in(low: int, high: int) -> int:
        return int(new[high] - new[low] + shared[low])

    def size(low: int, high: int) -> int:
        return max(tokens_in(low, high), int(pairs[high] - pairs[low]))

    ranges = [(0, len(samples))]
    while ranges:
        low, high = ranges.pop()
        least = int(shared[low + 1 : high].min(initial=np.iinfo(np.int64).max))  # that neighbours have in common
        if high - low == 1 or (least > 0 and size(low, high) <= limit):
            starts.append(low)
            continue
        cuts = [low, *(low + 1 + np.flatnonzero(shared[low + 1 : high] == least)).tolist(), high]
        parts = list(pairwise(cuts))
        ranges += parts if least == 0 else _joined(parts, [tokens_in(*part) for part in parts], pairs, least, limit)
    bounds = [*sorted(starts), len(samples)]
    first = np.array(bounds[:-1])
    return Groups(
        samples,
        np.diff(bounds),
        np.array([size(low, high) for low, high in pairwise(bounds)]),
        np.diff(spent[bounds]) + costs.saved(samples[first], shared[first]),
    )


def _joined(
    parts: list[tuple[int, int]], sizes: list[int], pairs: np.ndarray, common: int, limit: int
) -> list[tuple[int, int]]:
    """Neighbouring parts joined while they stay within the limit, about equally large.

    Args:
        sizes: tokens of every part.
        pairs: of all samples before each place.
        common: tokens that all parts begin with; they count once where parts are joined.
    """
    to_join = sum(size - common for size in sizes if size <= limit)
    all_pairs = int(pairs[parts[-1][1]] - pairs[parts[0][0]])
    runs_needed = max(1, -(-to_join // max(1, limit - common)), -(-all_pairs // limit))
    enough, enough_pairs = common + -(-to_join // runs_needed), -(-all_pairs // runs_needed)
    joined: list[tuple[int, int]] = []
    held = 0  # tokens of the last run; 0: nothing joins it
    for (low, high), size in zip(parts, sizes, strict=True):
        together = held + size - common
        if held and together <= limit and pairs[high] - pairs[joined[-1][0]] <= limit:
            joined[-1] = (joined[-1][0], high)
            held = together
        else:
            joined.append((low, high))
            held = size
        if held >= enough and pairs[high] - pairs[joined[-1][0]] >= enough_pairs:
            held = 0
    return joined
