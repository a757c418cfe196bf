"""What samples share, checked against comparing every pair of them, and the forest of a pack against its samples."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slimefsdp.batching.packing import PackedBatch, pack
from slimefsdp.batching.prefix_tree import SharedPrefixes, find_prefixes
from slimefsdp.data.rollout_batch import RolloutBatch
from tests.support.tiers import examples


@st.composite
def related_samples(draw) -> list[tuple[list[int], int, list[bool]]]:
    """(tokens, response length, mask of the response): many begin alike, some are equal or prefixes of others."""
    runs = st.lists(st.integers(0, 2), min_size=1, max_size=12)
    bases = draw(st.lists(runs, min_size=1, max_size=3))
    samples: list[list[int]] = []
    for _ in range(draw(st.integers(2, 9))):
        if samples and draw(st.booleans()):
            before = draw(st.sampled_from(samples))
            start = before[: draw(st.integers(1, len(before)))]
        else:
            start = draw(st.sampled_from(bases))
        tokens = start + draw(st.lists(st.integers(0, 2), max_size=10))
        samples.append(tokens if len(tokens) > 1 else [*tokens, 1])
    responses = [draw(st.integers(1, len(tokens) - 1)) for tokens in samples]
    masks = [draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in responses]
    masks[0][0] = True  # a batch in which nothing trains is refused
    return list(zip(samples, responses, masks, strict=True))


def batch_of(samples: list[tuple[list[int], int, list[bool]]]) -> RolloutBatch:
    return RolloutBatch.from_samples(
        [{"tokens": t, "response_length": r, "loss_mask": m, "reward": 0.0, "group_id": 0} for t, r, m in samples]
    )


def common(one: np.ndarray, other: np.ndarray) -> int:
    both = min(len(one), len(other))
    return next((i for i in range(both) if one[i] != other[i]), both)


def tokens_of(batch: RolloutBatch, sample: int) -> np.ndarray:
    start = batch.token_offsets[sample]
    return batch.tokens[start : start + batch.lengths[sample]]


@given(related_samples())
@examples(200)
def test_with_nodes_of_any_length_all_is_shared_that_two_samples_have_in_common(samples):
    batch = batch_of(samples)
    shared = find_prefixes(batch.tokens, batch.lengths, least=1)
    for one in range(batch.num_samples):
        for other in range(one + 1, batch.num_samples):
            expected = common(tokens_of(batch, one), tokens_of(batch, other))
            found = 0 if shared is None else shared.among(np.array([one, other]))[1][1]
            assert found == expected


@given(related_samples(), st.data())
@examples(200)
def test_several_choices_are_looked_up_as_each_of_them_is(samples, data):
    batch = batch_of(samples)
    shared = find_prefixes(batch.tokens, batch.lengths, least=1)
    if shared is None:
        return
    some = st.lists(st.sampled_from(range(batch.num_samples)), unique=True, max_size=batch.num_samples)
    choices = [np.array(one, dtype=np.int64) for one in data.draw(st.lists(some, min_size=1, max_size=4))]
    found = shared.among_each(np.concatenate(choices), np.array(list(map(len, choices))))
    each = [shared.among(choice) for choice in choices if len(choice)]
    for column in (0, 1):
        assert found[column].tolist() == [number for one in each for number in one[column].tolist()]


@given(related_samples())
@examples(200)
def test_samples_are_ordered_by_their_tokens_and_equal_ones_stay_as_they_were(samples):
    batch = batch_of(samples)
    shared = find_prefixes(batch.tokens, batch.lengths, least=1)
    if shared is None:
        return
    alone = [
        all(
            common(tokens_of(batch, one), tokens_of(batch, other)) == 0
            for other in range(batch.num_samples)
            if other != one
        )
        for one in range(batch.num_samples)
    ]
    by_tokens = sorted(
        range(batch.num_samples), key=lambda one: (alone[one], [] if alone[one] else tokens_of(batch, one).tolist())
    )
    assert np.argsort(shared.place).tolist() == by_tokens


@given(related_samples(), st.integers(2, 6), st.randoms())
@examples(200)
def test_no_shared_node_is_shorter_than_asked(samples, least, random):
    batch = batch_of(samples)
    shared = find_prefixes(batch.tokens, batch.lengths, least)
    if shared is None:
        return
    assert shared.fit(batch.tokens, batch.lengths)
    chosen = np.array(random.sample(range(batch.num_samples), random.randint(1, batch.num_samples)))
    packed = pack(batch, chosen, trained_only=False, shared=shared)
    assert len(packed.tokens) == shared.tokens(batch.lengths, chosen)
    if packed.forest is not None:
        for node in set(packed.forest.parents) - {None}:
            assert packed.cu_seqlens[node + 1] - packed.cu_seqlens[node] >= least


@given(related_samples(), st.integers(1, 6), st.booleans(), st.booleans(), st.randoms())
@examples(300)
def test_every_predicted_token_of_a_forest_is_predicted_from_its_own_sample(
    samples, least, trained_only, has_targets, random
):
    batch = batch_of(samples)
    if has_targets:
        batch = batch.replace(target_tokens=[random.randint(0, 3) for _ in range(batch.num_response_tokens)])
    shared = find_prefixes(batch.tokens, batch.lengths, least)
    if shared is None:
        return
    chosen = np.array(random.sample(range(batch.num_samples), random.randint(1, batch.num_samples)))
    packed = pack(batch, chosen, trained_only=trained_only, shared=shared)
    paths = rows_of_paths(packed)
    pairs = torch.arange(len(packed.rows)) if packed.fan_out is None else packed.fan_out
    for pair, response in zip(pairs.tolist(), packed.response_index.tolist(), strict=True):
        sample = int(batch.sample_ids[response])
        place = int(batch.lengths[sample] - batch.response_lengths[sample] + response - batch.response_offsets[sample])
        seen = [row for row in paths[int(packed.rows[pair])] if row <= packed.rows[pair]]
        assert packed.tokens[seen].tolist() == tokens_of(batch, sample)[:place].tolist()
        assert packed.positions[seen].tolist() == list(range(place))
        wanted = batch.target_tokens[response] if has_targets else tokens_of(batch, sample)[place]
        assert packed.targets[pair] == wanted
    if has_targets:  # what several samples ask of one row is one pair
        of_pairs = list(zip(packed.rows.tolist(), packed.targets.tolist(), strict=True))
        assert len(set(of_pairs)) == len(of_pairs)
    wanted = np.isin(batch.sample_ids, chosen) & (batch.mask if trained_only else True)
    assert sorted(packed.response_index.tolist()) == np.flatnonzero(wanted).tolist()


def rows_of_paths(packed: PackedBatch) -> dict[int, list[int]]:
    """Of every row: the rows of its node and of the nodes above, in the order of the tokens."""
    nodes = range(len(packed.cu_seqlens) - 1)
    parents = packed.forest.parents if packed.forest is not None else [None] * len(nodes)
    paths: list[list[int]] = []
    for node in nodes:
        parent = parents[node]
        above = [] if parent is None else paths[parent]
        paths.append([*above, *range(packed.cu_seqlens[node], packed.cu_seqlens[node + 1])])
    return {row: paths[node] for node in nodes for row in range(packed.cu_seqlens[node], packed.cu_seqlens[node + 1])}


def test_responses_that_all_samples_begin_with_are_computed_once_and_scored_for_each():
    same = ([5] * 20 + [1, 2, 3], 3, [True] * 3)
    batch = batch_of([same, same, ([5] * 20 + [1, 2, 4], 3, [True] * 3)])
    packed = pack(batch, np.arange(3), trained_only=True, shared=find_prefixes(batch.tokens, batch.lengths, least=1))
    assert len(packed.tokens) == 24 and len(packed.rows) == 4  # 1, 2 once; 3 once for both; 4
    assert packed.fan_out is not None and len(packed.fan_out) == 9


@pytest.mark.parametrize("change", ["shared", "negative", "place", "length"])
def test_what_samples_do_not_share_is_found_out(change):
    tokens, lengths = np.array([1, 2, 3, 1, 2, 4, 9, 9]), np.array([3, 3, 2])
    found = find_prefixes(tokens, lengths, least=1)
    assert found is not None and found.fit(tokens, lengths)
    place, shared = found.place.copy(), found.shared.copy()
    if change == "shared":
        shared[shared.argmax()] += 1
    if change == "negative":
        shared[-1] = -1
    if change == "place":
        place[0] = place[2]
    if change == "length":
        shared = shared[:-1]
    assert not SharedPrefixes(place, shared).fit(tokens, lengths)
