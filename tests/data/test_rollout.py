"""RolloutBatch: every rule is refused by name, and no way in or out of a batch changes its content."""

from __future__ import annotations

import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from slimefsdp.data.rollout import DTYPES, PER_RESPONSE_TOKEN, RolloutBatch
from slimefsdp.errors import BatchError

LOG_PROB_KEYS = {"rollout_log_probs", "old_log_probs", "ref_log_probs"}
FLOAT32 = st.floats(-(2.0**100), 2.0**100, width=32)
INT64 = st.integers(-(2**63), 2**63 - 1)


@st.composite
def sample_lists(draw: st.DrawFn) -> list[dict[str, Any]]:
    """One to five samples as plain Python lists, with any of the optional keys."""
    keys = draw(st.sets(st.sampled_from(["reward", "group_id", *PER_RESPONSE_TOKEN])))
    samples = []
    for _ in range(draw(st.integers(1, 5))):
        length = draw(st.integers(2, 9))
        response = draw(st.integers(1, length - 1))
        sample = {"tokens": draw(st.lists(st.integers(0, 2**63 - 1), min_size=length, max_size=length))}
        sample["response_length"] = response
        for key in keys:
            if key == "reward":
                sample[key] = draw(FLOAT32)
            elif key == "group_id":
                sample[key] = draw(INT64)
            else:
                values = (
                    st.booleans()
                    if key == "loss_mask"
                    else st.floats(-1024, 0, width=32)
                    if key in LOG_PROB_KEYS
                    else FLOAT32
                )
                sample[key] = draw(st.lists(values, min_size=response, max_size=response))
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


def as_lists(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in sample.items()} for sample in samples]


def three_samples(**fields: Any) -> dict[str, Any]:
    """Constructor arguments: lengths 3, 4, 2 and responses 1, 3, 1, so response token 2 is the second of sample 1."""
    return {"tokens": np.arange(9), "lengths": [3, 4, 2], "response_lengths": [1, 3, 1], **fields}


def with_entry(array: Any, index: int, value: Any) -> Any:
    array = np.array(array)
    array[index] = value
    return array


