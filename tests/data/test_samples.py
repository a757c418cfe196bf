"""Samples and slime's dict become a batch with the same content, and one that does not fit is named."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError
from tests.support.refusals import refused
from tests.support.rollouts import as_lists, sample_lists


@given(sample_lists())
def test_samples_come_back_as_they_went_in(samples):
    batch = RolloutBatch.from_samples(samples)
    assert as_lists(batch.to_samples()) == samples
    assert RolloutBatch.from_samples(batch.to_samples()).same_as(batch)
    assert RolloutBatch.from_samples([SimpleNamespace(**s, status="done") for s in samples]).same_as(batch)


def test_none_counts_as_absent_and_a_mask_may_be_zeros_and_ones():
    sample = {"tokens": [1, 2, 3], "response_length": 2, "reward": None, "loss_mask": [0, 1]}
    batch = RolloutBatch.from_samples([sample, sample])
    assert batch.rewards is None and batch.mask.tolist() == [False, True, False, True]


@pytest.mark.parametrize(
    ("change", "field", "values"),
    [
        ({"reward": None}, "rewards", ["sample 1", "reward"]),
        ({"loss_mask": None}, "loss_mask", ["sample 1", "loss_mask"]),
        ({"tokens": None}, "tokens", ["sample 1", "tokens"]),
        ({"response_length": None}, "response_lengths", ["sample 1", "response_length"]),
        ({"loss_mask": [1]}, "loss_mask", ["sample 1", 1, 2]),
        ({"loss_mask": [1, 3]}, "loss_mask", ["sample 1, entry 1", 3]),
        ({"tokens": [1, 2.5, 3]}, "tokens", ["sample 1", "float64"]),
        ({"tokens": np.array([1, 2, 2**63], dtype=np.uint64)}, "tokens", ["sample 1, entry 2", 2**63]),
        ({"reward": {"score": 1}}, "rewards", ["sample 1", "reward", "score"]),
        ({"reward": [1.0, 2.0]}, "rewards", ["sample 1", "reward", (1, 2)]),
        ({"response_length": 2.0}, "response_lengths", ["sample 1", "response_length", "float64"]),
        ({"response_length": 999}, "response_lengths", ["sample 1", 999, "3 tokens"]),
        ({"response_length": 3}, "response_lengths", ["sample 1", "3 tokens"]),
        ({"rewards": 1.0}, "rewards", ["sample 1", "'rewards'"]),
        ({"logprobs": [0.0]}, "logprobs", ["sample 1", "'logprobs'"]),
    ],
)
def test_a_sample_that_does_not_fit_is_named(change, field, values):
    good = {"tokens": [1, 2, 3], "response_length": 2, "reward": 1, "loss_mask": [1, 1]}
    with refused(BatchError, field, *values):
        RolloutBatch.from_samples([good, {**good, **change}, {**good, **change}])


def slime_dict(**changes: Any) -> dict[str, Any]:
    """Two prompts of two samples, as slime's RolloutManager hands them on: normalised rewards beside raw ones."""
    return {
        "tokens": [[1, 2, 3], [1, 2, 4, 0], [5, 6, 7], [5, 8]],
        "response_lengths": [1, 2, 2, 1],
        "rewards": [-0.7, 0.7, 0.7, -0.7],
        "raw_reward": [0, 1, 1, 0],
        "loss_masks": [[1], [1, 1], [0, 0], [1]],
        "truncated": [0, 0, 1, 0],
        "sample_indices": [0, 1, 2, 3],
        "total_lengths": [3, 4, 3, 2],
        "rollout_log_probs": [[-1.0], [-0.5, -0.25], [-2.0, 0.0], [-3.0]],
        "prompt": ["a", "a", "b", "b"],
        **changes,
    }


def test_slime_fields_are_mapped_with_raw_rewards_and_consecutive_groups():
    batch = RolloutBatch.from_slime(
        slime_dict(log_probs=[[-4.0], [-5.0, -6.0], [-7.0, -8.0], [-9.0]], advantages=None),
        samples_per_group=2,
        temperature=0.7,
        weight_version=4,
    )
    expected = RolloutBatch(
        tokens=[1, 2, 3, 1, 2, 4, 0, 5, 6, 7, 5, 8],
        lengths=[3, 4, 3, 2],
        response_lengths=[1, 2, 2, 1],
        rewards=[0, 1, 1, 0],
        group_ids=[0, 0, 1, 1],
        loss_mask=[1, 1, 1, 0, 0, 1],
        rollout_log_probs=[-1.0, -0.5, -0.25, -2.0, 0.0, -3.0],
        old_log_probs=[-4.0, -5.0, -6.0, -7.0, -8.0, -9.0],
        temperature=0.7,
        weight_version=4,
    )
    assert batch.same_as(expected)


