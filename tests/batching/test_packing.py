"""A pack against plain loops over its samples, and a rank's share against the pack."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slimefsdp.batching.cp_sharding import zigzag_layout
from slimefsdp.batching.packing import PackedBatch, local_share, pack
from slimefsdp.data.rollout_batch import RolloutBatch

TENSORS = ("tokens", "positions", "rows", "targets", "response_index")


@st.composite
def batches(draw: st.DrawFn) -> tuple[RolloutBatch, np.ndarray]:
    """A batch with masks, and some of its samples in some order."""
    samples = []
    for _ in range(draw(st.integers(1, 7))):
        length = draw(st.integers(2, 30))
        response = draw(st.integers(1, length - 1))
        tokens = draw(st.lists(st.integers(0, 5), min_size=length, max_size=length))
        mask = draw(st.lists(st.booleans(), min_size=response, max_size=response))
        samples.append({"tokens": tokens, "response_length": response, "loss_mask": mask})
    samples[0]["loss_mask"][0] = True  # a batch must train on something
    order = draw(st.permutations(range(len(samples))))
    chosen = order[: draw(st.integers(1, len(order)))]
    batch = RolloutBatch.from_samples(samples)
    if draw(st.booleans()):
        count = batch.num_response_tokens
        batch = batch.replace(target_tokens=draw(st.lists(st.integers(0, 5), min_size=count, max_size=count)))
    return batch, np.array(chosen, dtype=np.int64)


def packed_by_hand(batch: RolloutBatch, chosen: Sequence[int], *, trained_only: bool) -> dict[str, list[int]]:
    """The same, as the definition reads: one token after another, over samples as dicts."""
    samples: list[Any] = batch.to_samples()
    result: dict[str, list[int]] = {name: [] for name in (*TENSORS, "cu_seqlens")}
    result["cu_seqlens"].append(0)
    for index in chosen:
        tokens, response = list(samples[index]["tokens"]), samples[index]["response_length"]
        before = sum(sample["response_length"] for sample in samples[:index])
        base = len(result["tokens"])
        for i in range(response):
            if trained_only and not samples[index]["loss_mask"][i]:
                continue
            place = len(tokens) - response + i
            result["rows"].append(base + place - 1)
            result["targets"].append(samples[index].get("target_tokens", tokens[len(tokens) - response :])[i])
            result["response_index"].append(before + i)
        result["tokens"] += tokens
        result["positions"] += range(len(tokens))
        result["cu_seqlens"].append(len(result["tokens"]))
    return {name: [int(value) for value in values] for name, values in result.items()}


def as_lists(packed: PackedBatch) -> dict[str, list[int]]:
    return {name: getattr(packed, name).tolist() for name in TENSORS} | {"cu_seqlens": list(packed.cu_seqlens)}


@given(drawn=batches(), trained_only=st.booleans())
def test_a_pack_is_what_a_plain_loop_makes(drawn: tuple[RolloutBatch, np.ndarray], trained_only: bool) -> None:
    batch, chosen = drawn
    packed = pack(batch, chosen, trained_only=trained_only)
    assert as_lists(packed) == packed_by_hand(batch, chosen.tolist(), trained_only=trained_only)
    assert all(getattr(packed, name).dtype == torch.int64 for name in TENSORS)


@given(drawn=batches(), cp=st.integers(1, 4), trained_only=st.booleans())
def test_the_shares_of_all_ranks_together_are_the_pack(
    drawn: tuple[RolloutBatch, np.ndarray], cp: int, trained_only: bool
) -> None:
    batch, chosen = drawn
    packed = pack(batch, chosen, trained_only=trained_only)
    layout = zigzag_layout(packed.cu_seqlens, cp)
    tokens, positions = torch.full_like(packed.tokens, -1), torch.full_like(packed.positions, -1)
    pairs: list[int] = []
    for rank in range(cp):
        share = local_share(packed, layout, rank)
        owned = [token for piece in layout[rank] for token in range(piece.start, piece.end)]
        tokens[owned], positions[owned] = share.tokens, share.positions
        # a pair goes to the rank that owns its row; its target may be a token of another rank
        assert torch.equal(torch.tensor(owned, dtype=torch.int64)[share.rows], packed.rows[share.pairs])
        assert torch.equal(share.targets, packed.targets[share.pairs])
        pairs += share.pairs.tolist()
    assert torch.equal(tokens, packed.tokens) and torch.equal(positions, packed.positions)
    assert sorted(pairs) == list(range(len(packed.rows)))


def test_masked_tokens_have_no_pair_in_training_and_one_in_log_probs() -> None:
    batch = RolloutBatch.from_samples(
        [{"tokens": [7, 8, 9, 10], "response_length": 3, "loss_mask": [True, False, True]}]
    )
    samples = np.array([0])
    assert pack(batch, samples, trained_only=True).targets.tolist() == [8, 10]
    assert pack(batch, samples, trained_only=False).targets.tolist() == [8, 9, 10]


@pytest.mark.parametrize("trained_only", [True, False])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_no_samples_make_a_dummy_of_one_token_that_predicts_nothing(trained_only: bool, cp: int) -> None:
    batch = RolloutBatch.from_samples([{"tokens": [5, 6], "response_length": 1}])
    packed = pack(batch, np.zeros(0, dtype=np.int64), trained_only=trained_only)
    assert as_lists(packed) == {
        "tokens": [0], "positions": [0], "cu_seqlens": [0, 1], "rows": [], "targets": [], "response_index": [],
    }  # fmt: skip
    shares = [local_share(packed, zigzag_layout(packed.cu_seqlens, cp), rank) for rank in range(cp)]
    assert sum(len(share.tokens) for share in shares) == 1
    assert all(len(share.rows) == len(share.pairs) == len(share.targets) == 0 for share in shares)


def read_only(batch: RolloutBatch) -> RolloutBatch:
    """As Ray's object store hands it over."""
    for name in batch.__slots__:
        value = getattr(batch, name)
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
    return batch


@pytest.mark.parametrize("trained_only", [True, False])
def test_a_read_only_batch_packs_without_a_warning_and_its_pack_may_be_written_to(trained_only: bool) -> None:
    samples = [{"tokens": [5, 6, 0], "response_length": 2}, {"tokens": [3, 4], "response_length": 1}]
    batch = read_only(RolloutBatch.from_samples(samples))
    before = batch.tokens.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns when it is given memory it must not write to
        packed = pack(batch, np.array([0, 1]), trained_only=trained_only)
        share = local_share(packed, zigzag_layout(packed.cu_seqlens, 1), 0)
    for tensor in (share.tokens, share.positions, share.rows, share.targets, packed.response_index):
        tensor.fill_(77)
    assert np.array_equal(batch.tokens, before)