# ---- the rules


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"lengths": [], "response_lengths": [], "tokens": []}, "lengths", ["empty", "at least one sample"]),
        ({"tokens": np.arange(8)}, "tokens", ["8 entries", "must have 9"]),
        ({"tokens": np.arange(9.0)}, "tokens", ["float64", "sample 0, token 0", "int64"]),
        ({"tokens": with_entry(np.arange(9), 4, -7)}, "tokens", ["sample 1, token 1", "-7", "negative"]),
        ({"tokens": with_entry(np.arange(9, dtype=np.uint64), 8, 2**63)}, "tokens", ["sample 2, token 1", str(2**63)]),
        ({"tokens": np.zeros((3, 3), dtype=np.int64)}, "tokens", ["(3, 3)", "flat"]),
        ({"tokens": [[1, 2], [3]]}, "tokens", ["cannot be read"]),
        ({"tokens": None}, "tokens", ["shape ()"]),
        ({"lengths": [3, 4.5, 2]}, "lengths", ["float64"]),
        ({"response_lengths": [1, 3]}, "response_lengths", ["2 entries", "must have 3", "one per sample"]),
        ({"response_lengths": [1, 0, 1]}, "response_lengths", ["sample 1", "is 0", "at least 1"]),
        ({"response_lengths": [1, 3, 2]}, "response_lengths", ["sample 2", "is 2", "less than"]),
        ({"lengths": [2**62] * 4, "response_lengths": [1] * 4, "tokens": []}, "tokens", ["0 entries"]),
        ({"rewards": [1.0, 2.0]}, "rewards", ["2 entries", "must have 3", "one per sample"]),
        ({"rewards": [1.0, 2.0, np.nan]}, "rewards", ["sample 2", "nan", "finite"]),
        ({"rewards": [1.0, 1e39, 0.0]}, "rewards", ["sample 1", "inf", "float32"]),
        ({"rewards": ["good", "bad", "bad"]}, "rewards", ["good", "sample 0", "float32"]),
        ({"group_ids": [0, 1]}, "group_ids", ["2 entries", "must have 3"]),
        ({"group_ids": [0.5, 1, 2]}, "group_ids", ["0.5", "int64"]),
        ({"loss_mask": [1, 1, 2, 1, 1]}, "loss_mask", ["sample 1, response token 1", "is 2", "0 or 1"]),
        ({"loss_mask": [0.5, 1, 1, 1, 1]}, "loss_mask", ["sample 0, response token 0", "0.5", "0 or 1"]),
        ({"loss_mask": [0] * 5}, "loss_mask", ["False", "all 5 response tokens"]),
        ({"temperature": 0.0}, "temperature", ["0.0", "above 0"]),
        ({"temperature": float("inf")}, "temperature", ["inf", "finite"]),
        ({"temperature": "hot"}, "temperature", ["hot"]),
        ({"weight_version": -1}, "weight_version", ["-1"]),
        ({"weight_version": 1.0}, "weight_version", ["1.0", "whole number"]),
        ({"weight_version": 2**63}, "weight_version", [str(2**63)]),
    ],
)
def test_a_broken_rule_is_refused_with_field_place_and_value(fields, field, words):
    with pytest.raises(BatchError) as caught:
        RolloutBatch(**three_samples(**fields))
    assert caught.value.field == field and caught.value.hint
    for word in (field, *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("name", [name for name in PER_RESPONSE_TOKEN if name != "loss_mask"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_each_float_per_response_token_must_be_finite(name, value):
    with pytest.raises(BatchError, match=rf"{name} of sample 1, response token 1 is {value}; .*finite") as caught:
        RolloutBatch(**three_samples(**{name: with_entry(np.full(5, -1.0), 2, value)}))
    assert caught.value.field == name


@pytest.mark.parametrize("name", PER_RESPONSE_TOKEN)
def test_each_field_per_response_token_has_one_entry_for_each(name):
    with pytest.raises(BatchError, match=rf"{name} has 9 entries; it must have 5, one per response token"):
        RolloutBatch(**three_samples(**{name: np.ones(9)}))


@pytest.mark.parametrize("name", sorted(LOG_PROB_KEYS))
def test_log_probs_may_exceed_zero_by_rounding_only(name):
    assert RolloutBatch(**three_samples(**{name: np.full(5, 9e-4)}))
    with pytest.raises(BatchError, match=rf"{name} of sample 2, response token 0 is 0.00200\d*; .*above 0"):
        RolloutBatch(**three_samples(**{name: with_entry(np.full(5, 9e-4), 4, 2e-3)}))


def test_one_sample_may_be_wholly_masked():
    batch = RolloutBatch(**three_samples(loss_mask=[1, 0, 0, 0, 1]))
    assert batch.mask.tolist() == [True, False, False, False, True]
    with pytest.raises(BatchError, match="loss_mask is False on all 3"):
        batch.select([1])


def test_token_ids_outside_the_vocabulary_are_named():
    batch = RolloutBatch(**three_samples(tokens=[0, 1, 2, 3, 50, 4, 99, 0, 1]))
    batch.check_token_ids(100)
    with pytest.raises(BatchError, match=r"tokens of sample 1, token 1 is 50; .* 50"):
        batch.check_token_ids(50)


# ---- what construction makes of its arguments


def test_lists_and_other_dtypes_become_the_fixed_dtypes():
    batch = RolloutBatch(
        tokens=np.arange(9, dtype=">u2"),
        lengths=[3, 4, 2],
        response_lengths=np.array([1, 3, 1], dtype=np.int8),
        rewards=[1, 0, 1],
        group_ids=np.array([7, 7, 8], dtype=np.int32),
        loss_mask=[1, 0, 1, 1, 1],
        rollout_log_probs=np.full(5, -0.5, dtype=np.float16),
        advantages=np.ones(10, dtype=np.float32)[::2],
        temperature=1,
        weight_version=np.int32(3),
    )
    for name, dtype in DTYPES.items():
        value = getattr(batch, name)
        if isinstance(value, np.ndarray):
            assert value.dtype == dtype and value.flags.c_contiguous, name
    assert batch.tokens.tolist() == list(range(9)) and batch.rewards.tolist() == [1.0, 0.0, 1.0]
    assert type(batch.temperature) is float and type(batch.weight_version) is int


def test_an_array_that_fits_is_viewed_and_cannot_be_written_through_the_batch():
    tokens = np.arange(9)
    batch = RolloutBatch(**three_samples(tokens=tokens))
    assert np.shares_memory(batch.tokens, tokens) and tokens.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        batch.tokens[0] = 1
    with pytest.raises(AttributeError):
        batch.tokens = tokens


def test_importing_the_batch_imports_neither_torch_nor_ray_nor_transformers():
    code = (
        "import sys, slimefsdp.data.rollout; sys.exit(any(m in sys.modules for m in ('torch', 'ray', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@given(sample_lists())
def test_offsets_mask_and_sample_ids_agree_with_the_samples(samples):
    batch = RolloutBatch.from_samples(samples)
    assert batch.num_samples == len(samples)
    assert batch.num_tokens == sum(len(s["tokens"]) for s in samples) == batch.token_offsets[-1]
    assert batch.num_response_tokens == sum(s["response_length"] for s in samples) == batch.response_offsets[-1]
    assert batch.token_offsets.dtype == batch.response_offsets.dtype == batch.sample_ids.dtype == np.int64
    owners, mask = [], []
    for i, sample in enumerate(samples):
        assert batch.tokens[batch.token_offsets[i] : batch.token_offsets[i + 1]].tolist() == sample["tokens"]
        owners += [i] * sample["response_length"]
        mask += sample.get("loss_mask", [True] * sample["response_length"])
    assert batch.sample_ids.tolist() == owners
    assert batch.mask.dtype == np.bool_ and batch.mask.tolist() == mask


# ---- samples in and out


@given(sample_lists())
def test_samples_come_back_as_they_went_in(samples):
    batch = RolloutBatch.from_samples(samples)
    assert as_lists(batch.to_samples()) == samples
    assert RolloutBatch.from_samples(batch.to_samples()).same_as(batch)
    assert RolloutBatch.from_samples([SimpleNamespace(**s, status="done") for s in samples]).same_as(batch)


def test_a_response_that_ends_in_token_id_0_keeps_its_length(tmp_path):
    samples = [{"tokens": [5, 0, 7, 0, 0], "response_length": 3}, {"tokens": [0, 0], "response_length": 1}]
    batch = RolloutBatch.from_samples(samples)
    batch.save(tmp_path / "batch")
    for copy in (batch, batch.select([0, 1]), pickle.loads(pickle.dumps(batch)), RolloutBatch.load(tmp_path / "batch")):
        assert as_lists(copy.to_samples()) == samples
        assert copy.lengths.tolist() == [5, 2] and copy.response_lengths.tolist() == [3, 1]


def test_none_counts_as_absent_and_a_mask_may_be_zeros_and_ones():
    sample = {"tokens": [1, 2, 3], "response_length": 2, "reward": None, "loss_mask": [0, 1]}
    batch = RolloutBatch.from_samples([sample, sample])
    assert batch.rewards is None and batch.mask.tolist() == [False, True, False, True]


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"reward": None}, "rewards", ["sample 1 has no reward"]),
        ({"loss_mask": None}, "loss_mask", ["sample 1 has no loss_mask"]),
        ({"tokens": None}, "tokens", ["sample 1 has no tokens"]),
        ({"response_length": None}, "response_lengths", ["sample 1 has no response_length"]),
        ({"loss_mask": [1]}, "loss_mask", ["loss_mask of sample 1", "1 entries", "2 tokens"]),
        ({"loss_mask": [1, 3]}, "loss_mask", ["sample 1, entry 1", "is 3", "0 or 1"]),
        ({"tokens": [1, 2.5, 3]}, "tokens", ["tokens of sample 1", "float64"]),
        ({"tokens": np.array([1, 2, 2**63], dtype=np.uint64)}, "tokens", ["sample 1, entry 2", str(2**63)]),
        ({"reward": {"score": 1}}, "rewards", ["reward of sample 1", "score"]),
        ({"reward": [1.0, 2.0]}, "rewards", ["reward of sample 1", "(1, 2)"]),
        ({"response_length": 2.0}, "response_lengths", ["response_length of sample 1", "float64"]),
        ({"rewards": 1.0}, "rewards", ["'rewards' is not a key of sample 1", "write 'reward'"]),
        ({"logprobs": [0.0]}, "logprobs", ["'logprobs' is not a key of sample 1", "_log_probs'"]),
    ],
)
def test_a_sample_that_does_not_fit_is_named(change, field, words):
    good = {"tokens": [1, 2, 3], "response_length": 2, "reward": 1, "loss_mask": [1, 1]}
    with pytest.raises(BatchError) as caught:
        RolloutBatch.from_samples([good, {**good, **change}, {**good, **change}])
    assert caught.value.field == field and caught.value.hint
    for word in words:
        assert word in str(caught.value)