def test_experts_of_tokens_survive_every_form_of_a_batch(tmp_path: Path):
    experts = [np.arange(4 * length).reshape(length, 2, 2) for length in (2, 3, 3, 1)]  # one has the last token's too
    batch = RolloutBatch.from_slime(slime_dict(rollout_routed_experts=experts))
    unknown = np.full((1, 2, 2), -1)
    parts = [experts[0], unknown, experts[1], unknown, experts[2], experts[3], unknown]
    assert batch.routed_experts.dtype == np.int16 and np.array_equal(batch.routed_experts, np.concatenate(parts))
    assert RolloutBatch.from_samples(batch.to_samples()).same_as(batch)
    assert np.array_equal(batch.select([2, 0]).routed_experts, np.concatenate([experts[2], experts[0], unknown]))
    batch.save(tmp_path / "batch")
    assert RolloutBatch.load(tmp_path / "batch").same_as(batch)
    assert pickle.loads(pickle.dumps(batch)).same_as(batch) and batch.copy().same_as(batch)
    with refused(BatchError, "routed_experts", "sample 1", "rollout_routed_experts", (2, 2, 2), 4):
        RolloutBatch.from_slime(slime_dict(rollout_routed_experts=[experts[0], experts[0], *experts[2:]]))


def test_slime_groups_come_from_the_argument_before_the_dict_and_else_are_unknown():
    assert RolloutBatch.from_slime(slime_dict()).group_ids is None
    data = slime_dict(group_index=[9, 8, 9, 8])
    assert RolloutBatch.from_slime(data).group_ids.tolist() == [9, 8, 9, 8]
    assert RolloutBatch.from_slime(slime_dict(group_ids=[1, 2, 3, 4])).group_ids.tolist() == [1, 2, 3, 4]
    assert RolloutBatch.from_slime(data, samples_per_group=4).group_ids.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("changes", "arguments", "field", "values"),
    [
        ({"partition": [0, 2, 4, 6]}, {}, "partition", ["partition"]),
        ({"multimodal_train_inputs": [None, {"x": 1}, None, None]}, {}, "multimodal_train_inputs", []),
        ({"loss_mask": [[1]] * 4}, {}, "loss_mask", ["'loss_mask'"]),
        (
            {"loss_masks": [[1], [1], [0, 0], [1]]},
            {},
            "loss_mask",
            ["sample 1", "loss_masks", 1, 2],
        ),
        ({"raw_reward": [0, 1]}, {}, "rewards", ["raw_reward", 2, 4]),
        ({"raw_reward": [0, 1, {"acc": 1}, 0]}, {}, "rewards", ["sample 2", "raw_reward", "acc"]),
        (
            {"rollout_log_probs": [[-1.0], None, None, None]},
            {},
            "rollout_log_probs",
            ["sample 1", "rollout_log_probs"],
        ),
        ({"response_lengths": None}, {}, "response_lengths", ["response_lengths"]),
        ({"tokens": None}, {}, "tokens", []),
        ({"raw_reward": 1.0}, {}, "raw_reward", [1.0, "list"]),
        ({"raw_reward": {0: 1.0, 1: 0.0, 2: 1.0, 3: 0.0}}, {}, "raw_reward", ["list"]),
        ({"tokens": np.array(3)}, {}, "tokens", ["array(3)", "list"]),
        ({}, {"samples_per_group": 3}, "group_ids", ["samples_per_group=3", 4]),
        ({}, {"samples_per_group": 0}, "group_ids", ["samples_per_group=0"]),
        ({"raw_reward": None}, {"reward_key": "raw_reward"}, "rewards", ["raw_reward"]),
        ({}, {"reward_key": "tokens"}, "rewards", ["'tokens'"]),
    ],
)
def test_a_slime_dict_that_cannot_be_honoured_is_refused(changes, arguments, field, values):
    with refused(BatchError, field, *values):
        RolloutBatch.from_slime(slime_dict(**changes), **arguments)
