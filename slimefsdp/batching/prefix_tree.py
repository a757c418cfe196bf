"""Finds common prefixes of samples, so that a pack computes them once.

Responses to one prompt, turns of one conversation and forks of one response begin alike. Sorted by their tokens,
samples stand next to those they share most with, and one number per sample says it all: how many tokens it has in
common with the one before. From these numbers follow how many tokens any choice of samples takes, what it costs, and
the forest of nodes that a pack of them is. It is found by comparing tokens: nobody says which samples belong together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MIN_SHARED_TOKENS = 16  # a node of fewer tokens costs more in further attention calls than it saves


@dataclass(frozen=True, slots=True)
class Forest:
    """The nodes of a pack: runs of tokens, each of which continues another node or begins a sample."""

    parents: tuple[int | None, ...]  # of every node, the one it goes on from; parents come before children
    depths: tuple[int, ...]  # tokens above every node in its samples


@dataclass(frozen=True, eq=False, slots=True)
class SharedPrefixes:
    """Samples in the order of their tokens, and how many tokens each shares with the one before.

    What is shared ends at the same few depths for all samples, so what two of them have in common is the least of the
    numbers between their places.
    """

    place: np.ndarray  # int64 [B], of every sample in that order
    shared: np.ndarray  # int64 [B], by place: tokens in common with the place before; 0 at the first

    def among(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns some samples in the order of their tokens, and how many tokens each shares with the one before, int64
        [n].
        """
        samples = samples[np.argsort(self.place[samples])]
        places = self.place[samples]
        shared = np.zeros(len(samples), dtype=np.int64)
        if len(samples) > 1:
            shared[1:] = np.minimum.reduceat(self.shared[: places[-1] + 1], places[:-1] + 1)
        return samples, shared

    def among_each(self, samples: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Applies `among` to several concatenated selections, `sizes` of each; the first sample of each shares 0."""
        num_samples = len(self.place)
        at = np.empty(num_samples, dtype=np.int64)
        at[self.place] = np.arange(num_samples)
        choice, places = np.divmod(
            np.sort(np.repeat(np.arange(len(sizes)), sizes) * num_samples + self.place[samples]), num_samples
        )
        shared = np.zeros(len(places), dtype=np.int64)
        follows = np.flatnonzero(choice[1:] == choice[:-1]) + 1
        shared[follows] = _least_of_ranges(self.shared, places[follows - 1] + 1, places[follows] + 1)
        return at[places], shared

    def tokens(self, lengths: np.ndarray, samples: np.ndarray) -> int:
        """Returns the tokens to compute for these samples together.

        Args:
            lengths: int64 [B], tokens per sample of the batch.
        """
        return int(lengths[samples].sum() - self.among(samples)[1].sum())

    def fit(self, tokens: np.ndarray, lengths: np.ndarray) -> bool:
        """Returns whether these samples really share these prefixes."""
        num_samples = len(lengths)
        if not len(self.place) == len(self.shared) == num_samples:
            return False
        if not np.array_equal(np.sort(self.place), np.arange(num_samples)):
            return False
        order = np.argsort(self.place)
        most = np.minimum(lengths[order], np.concatenate([[0], lengths[order][:-1]]))
        if (self.shared < 0).any() or (self.shared > most).any():
            return False
        starts = (np.cumsum(lengths) - lengths)[order]
        following = np.flatnonzero(self.shared)
        return all(
            np.array_equal(
                tokens[starts[at] : starts[at] + self.shared[at]],
                tokens[starts[at - 1] : starts[at - 1] + self.shared[at]],
            )
            for at in following.tolist()
        )


def find_prefixes(tokens: np.ndarray, lengths: np.ndarray, least: int = MIN_SHARED_TOKENS) -> SharedPrefixes | None:
    """Returns the prefixes that a batch's samples share; None if there are none.

    Args:
        tokens: int64 [T], all samples end to end.
        lengths: int64 [B], tokens per sample.
        least: a run of tokens is a node of its own from this length on.
    """
    starts = np.cumsum(lengths) - lengths
    related = _begin_alike(tokens, starts, lengths, least)
    if len(related) == 0:
        return None
    related, common = _sorted_by_tokens(tokens, starts, lengths, related)
    shared = np.zeros(len(lengths), dtype=np.int64)
    shared[: len(related)] = _thinned(common, least)
    is_other = np.ones(len(lengths), dtype=bool)
    is_other[related] = False
    place = np.empty(len(lengths), dtype=np.int64)
    place[np.concatenate([related, np.flatnonzero(is_other)])] = np.arange(len(lengths))
    return SharedPrefixes(place, shared) if shared.any() else None


def forest_of(lengths: np.ndarray, shared: np.ndarray) -> tuple[Forest, np.ndarray, np.ndarray, np.ndarray]:
    """Returns the nodes of a pack, in the order of their tokens in it.

    Args:
        lengths, shared: int64 [n], of the pack's samples in the order of `SharedPrefixes.among`.

    Returns:
        The forest; of every node the sample (0 to n - 1) that its tokens are read from, and its length; of every
        sample the node that it ends in.
    """
    first: list[int] = []  # of every node: the sample that made it, where it begins in it and ends, its parent
    start: list[int] = []
    end: list[int] = []
    parent: list[int | None] = []
    last_node: list[int] = []
    path: list[int] = []  # of the sample before, root first

    def add(sample: int, begin: int, until: int, above: int | None) -> int:
        first.append(sample)
        start.append(begin)
        end.append(until)
        parent.append(above)
        return len(first) - 1

    for sample, (length, common) in enumerate(zip(lengths.tolist(), shared.tolist(), strict=True)):
        while path and start[path[-1]] >= common:
            path.pop()
        if path and end[path[-1]] > common:  # the samples part within this node: its upper half becomes their parent
            lower = path.pop()
            upper = add(first[lower], start[lower], common, parent[lower])
            start[lower], parent[lower] = common, upper
            path.append(upper)
        if length > common:
            path.append(add(sample, common, length, path[-1] if path else None))
        last_node.append(path[-1])
    order = sorted(range(len(first)), key=lambda node: (first[node], start[node]))  # a parent comes before its children
    number = {node: at for at, node in enumerate(order)}
    parents = [parent[node] for node in order]
    forest = Forest(
        parents=tuple(None if above is None else number[above] for above in parents),
        depths=tuple(start[node] for node in order),
    )
    made_by = np.array([first[node] for node in order])
    sizes = np.array([end[node] - start[node] for node in order])
    return forest, made_by, sizes, np.array([number[node] for node in last_node])


def _begin_alike(tokens: np.ndarray, starts: np.ndarray, lengths: np.ndarray, least: int) -> np.ndarray:
    """Returns the samples whose first `least` tokens another sample has, too; ascending indices."""
    long_enough = np.flatnonzero(lengths >= least)
    # by a hash: two that have it in common by chance are told apart when they are compared
    factors = np.uint64(0x9E3779B97F4A7C15) ** np.arange(1, least + 1, dtype=np.uint64)
    hashes = np.zeros(len(long_enough), dtype=np.uint64)
    for offset, factor in enumerate(factors):
        hashes += tokens[starts[long_enough] + offset].astype(np.uint64) * factor
    _, kind, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    return long_enough[counts[kind] > 1]


def _sorted_by_tokens(
    tokens: np.ndarray, starts: np.ndarray, lengths: np.ndarray, samples: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns samples in the order of their tokens, stable for equal ones, and the common prefix of each with the one
    before.

    Samples that are alike so far are a block. All blocks are looked at together, a few tokens further in every round:
    where its samples part, a block is sorted by that token and falls into smaller ones; a sample alone is in its place.
    """
    ordered, common = samples.copy(), np.zeros(len(samples), dtype=np.int64)
    at = np.arange(len(samples))  # places whose sample is not known yet, block by block
    sizes, depth = np.array([len(samples)]), np.zeros(1, dtype=np.int64)  # of every block, and tokens that it shares
    while len(at):
        block = np.repeat(np.arange(len(sizes)), sizes)
        one = ordered[at]
        ahead = _window(tokens, starts[one] + depth[block], lengths[one] - depth[block])
        follows = np.concatenate([[False], block[1:] == block[:-1]])
        column = np.full(len(at), _WINDOW - 1)  # where a sample parts from the one before, or the window ends
        differs = ahead[1:] != ahead[:-1]
        parts = np.flatnonzero(follows[1:] & differs.any(axis=1))
        column[parts + 1] = differs[parts].argmax(axis=1)
        column = np.minimum.reduceat(column, np.cumsum(sizes) - sizes)
        token = ahead[np.arange(len(at)), column[block]]
        order = np.lexsort((token, block))
        ordered[at], token = one[order], token[order]  # sorting moves samples within their block alone
        depth = depth + column
        begins = ~follows | np.concatenate([[True], token[1:] != token[:-1]])
        parts = np.flatnonzero(begins & follows)
        common[at[parts]] = depth[block[parts]]
        ends = ~begins & (token < 0)  # equal to the last token
        common[at[ends]] = lengths[ordered[at[ends]]]
        new_block = np.cumsum(begins) - 1
        goes_on = (np.bincount(new_block) > 1) & (token[begins] >= 0)
        depth = depth[block[begins]][goes_on] + 1
        at = at[goes_on[new_block]]
        sizes = np.bincount(new_block)[goes_on]
    return ordered, common


_WINDOW = 32  # tokens that a round looks ahead


def _window(tokens: np.ndarray, starts: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Returns the next tokens of samples, and -1 after their ends; int64 [samples, window].

    Args:
        left: of each sample, its tokens from its start on.
    """
    columns = np.arange(_WINDOW)
    ahead = np.take(tokens, starts[:, None] + columns, mode="clip")
    short = np.flatnonzero(left < _WINDOW)
    ahead[short] = np.where(columns < left[short, None], ahead[short], -1)
    return ahead


def _least_of_ranges(values: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Returns the minimum of values[low:high] for many non-empty ranges.

    From the least of every run of 1, 2, 4... values: two runs that overlap make a range. n log n whatever the ranges.
    """
    found = np.empty(len(low), dtype=values.dtype)
    level = np.frexp(high - low)[1] - 1  # of the longest run that fits: 2**level <= high - low
    runs = values
    for exponent in range(int(level.max(initial=-1)) + 1):
        here = np.flatnonzero(level == exponent)
        found[here] = np.minimum(runs[low[here]], runs[high[here] - 2**exponent])
        runs = np.minimum(runs[: -(2**exponent)], runs[2**exponent :])
    return found


def _thinned(common: np.ndarray, least: int) -> np.ndarray:
    """Shortens shared prefixes so that no shared node has fewer than `least` tokens.

    Args:
        common: int64 [n], tokens that each of the sorted samples has in common with the one before; 0 at the first.
    """
    # The least number of a range parts its samples first: those parts lie below it, and so on (a Cartesian tree).
    numbers = common.tolist()
    above: list[int] = [-1] * len(numbers)
    open_: list[int] = []
    for at in range(1, len(numbers)):
        below = -1
        while open_ and numbers[open_[-1]] > numbers[at]:
            below = open_.pop()
        if below >= 0:
            above[below] = at
        if open_:
            above[at] = open_[-1]
        open_.append(at)
    thinned = [0] * len(numbers)
    # a number below another is no smaller, and among equal ones the earlier is above
    for at in np.argsort(common, kind="stable").tolist():
        if at == 0:
            continue
        depth = thinned[above[at]] if above[at] >= 0 else 0
        thinned[at] = numbers[at] if numbers[at] - depth >= least else depth
    return np.array(thinned, dtype=common.dtype)