def test_samples_that_all_lack_a_needed_key_and_no_samples_at_all_are_refused():
    with pytest.raises(BatchError, match="sample 0 has no response_length"):
        RolloutBatch.from_samples([{"tokens": [1, 2]}, {"tokens": [1, 2]}])
    with pytest.raises(BatchError, match="no samples"):
        RolloutBatch.from_samples([])


# ---- slime


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


def test_slime_rewards_are_taken_on_request_or_when_there_are_no_raw_ones():
    normalised = np.float32([-0.7, 0.7, 0.7, -0.7])
    assert np.array_equal(RolloutBatch.from_slime(slime_dict(), reward_key="rewards").rewards, normalised)
    assert np.array_equal(RolloutBatch.from_slime(slime_dict(raw_reward=None)).rewards, normalised)


def test_slime_groups_come_from_the_argument_before_the_dict_and_else_are_unknown():
    assert RolloutBatch.from_slime(slime_dict()).group_ids is None
    data = slime_dict(group_index=[9, 8, 9, 8])
    assert RolloutBatch.from_slime(data).group_ids.tolist() == [9, 8, 9, 8]
    assert RolloutBatch.from_slime(slime_dict(group_ids=[1, 2, 3, 4])).group_ids.tolist() == [1, 2, 3, 4]
    assert RolloutBatch.from_slime(data, samples_per_group=4).group_ids.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("changes", "arguments", "field", "words"),
    [
        ({"partition": [0, 2, 4, 6]}, {}, "partition", ["one rank's share"]),
        ({"multimodal_train_inputs": [None, {"x": 1}, None, None]}, {}, "multimodal_train_inputs", ["not supported"]),
        ({"loss_mask": [[1]] * 4}, {}, "loss_mask", ["'loss_mask' is not a key of slime's dict", "'loss_masks'"]),
        (
            {"loss_masks": [[1], [1], [0, 0], [1]]},
            {},
            "loss_mask",
            ["loss_masks of sample 1 has 1 entries", "2 tokens"],
        ),
        ({"raw_reward": [0, 1]}, {}, "rewards", ["raw_reward has 2 entries for 4 samples"]),
        ({"raw_reward": [0, 1, {"acc": 1}, 0]}, {}, "rewards", ["raw_reward of sample 2", "acc"]),
        (
            {"rollout_log_probs": [[-1.0], None, None, None]},
            {},
            "rollout_log_probs",
            ["sample 1 has no rollout_log_probs"],
        ),
        ({"response_lengths": None}, {}, "response_lengths", ["no response_lengths"]),
        ({"tokens": None}, {}, "tokens", ["no samples"]),
        ({"raw_reward": 1.0}, {}, "raw_reward", ["is 1.0", "list"]),
        ({}, {"samples_per_group": 3}, "group_ids", ["samples_per_group=3", "4 samples"]),
        ({}, {"samples_per_group": 0}, "group_ids", ["samples_per_group=0"]),
        ({"raw_reward": None}, {"reward_key": "raw_reward"}, "rewards", ["raw_reward"]),
        ({}, {"reward_key": "tokens"}, "rewards", ["'tokens'"]),
    ],
)
def test_a_slime_dict_that_cannot_be_honoured_is_refused(changes, arguments, field, words):
    with pytest.raises(BatchError) as caught:
        RolloutBatch.from_slime(slime_dict(**changes), **arguments)
    assert caught.value.field == field and caught.value.hint
    for word in words:
        assert word in str(caught.value)


