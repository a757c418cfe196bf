"""What samples have in common at their beginning, so that a pack computes it once.

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
    """How the nodes of a pack hang together: runs of tokens, each going on from another or beginning a sample."""

    parents: tuple[int | None, ...]  # of every node, the one it goes on from; parents come before children
    depths: tuple[int, ...]  # tokens above every node in its samples


@dataclass(frozen=True, eq=False, slots=True)
class SharedPrefixes:
    """Samples in the order of their tokens, and what each shares with the one before.

    What is shared ends at the same few depths for all samples, so what two of them have in common is the least of the
    numbers between their places.
    """

    place: np.ndarray  # int64 [B], of every sample in that order
    shared: np.ndarray  # int64 [B], by place: tokens in common with the place before; 0 at the first

    def among(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Some samples in the order of their tokens, and what each shares with the one before of them, int64 [n]."""
        samples = samples[np.argsort(self.place[samples])]
        places = self.place[samples]
        shared = np.zeros(len(samples), dtype=np.int64)
        if len(samples) > 1:
            shared[1:] = np.minimum.reduceat(self.shared[: places[-1] + 1], places[:-1] + 1)
        return samples, shared

    def tokens(self, lengths: np.ndarray, samples: np.ndarray) -> int:
        """Tokens to compute for these samples, together.

        Args:
            lengths: int64 [B], tokens per sample of the batch.
        """
        return int(lengths[samples].sum() - self.among(samples)[1].sum())

    def fit(self, tokens: np.ndarray, lengths: np.ndarray) -> bool:
        """Whether these samples do begin with what they are said to share."""
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
    """What a batch's samples share; None where nobody shares anything.

    Args:
        tokens: int64 [T], all samples end to end.
        lengths: int64 [B], tokens per sample.
        least: a run of tokens is a node of its own from this length on.
    """
    starts = np.cumsum(lengths) - lengths
    related = _begin_alike(tokens, starts, lengths, least)
    if len(related) == 0:
        return None
    # bytes compare like the numbers they hold where the most significant one comes first
    comparable = {int(i): tokens[starts[i] : starts[i] + lengths[i]].astype(">u4").tobytes() for i in related}
    related = np.array(sorted(comparable, key=comparable.__getitem__))
    common = np.zeros(len(related), dtype=np.int64)
    for at in range(1, len(related)):
        one, other = related[at - 1], related[at]
        both = min(lengths[one], lengths[other])
        differ = tokens[starts[one] : starts[one] + both] != tokens[starts[other] : starts[other] + both]
        common[at] = differ.argmax() if differ.any() else both
    shared = np.zeros(len(lengths), dtype=np.int64)
    shared[: len(related)] = _thinned(common, least)
    others = np.setdiff1d(np.arange(len(lengths)), related)
    place = np.empty(len(lengths), dtype=np.int64)
    place[np.concatenate([related, others])] = np.arange(len(lengths))
    return SharedPrefixes(place, shared) if shared.any() else None


def forest_of(lengths: np.ndarray, shared: np.ndarray) -> tuple[Forest, np.ndarray, np.ndarray, np.ndarray]:
    """The nodes of a pack, in the order in which they lie in it.

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
    """The samples whose first `least` tokens another sample begins with, too; ascending indices."""
    long_enough = np.flatnonzero(lengths >= least)
    # by a hash: two that have it in common by chance are told apart when they are compared
    factors = np.uint64(0x9E3779B97F4A7C15) ** np.arange(1, least + 1, dtype=np.uint64)
    hashes = np.zeros(len(long_enough), dtype=np.uint64)
    for offset, factor in enumerate(factors):
        hashes += tokens[starts[long_enough] + offset].astype(np.uint64) * factor
    _, kind, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    return long_enough[counts[kind] > 1]


def _thinned(common: np.ndarray, least: int) -> np.ndarray:
    """What neighbours share, cut down so that no node that is shared has fewer than `least` tokens.

    Args:
        common: int64 [n], tokens that each of the sorted samples has in common with the one before; 0 at the first.
    """
    # The least number of a range parts its samples first: those parts lie below it, and so on (a Cartesian tree).
    above: list[int] = [-1] * len(common)
    open_: list[int] = []
    for at in range(1, len(common)):
        below = -1
        while open_ and common[open_[-1]] > common[at]:
            below = open_.pop()
        if below >= 0:
            above[below] = at
        if open_:
            above[at] = open_[-1]
        open_.append(at)
    thinned = np.zeros_like(common)
    # a number below another is no smaller, and among equal ones the earlier is above
    for at in np.lexsort((np.arange(len(common)), common)).tolist():
        if at == 0:
            continue
        depth = thinned[above[at]] if above[at] >= 0 else 0
        thinned[at] = common[at] if common[at] - depth >= least else depth
    return thinned
