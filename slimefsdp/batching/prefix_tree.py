"""Finds common prefixes of samples, so that a pack computes them once.

Responses to one prompt, turns of one conversation and forks of one response share prefixes. Prefixes are found by
comparing tokens, not from group ids. Samples are sorted by their tokens, so that each sample is next to those with
which it shares most. For each sample the length of the prefix that it shares with its predecessor is kept. The lengths
determine the number of tokens of any selection of samples, its cost, and the forest of its nodes in a pack.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MIN_SHARED_TOKENS = 16  # a shorter node costs more in additional attention calls than it saves


@dataclass(frozen=True, slots=True)
class Forest:
    """Holds the nodes of a pack: runs of tokens, each of which continues its parent or begins a sample."""

    parents: tuple[int | None, ...]  # the parent of every node; None for a root. A parent comes before its children
    depths: tuple[int, ...]  # number of tokens before every node in its samples


@dataclass(frozen=True, eq=False, slots=True)
class SharedPrefixes:
    """Holds the sorted order of samples, and the length of the prefix that each shares with its predecessor.

    Two samples share as many tokens as the smallest of the lengths between their places in this order.
    """

    place: np.ndarray  # int64 [B], position of every sample in the sorted order
    shared: np.ndarray  # int64 [B] by position, tokens shared with the sample before; 0 at the first

    def among(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sorts a selection of samples; returns it, and the number of tokens that each shares with the sample before.

        Both results are int64 [n].
        """
        samples = samples[np.argsort(self.place[samples])]
        places = self.place[samples]
        shared = np.zeros(len(samples), dtype=np.int64)
        if len(samples) > 1:
            shared[1:] = np.minimum.reduceat(self.shared[: places[-1] + 1], places[:-1] + 1)
        return samples, shared

    def among_each(self, samples: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Applies `among` to several selections at once.

        Args:
            samples: int64, the selections, concatenated.
            sizes: int64, number of samples in each selection. The first sample of a selection shares 0 tokens.
        """
        num_samples = len(self.place)
        sample_at = np.empty(num_samples, dtype=np.int64)
        sample_at[self.place] = np.arange(num_samples)
        selection, places = np.divmod(
            np.sort(np.repeat(np.arange(len(sizes)), sizes) * num_samples + self.place[samples]), num_samples
        )
        shared = np.zeros(len(places), dtype=np.int64)
        follows = np.flatnonzero(selection[1:] == selection[:-1]) + 1
        shared[follows] = _least_of_ranges(self.shared, places[follows - 1] + 1, places[follows] + 1)
        return sample_at[places], shared

    def tokens(self, lengths: np.ndarray, samples: np.ndarray) -> int:
        """Returns the number of tokens that a pack of these samples computes.

        Args:
            lengths: int64 [B], tokens per sample of the batch.
        """
        return int(lengths[samples].sum() - self.among(samples)[1].sum())

    def fit(self, tokens: np.ndarray, lengths: np.ndarray, experts: np.ndarray | None = None) -> bool:
        """Returns whether the samples of a batch really share these prefixes.

        Args:
            tokens, lengths, experts: see `find_prefixes`.
        """
        num_samples = len(lengths)
        if not len(self.place) == len(self.shared) == num_samples:
            return False
        if not np.array_equal(np.sort(self.place), np.arange(num_samples)):
            return False
        order = np.argsort(self.place)
        limit = np.minimum(lengths[order], np.concatenate([[0], lengths[order][:-1]]))
        if (self.shared < 0).any() or (self.shared > limit).any():
            return False
        starts = (np.cumsum(lengths) - lengths)[order]
        following = np.flatnonzero(self.shared)
        return all(
            np.array_equal(
                values[starts[position] : starts[position] + self.shared[position]],
                values[starts[position - 1] : starts[position - 1] + self.shared[position]],
            )
            for position in following.tolist()
            for values in (tokens, experts)
            if values is not None
        )


def find_prefixes(
    tokens: np.ndarray,
    lengths: np.ndarray,
    least: int = MIN_SHARED_TOKENS,
    experts: np.ndarray | None = None,
) -> SharedPrefixes | None:
    """Returns the prefixes that a batch's samples share; None if there are none.

    Args:
        tokens: int64 [T], all samples, concatenated.
        lengths: int64 [B], tokens per sample.
        least: the smallest number of tokens of a shared node.
        experts: [T, ...], values that must be equal too for tokens to be shared; None means that there are none.
    """
    starts = np.cumsum(lengths) - lengths
    related = _begin_alike(tokens, starts, lengths, least)
    if len(related) == 0:
        return None
    related, common = _sorted_by_tokens(tokens, starts, lengths, related)
    if experts is not None:
        for place in np.flatnonzero(common).tolist():
            count = int(common[place])
            own, before = (experts[start : start + count] for start in starts[related[[place, place - 1]]])
            differs = (own != before).reshape(count, -1).any(1)
            common[place] = np.argmax(differs) if differs.any() else count
    shared = np.zeros(len(lengths), dtype=np.int64)
    shared[: len(related)] = _thinned(common, least)
    is_other = np.ones(len(lengths), dtype=bool)
    is_other[related] = False
    position = np.empty(len(lengths), dtype=np.int64)
    position[np.concatenate([related, np.flatnonzero(is_other)])] = np.arange(len(lengths))
    return SharedPrefixes(position, shared) if shared.any() else None


def forest_of(lengths: np.ndarray, shared: np.ndarray) -> tuple[Forest, np.ndarray, np.ndarray, np.ndarray]:
    """Builds the forest of a pack's samples.

    Args:
        lengths, shared: int64 [n], tokens of each sample, and tokens that it shares with the sample before. Samples are
            in the order of `SharedPrefixes.among`.

    Returns:
        The forest; for every node the sample (0 to n - 1) to read its tokens from; the length of every node; and for
        every sample its last node. Nodes are in the order of their tokens in the pack.
    """
    # of every node: the first sample that contains it, where it starts and ends in that sample, and its parent
    first: list[int] = []
    start: list[int] = []
    end: list[int] = []
    parent: list[int | None] = []
    last_node: list[int] = []
    path: list[int] = []  # nodes of the previous sample, root first

    def add(sample: int, begin: int, until: int, above: int | None) -> int:
        first.append(sample)
        start.append(begin)
        end.append(until)
        parent.append(above)
        return len(first) - 1

    for sample, (length, common) in enumerate(zip(lengths.tolist(), shared.tolist(), strict=True)):
        while path and start[path[-1]] >= common:
            path.pop()
        if path and end[path[-1]] > common:  # the samples diverge within this node: its upper part becomes a new node
            lower = path.pop()
            upper = add(first[lower], start[lower], common, parent[lower])
            start[lower], parent[lower] = common, upper
            path.append(upper)
        if length > common:
            path.append(add(sample, common, length, path[-1] if path else None))
        last_node.append(path[-1])
    order = sorted(range(len(first)), key=lambda node: (first[node], start[node]))  # a parent comes before its children
    number = {node: position for position, node in enumerate(order)}
    parents = [parent[node] for node in order]
    forest = Forest(
        parents=tuple(None if above is None else number[above] for above in parents),
        depths=tuple(start[node] for node in order),
    )
    source_sample = np.array([first[node] for node in order])
    sizes = np.array([end[node] - start[node] for node in order])
    return forest, source_sample, sizes, np.array([number[node] for node in last_node])


def _begin_alike(tokens: np.ndarray, starts: np.ndarray, lengths: np.ndarray, least: int) -> np.ndarray:
    """Returns the samples whose first `least` tokens equal those of another sample; ascending indices."""
    long_enough = np.flatnonzero(lengths >= least)
    # samples are compared by a hash; collisions are harmless, because tokens are compared later
    factors = np.uint64(0x9E3779B97F4A7C15) ** np.arange(1, least + 1, dtype=np.uint64)
    hashes = np.zeros(len(long_enough), dtype=np.uint64)
    for offset, factor in enumerate(factors):
        hashes += tokens[starts[long_enough] + offset].astype(np.uint64) * factor
    _, kind, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    return long_enough[counts[kind] > 1]


def _sorted_by_tokens(
    tokens: np.ndarray, starts: np.ndarray, lengths: np.ndarray, samples: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Sorts samples by their tokens, stably; returns them and the length of the prefix shared with the sample before.

    A block is a run of samples that are equal so far. Every round looks a few tokens further in all blocks at once. A
    block is sorted by the first token in which its samples differ, and splits into smaller blocks. A block of one
    sample is finished.
    """
    ordered, common = samples.copy(), np.zeros(len(samples), dtype=np.int64)
    positions = np.arange(len(samples))  # positions in unfinished blocks, block by block
    # of every block: its number of samples, and the tokens in which they are known to be equal
    sizes, depth = np.array([len(samples)]), np.zeros(1, dtype=np.int64)
    while len(positions):
        block = np.repeat(np.arange(len(sizes)), sizes)
        samples_at = ordered[positions]
        ahead = _window(tokens, starts[samples_at] + depth[block], lengths[samples_at] - depth[block])
        follows = np.concatenate([[False], block[1:] == block[:-1]])
        # where each sample first differs from the sample before, or the end of the window
        column = np.full(len(positions), _WINDOW - 1)
        differs = ahead[1:] != ahead[:-1]
        differing = np.flatnonzero(follows[1:] & differs.any(axis=1))
        column[differing + 1] = differs[differing].argmax(axis=1)
        column = np.minimum.reduceat(column, np.cumsum(sizes) - sizes)
        token = ahead[np.arange(len(positions)), column[block]]
        order = np.lexsort((token, block))
        ordered[positions], token = samples_at[order], token[order]  # samples move within their block only
        depth = depth + column
        begins = ~follows | np.concatenate([[True], token[1:] != token[:-1]])
        differing = np.flatnonzero(begins & follows)
        common[positions[differing]] = depth[block[differing]]
        ends = ~begins & (token < 0)  # equal to the sample before up to the last token
        common[positions[ends]] = lengths[ordered[positions[ends]]]
        new_block = np.cumsum(begins) - 1
        is_unfinished = (np.bincount(new_block) > 1) & (token[begins] >= 0)
        depth = depth[block[begins]][is_unfinished] + 1
        positions = positions[is_unfinished[new_block]]
        sizes = np.bincount(new_block)[is_unfinished]
    return ordered, common


_WINDOW = 32  # tokens that a round looks ahead


def _window(tokens: np.ndarray, starts: np.ndarray, remaining: np.ndarray) -> np.ndarray:
    """Returns the next tokens of samples, and -1 after their ends; int64 [samples, window].

    Args:
        remaining: number of tokens of each sample from its start on.
    """
    columns = np.arange(_WINDOW)
    ahead = np.take(tokens, starts[:, None] + columns, mode="clip")
    short = np.flatnonzero(remaining < _WINDOW)
    ahead[short] = np.where(columns < remaining[short, None], ahead[short], -1)
    return ahead


def _least_of_ranges(values: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Returns the minimum of values[low:high] for many non-empty ranges, in O(n log n).

    The minimum of every run of 1, 2, 4, ... values is computed (a sparse table); a range is the union of two runs.
    """
    minima = np.empty(len(low), dtype=values.dtype)
    level = np.frexp(high - low)[1] - 1  # the longest run that fits: 2**level <= high - low
    runs = values
    for exponent in range(int(level.max(initial=-1)) + 1):
        ranges = np.flatnonzero(level == exponent)
        minima[ranges] = np.minimum(runs[low[ranges]], runs[high[ranges] - 2**exponent])
        runs = np.minimum(runs[: -(2**exponent)], runs[2**exponent :])
    return minima


def _thinned(common: np.ndarray, least: int) -> np.ndarray:
    """Shortens shared prefixes so that no shared node has fewer than `least` tokens.

    Args:
        common: int64 [n], tokens that each of the sorted samples shares with the sample before; 0 at the first.
    """
    # a Cartesian tree: the smallest number of a range splits the range, and is the parent of the parts' smallest ones
    numbers = common.tolist()
    above: list[int] = [-1] * len(numbers)
    open_nodes: list[int] = []
    for position in range(1, len(numbers)):
        below = -1
        while open_nodes and numbers[open_nodes[-1]] > numbers[position]:
            below = open_nodes.pop()
        if below >= 0:
            above[below] = position
        if open_nodes:
            above[position] = open_nodes[-1]
        open_nodes.append(position)
    thinned = [0] * len(numbers)
    # a child's number is not smaller than its parent's, and among equal numbers the earlier is the parent
    for position in np.argsort(common, kind="stable").tolist():
        if position == 0:
            continue
        depth = thinned[above[position]] if above[position] >= 0 else 0
        thinned[position] = numbers[position] if numbers[position] - depth >= least else depth
    return np.array(thinned, dtype=common.dtype)