def test_slime_inputs_that_are_none_on_every_sample_are_no_obstacle():
    data = slime_dict(multimodal_train_inputs=[None] * 4)
    assert RolloutBatch.from_slime(data).same_as(RolloutBatch.from_slime(slime_dict()))


# ---- derived batches


@given(st.data(), sample_lists())
def test_select_equals_building_the_chosen_samples_anew(data, samples):
    for sample in samples:
        if "loss_mask" in sample:
            sample["loss_mask"][0] = True
    batch = RolloutBatch.from_samples(samples, temperature=0.5, weight_version=2)
    chosen = data.draw(st.lists(st.integers(0, len(samples) - 1), min_size=1, max_size=8))
    expected = RolloutBatch.from_samples([samples[i] for i in chosen], temperature=0.5, weight_version=2)
    assert batch.select(chosen).same_as(expected)
    assert batch.select(np.array(chosen, dtype=np.int32)).same_as(expected)


@pytest.mark.parametrize("indices", [[0, 3], [-1], [], [0.0], [True, False, True], 1])
def test_select_refuses_what_is_not_a_list_of_sample_numbers(indices):
    with pytest.raises(BatchError):
        RolloutBatch(**three_samples()).select(indices)


def test_replace_validates_and_leaves_the_original_alone():
    batch = RolloutBatch(**three_samples(rewards=[1, 2, 3]))
    changed = batch.replace(rewards=[3, 2, 1], weight_version=5)
    assert changed.rewards.tolist() == [3, 2, 1] and changed.weight_version == 5 and batch.rewards.tolist() == [1, 2, 3]
    assert batch.replace(rewards=None).rewards is None
    with pytest.raises(BatchError, match="rewards has 1 entries"):
        batch.replace(rewards=[1])
    with pytest.raises(BatchError, match="'reward' is not a field of RolloutBatch; write 'rewards'"):
        batch.replace(reward=[1, 2, 3])


