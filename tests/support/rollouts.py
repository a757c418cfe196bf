"""Samples and batches for the tests: random ones of every shape, and one small one with known places."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from slimefsdp.data.fields import PER_RESPONSE_TOKEN
from slimefsdp.data.rollout_batch import RolloutBatch

LOG_PROB_KEYS = {"rollout_log_probs", "old_log_probs", "ref_log_probs"}
FLOAT32 = st.floats(-(2.0**100), 2.0**100, width=32)
INT64 = st.integers(-(2**63), 2**63 - 1)
VALUES = {
    **dict.fromkeys(["reward", *PER_RESPONSE_TOKEN], FLOAT32),
    **dict.fromkeys(LOG_PROB_KEYS, st.floats(-1024, 0, width=32)),
    "group_id": INT64,
    "weight_versions": st.integers(0, 2**63 - 1),
    "target_tokens": st.integers(0, 2**63 - 1),
    "loss_mask": st.booleans(),
}


@st.composite
def sample_lists(draw: st.DrawFn) -> list[dict[str, Any]]:
    """One to five samples as plain Python lists, with any of the optional keys."""
    keys = draw(st.sets(st.sampled_from(list(VALUES))))
    samples = []
    for _ in range(draw(st.integers(1, 5))):
        length = draw(st.integers(2, 9))
        response = draw(st.integers(1, length - 1))
        sample = {"tokens": draw(st.lists(st.integers(0, 2**63 - 1), min_size=length, max_size=length))}
        sample["response_length"] = response
        for key in keys:
            has_one = key in ("reward", "group_id")
            sample[key] = draw(VALUES[key] if has_one else st.lists(VALUES[key], min_size=response, max_size=response))
        samples.append(sample)
    if "loss_mask" in keys:
        samples[0]["loss_mask"][0] = True
    return samples


@st.composite
def batches(draw: st.DrawFn) -> RolloutBatch:
    return RolloutBatch.from_samples(
        draw(sample_lists()),
        temperature=draw(st.none() | st.floats(1e-3, 1e3)),
        weight_version=draw(st.none() | st.integers(0, 2**63 - 1)),
    )


def three_samples(**fields: Any) -> dict[str, Any]:
    """Constructor arguments: lengths 3, 4, 2 and responses 1, 3, 1, so response token 2 is the second of sample 1."""
    return {"tokens": np.arange(9), "lengths": [3, 4, 2], "response_lengths": [1, 3, 1], **fields}


def with_entry(array: Any, index: int, value: Any) -> Any:
    array = np.array(array)
    array[index] = value
    return array


def as_lists(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The samples with lists for arrays, so that `==` compares them."""
    return [{k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in sample.items()} for sample in samples]
