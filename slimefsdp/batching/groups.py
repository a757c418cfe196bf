"""Forms the items that packing keeps in one pack: a sample, a group that a loss compares, or samples with a prefix."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from slimefsdp.batching.cost import CostModel
from slimefsdp.batching.prefix_tree import SharedPrefixes


class Groups(NamedTuple):
    """Holds groups of samples; packing places each group as one item."""

    samples: np.ndarray  # int64 [samples], sample indices, group by group
    sizes: np.ndarray  # int64 [items], number of samples in each group
    tokens: np.ndarray  # int64 [items], each group's number of tokens in a pack, or of predictions if that is larger
    costs: np.ndarray  # float64 [items], estimated cost of each group


@dataclass(frozen=True, eq=False)
class SampleCosts:
    """Computes the tokens and costs of a batch's samples, alone and in packs."""

    lengths: np.ndarray  # int64 [B]
    model: CostModel
    cp: int  # ranks that share each pack
    max_pack_tokens: int
    shared: SharedPrefixes | None = None  # prefixes that a pack computes once; None means that every sample is whole
    pairs: np.ndarray | None = None  # int64 [B], predictions of each sample; None if samples share predictions
    is_cut: np.ndarray = field(init=False)  # bool [B], whether a sample is cut over the cp ranks
    each: np.ndarray = field(init=False)  # float64 [B], the cost of every sample alone

    def __post_init__(self) -> None:
        # samples that exceed a rank's cap; shorter ones are assumed whole, although `hybrid_layout` may cut some
        is_cut = self.lengths > self.max_pack_tokens // self.cp
        object.__setattr__(self, "is_cut", is_cut)
        object.__setattr__(self, "each", self.model.cost_after_split(self.lengths, cp=self.cp, is_cut=is_cut))

    def tokens(self, samples: np.ndarray) -> int:
        return int(self.tokens_each(samples, np.array([len(samples)]))[0])

    def tokens_each(self, samples: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Returns the tokens of every pack, int64 [packs].

        Args:
            samples, sizes: as for `works`.
        """
        own = self.lengths[samples]
        if self.shared is not None:
            samples, shared = self.shared.among_each(samples, sizes)
            own = self.lengths[samples] - shared
        before = np.concatenate([[0], np.cumsum(own)])
        ends = np.cumsum(sizes)
        return before[ends] - before[ends - sizes]

    def work(self, samples: np.ndarray) -> float:
        return float(self.works(samples, np.array([len(samples)]))[0])

    def works(self, samples: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Returns the cost of every pack, float64 [packs].

        Args:
            samples: int64, the sample indices of all packs, concatenated.
            sizes: int64 [packs], number of samples in each pack.
        """
        ends = np.cumsum(sizes).tolist()
        bounds = list(zip([0, *ends], ends, strict=False))
        each = self.each[samples]
        costs = np.array([np.add.reduce(each[start:end]) for start, end in bounds], dtype=np.float64)
        if self.shared is not None:
            saved = self.saved(*self.shared.among_each(samples, sizes))
            costs -= [np.add.reduce(saved[start:end]) for start, end in bounds]
        return costs

    def roughly(self, samples: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Returns the result of `works` with different rounding, but faster."""
        pack_of = np.repeat(np.arange(len(sizes)), sizes)
        costs = np.bincount(pack_of, self.each[samples], len(sizes))
        if self.shared is not None:
            costs -= np.bincount(pack_of, self.saved(*self.shared.among_each(samples, sizes)), len(sizes))
        return costs

    def saved(self, samples: np.ndarray, shared: np.ndarray) -> np.ndarray:
        """Returns the cost that each sample saves if the pack already has its first `shared` tokens; float64 [samples].

        Samples that share a prefix are assumed to be all cut or all whole. If only some of them exceed a rank's cap,
        the cost of sending the prefix is approximate.
        """
        return self.model.cost_after_split(shared, cp=self.cp, is_cut=self.is_cut[samples])


def singles(costs: SampleCosts, samples: np.ndarray) -> Groups:
    return Groups(samples, np.ones_like(samples), costs.lengths[samples], costs.each[samples])


def groups(costs: SampleCosts, samples: np.ndarray, together: np.ndarray) -> Groups:
    """Groups the samples that have equal numbers in `together` [B]; groups are in ascending order of these numbers."""
    _, group_of = np.unique(together[samples], return_inverse=True)
    sizes = np.bincount(group_of)
    samples = samples[np.argsort(group_of, kind="stable")]
    return Groups(samples, sizes, costs.tokens_each(samples, sizes), costs.works(samples, sizes))


class PrefixGroups:
    """Splits samples into groups with a common prefix, as large as a limit allows.

    Args:
        costs: the costs of the batch's samples, with `shared` set.
        samples: int64 [n].
    """

    def __init__(self, costs: SampleCosts, samples: np.ndarray) -> None:
        assert costs.shared is not None
        self._costs = costs
        self._samples, self._shared = costs.shared.among(samples)
        own = costs.lengths[self._samples] - self._shared  # tokens that each sample adds to the samples before
        self._new = np.concatenate([[0], np.cumsum(own)])
        pairs = None if costs.pairs is None else costs.pairs[self._samples]
        self._pairs = np.zeros_like(self._new) if pairs is None else np.concatenate([[0], np.cumsum(pairs)])
        spent = costs.each[self._samples] - costs.saved(self._samples, self._shared)
        self._spent = np.concatenate([[0.0], np.cumsum(spent)])
        # positions of the samples that share nothing with the sample before
        self._unrelated = np.append(np.flatnonzero(self._shared == 0), len(samples))

    def within(self, limit: int) -> Groups:
        """Returns groups, each of at most `limit` tokens and predictions or of a single sample.

        A range of samples that is too large is split where neighbours share the shortest prefix. The parts are then
        joined to groups of about equal size.
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
        """Returns the size of each range of samples: its tokens or its predictions, whichever are more."""
        return np.maximum(self._new[high] - self._new[low] + self._shared[low], self._pairs[high] - self._pairs[low])

    def _parted(self, low: int, high: int, limit: int, starts: list[int]) -> list[tuple[int, int]]:
        """Splits a range of samples if it is too large, and returns the parts.

        Otherwise appends the start of the range to `starts`, and returns no parts.
        """
        if high - low == 1 or self._sizes(low, high) <= limit:  # type: ignore[arg-type]
            starts.append(low)
            return []
        common = self._shared[low + 1 : high]
        least = int(common.min())  # the shortest prefix that two neighbours share
        cuts = [low, *(low + 1 + np.flatnonzero(common == least)).tolist(), high]
        parts = list(pairwise(cuts))
        tokens = [int(self._new[end] - self._new[start] + self._shared[start]) for start, end in parts]
        return _joined(parts, tokens, self._pairs, least, limit)


def _joined(
    parts: list[tuple[int, int]], sizes: list[int], pairs: np.ndarray, common: int, limit: int
) -> list[tuple[int, int]]:
    """Joins neighbouring parts to runs of about equal size within the limit.

    Args:
        parts: (first, end) of each part, as positions in the order of samples of `PrefixGroups`.
        sizes: tokens of every part.
        pairs: int64 [samples + 1], number of (row, target) pairs, i.e. predictions, of all samples before each
            position; zeros if samples share predictions.
        common: length of the prefix that all parts share; it counts once in a run.
    """
    to_join = sum(size - common for size in sizes if size <= limit)
    all_pairs = int(pairs[parts[-1][1]] - pairs[parts[0][0]])
    runs_needed = max(1, -(-to_join // max(1, limit - common)), -(-all_pairs // limit))
    enough, enough_pairs = common + -(-to_join // runs_needed), -(-all_pairs // runs_needed)
    joined: list[tuple[int, int]] = []
    run_tokens = 0  # tokens of the current run; 0 means that the next part begins a new run
    for (low, high), size in zip(parts, sizes, strict=True):
        together = run_tokens + size - common
        if run_tokens and together <= limit and pairs[high] - pairs[joined[-1][0]] <= limit:
            joined[-1] = (joined[-1][0], high)
            run_tokens = together
        else:
            joined.append((low, high))
            run_tokens = size
        if run_tokens >= enough and pairs[high] - pairs[joined[-1][0]] >= enough_pairs:
            run_tokens = 0
    return joined