@given(batches(), st.data())
def test_same_as_sees_a_change_of_any_field(batch, data):
    assert batch.same_as(batch.replace()) and not batch.same_as(batch.to_samples())
    present = [name for name in DTYPES if getattr(batch, name) is not None and "lengths" not in name]
    name = data.draw(st.sampled_from(present))
    changed = value = getattr(batch, name)
    if name == "temperature":
        changed = 2 * value
    elif name == "weight_version":
        changed = value ^ 1
    else:
        index = data.draw(st.integers(0, value.size - 1))
        entry = value[index]
        changed = with_entry(value, index, float(entry == 0) * -1 if value.dtype == np.float32 else entry ^ 1)
        assume(changed.any() or name != "loss_mask")
    assert not batch.same_as(batch.replace(**{name: changed}))
    assert name == "tokens" or not batch.same_as(batch.replace(**{name: None}))


# ---- files and processes


@given(batches())
def test_a_saved_batch_loads_the_same(tmp_path_factory, batch):
    path = tmp_path_factory.mktemp("rollout") / "batch.safetensors"
    batch.save(path)
    loaded = RolloutBatch.load(str(path))
    assert loaded.same_as(batch)
    assert {name: value.dtype for name, value in load_file(path).items()} == {
        name: dtype for name, dtype in DTYPES.items() if getattr(batch, name) is not None
    }
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    old, new = RolloutBatch(**three_samples()), RolloutBatch(**three_samples(rewards=[1, 2, 3]))
    path = tmp_path / "batch"
    old.save(path)

    def stop(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("slimefsdp.data.rollout.os.fsync", stop)
    with pytest.raises(OSError, match="disk full"):
        new.save(path)
    assert RolloutBatch.load(path).same_as(old) and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lengths": None}, ["lengths", "missing"]),
        ({"token": np.arange(3)}, ["'token'", "'tokens'"]),
        ({"tokens": np.arange(9, dtype=np.int32)}, ["tokens is I32", "I64"]),
        ({"rewards": np.ones(3)}, ["rewards is F64", "F32"]),
        ({"loss_mask": np.ones(5, dtype=np.uint8)}, ["loss_mask is U8", "BOOL"]),
        ({"temperature": np.ones(1)}, ["temperature"]),
        ({"weight_version": np.array(-1)}, ["weight_version", "-1"]),
        ({"tokens": np.arange(9).reshape(3, 3)}, ["tokens", "(3, 3)"]),
        ({"tokens": np.arange(8)}, ["tokens has 8 entries"]),
    ],
)
def test_a_file_with_other_tensors_is_refused_by_name(tmp_path, changes, words):
    good = {"tokens": np.arange(9), "lengths": np.array([3, 4, 2]), "response_lengths": np.array([1, 3, 1])}
    path = tmp_path / "batch.safetensors"
    save_file({name: value for name, value in {**good, **changes}.items() if value is not None}, path)
    with pytest.raises(BatchError) as caught:
        RolloutBatch.load(path)
    for word in (str(path), *words):
        assert word in str(caught.value)


