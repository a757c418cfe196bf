"""What stays together in a pack: a sample, a group that a loss compares, or samples that begin alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from slimefsdp.batching.cost import CostModel
from slimefsdp.batching.prefix_tree import SharedPrefixes


class Groups(NamedTuple):
    """Groups of samples that are placed as one item each."""

    samples: np.ndarray  # int64 [samples]
    sizes: np.ndarray  # int64 [items], samples of each
    tokens: np.ndarray  # int64 [items], what it takes in a pack, or its pairs where they are more
    costs: np.ndarray  # float64 [items]


@dataclass(frozen=True, eq=False)
class SampleCosts:
    """The tokens and costs of a batch's samples, alone and in packs."""

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
        """Returns the tokens of these samples in one pack."""
        return int(self.tokens_each(samples, np.array([len(samples)]))[0])

    def tokens_each(self, samples: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Returns the tokens of every pack, int64 [packs]; arguments as for `works`."""
        own = self.lengths[samples]
        if self.shared is not None:
            samples, shared = self.shared.among_each(samples, sizes)
            own = self.lengths[samples] - shared
        before = np.concatenate([[0], np.cumsum(own)])
        ends = np.cumsum(sizes)
        return before[ends] - before[ends - sizes]

    def work(self, samples: np.ndarray) -> float:
        """Returns the cost of these samples in one pack."""
        return float(self.works(samples, np.array([len(samples)]))[0])

    def works(self, samples: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Returns the cost of every pack, float64 [packs]. The packs' samples are concatenated, `sizes` of
        each pack.
        """
        ends = np.cumsum(sizes).tolist()
        bounds = list(zip([0, *ends], ends, strict=False))
        each = self.each[samples]
        found = np.array([np.add.reduce(each[start:end]) for start, end in bounds], dtype=np.float64)
        if self.shared is not None:
            saved = self.saved(*self.shared.among_each(samples, sizes))
            found -= [np.add.reduce(saved[start:end]) for start, end in bounds]
        return found

    def roughly(self, samples: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Returns `works` faster, with other rounding."""
        pack_of = np.repeat(np.arange(len(sizes)), sizes)
        found = np.bincount(pack_of, self.each[samples], len(sizes))
        if self.shared is not None:
            found -= np.bincount(pack_of, self.saved(*self.shared.among_each(samples, sizes)), len(sizes))
        return found

    def saved(self, samples: np.ndarray, shared: np.ndarray) -> np.ndarray:
        """Returns how much cost each sample saves if its first `shared` tokens are in the pack already; float64
        [samples].

        As if all samples that share were cut or none: where some are longer than a rank's cap and others not, what is
        sent for their prefix is an estimate.
        """
        return self.model.cost_after_split(shared, cp=self.cp, is_cut=self.is_cut[samples])


def singles(costs: SampleCosts, samples: np.ndarray) -> Groups:
    """Makes every sample a group of its own."""
    return Groups(samples, np.ones_like(samples), costs.lengths[samples], costs.each[samples])


def groups(costs: SampleCosts, samples: np.ndarray, together: np.ndarray) -> Groups:
    """Groups samples of equal number in `together` [B], in the order of these numbers."""
    _, group_of = np.unique(together[samples], return_inverse=True)
    sizes = np.bincount(group_of)
    samples = samples[np.argsort(group_of, kind="stable")]
    return Groups(samples, sizes, costs.tokens_each(samples, sizes), costs.works(samples, sizes))


class PrefixGroups:
    """Splits samples into groups with a common prefix, as large as a limit allows.

    Args:
        costs: which know what is shared.
        samples: int64 [n].
    """

    def __init__(self, costs: SampleCosts, samples: np.ndarray) -> None:
        assert costs.shared is not None
        self._costs = costs
        self._samples, self._shared = costs.shared.among(samples)
        own = costs.lengths[self._samples] - self._shared  # tokens that each adds to those before it
        self._new = np.concatenate([[0], np.cumsum(own)])
        pairs = None if costs.pairs is None else costs.pairs[self._samples]
        self._pairs = np.zeros_like(self._new) if pairs is None else np.concatenate([[0], np.cumsum(pairs)])
        spent = costs.each[self._samples] - costs.saved(self._samples, self._shared)
        self._spent = np.concatenate([[0.0], np.cumsum(spent)])
        self._unrelated = np.append(np.flatnonzero(self._shared == 0), len(samples))  # who shares with none before

    def within(self, limit: int) -> Groups:
        """Returns groups of at most `limit` tokens and pairs, or of one sample.

        What shares more stays together longer: a range of samples that is too large is parted where neighbours have
        least in common, and what that leaves is joined again up to about equally large prefix groups.
        """
        low, high = self._unrelated[:-1], self._unrelated[1:]
        is_whole = (high - low == 1) | (self._sizes(low, high) <= limit)
        starts: list[int] = low[is_whole].tolist()
        ranges = list(zip(low[~is_whole].tolist(), high[~is_whole].tolist(), strict=True))
        while ranges:
            ranges += self._parted(*ranges.pop(), limit, starts)
        bounds = np.array([*sorted(starts), len(self._samples)])
        first = bounds[:-1]
        costs = np.diff(self._spent[bounds]) + self._costs.saved(self._samples[first], self._shared[first])
        return Groups(self._samples, np.diff(bounds), self._sizes(first, bounds[1:]), costs)

    def _sizes(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """Returns the tokens of ranges of samples, or their pairs where there are more of these."""
        return np.maximum(self._new[high] - self._new[low] + self._shared[low], self._pairs[high] - self._pairs[low])

    def _parted(self, low: int, high: int, limit: int, starts: list[int]) -> list[tuple[int, int]]:
        """Returns the ranges to try in place of a range of samples that share; if there are none, `starts` receives its
        start.
        """
        if high - low == 1 or self._sizes(low, high) <= limit:  # type: ignore[arg-type]
            starts.append(low)
            return []
        common = self._shared[low + 1 : high]
        least = int(common.min())  # that neighbours have in common
        cuts = [low, *(low + 1 + np.flatnonzero(common == least)).tolist(), high]
        parts = list(pairwise(cuts))
        tokens = [int(self._new[end] - self._new[start] + self._shared[start]) for start, end in parts]
        return _joined(parts, tokens, self._pairs, least, limit)


def _joined(
    parts: list[tuple[int, int]], sizes: list[int], pairs: np.ndarray, common: int, limit: int
) -> list[tuple[int, int]]:
    """Joins neighbouring parts while they stay within the limit, to about equal sizes.

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