def test_a_file_cut_at_any_byte_is_refused(tmp_path):
    path = tmp_path / "batch"
    RolloutBatch(**three_samples(rewards=[1, 2, 3], temperature=1.0)).save(path)
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(BatchError, match="batch cannot be read"):
            RolloutBatch.load(path)


@settings(max_examples=300)
@given(position=st.integers(0, 10_000), value=st.integers(0, 255))
def test_a_damaged_file_gives_a_valid_batch_or_a_batch_error(tmp_path_factory, position, value):
    path = tmp_path_factory.mktemp("damaged") / "batch"
    RolloutBatch(**three_samples(rewards=[1, 2, 3], loss_mask=[1, 1, 1, 1, 0], weight_version=1)).save(path)
    content = bytearray(path.read_bytes())
    content[position % len(content)] = value
    path.write_bytes(content)
    try:
        batch = RolloutBatch.load(path)
    except BatchError as error:
        assert str(path) in str(error)
    else:
        assert RolloutBatch.from_samples(batch.to_samples()).tokens.tolist() == batch.tokens.tolist()


@pytest.mark.parametrize("content", [None, b"", b"{}", b"PK\x03\x04" + bytes(100)])
def test_a_file_that_is_missing_or_something_else_is_refused(tmp_path, content):
    path = tmp_path / "batch"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BatchError, match=str(path)):
        RolloutBatch.load(path)
    with pytest.raises(BatchError, match=str(tmp_path)):
        RolloutBatch.load(tmp_path)


@given(batches(), st.integers(2, pickle.HIGHEST_PROTOCOL))
def test_a_pickled_batch_comes_back_read_only_and_equal(batch, protocol):
    copy = pickle.loads(pickle.dumps(batch, protocol))
    assert copy.same_as(batch) and not copy.tokens.flags.writeable


def test_unpickling_over_shared_read_only_memory_neither_copies_nor_validates(monkeypatch):
    batch = RolloutBatch(**three_samples(rewards=[1, 2, 3], temperature=0.5))
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(batch, 5, buffer_callback=buffers.append)
    stored = [bytes(buffer.raw()) for buffer in buffers]  # as in an object store

    def refuse(_: object) -> None:
        raise AssertionError("validated again")

    with monkeypatch.context() as patch:
        patch.setattr(RolloutBatch, "__post_init__", refuse)
        copy = pickle.loads(message, buffers=stored)
    assert copy.same_as(batch)
    assert np.shares_memory(copy.tokens, np.frombuffer(stored[0], dtype=np.int64))
    assert copy.select([2, 0]).same_as(batch.select([2, 0]))
    assert copy.replace(weight_version=1).weight_version == 1
