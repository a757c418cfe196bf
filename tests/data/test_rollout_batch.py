"""RolloutBatch: every rule is refused by name, and what is derived from a batch agrees with its samples."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from slimefsdp.data.fields import DTYPES, FLOATS, PER_RESPONSE_TOKEN
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError
from tests.support.refusals import refused
from tests.support.rollouts import LOG_PROB_KEYS, as_lists, batches, sample_lists, three_samples, with_entry

# ---- the rules


@pytest.mark.parametrize(
    ("fields", "field", "values"),
    [
        ({"lengths": [], "response_lengths": [], "tokens": []}, "lengths", []),
        ({"tokens": np.arange(8)}, "tokens", [8, 9]),
        ({"tokens": np.arange(9.0)}, "tokens", ["float64", "sample 0, token 0", "int64"]),
        ({"tokens": with_entry(np.arange(9), 4, -7)}, "tokens", ["sample 1, token 1", -7]),
        ({"tokens": with_entry(np.arange(9, dtype=np.uint64), 8, 2**63)}, "tokens", ["sample 2, token 1", 2**63]),
        ({"tokens": np.zeros((3, 3), dtype=np.int64)}, "tokens", [(3, 3)]),
        ({"tokens": [[1, 2], [3]]}, "tokens", []),
        ({"tokens": None}, "tokens", [()]),
        ({"lengths": [3, 4.5, 2]}, "lengths", ["float64"]),
        ({"response_lengths": [1, 3]}, "response_lengths", [2, 3]),
        ({"response_lengths": [1, 0, 1]}, "response_lengths", ["sample 1", 0]),
        ({"response_lengths": [1, 3, 2]}, "response_lengths", ["sample 2", 2]),
        ({"lengths": [2**62] * 4, "response_lengths": [1] * 4, "tokens": []}, "tokens", [0, 2**64]),
        ({"rewards": [1.0, 2.0]}, "rewards", [2, 3]),
        ({"rewards": [1.0, 2.0, np.nan]}, "rewards", ["sample 2", "nan"]),
        ({"rewards": [1.0, 1e39, 0.0]}, "rewards", ["sample 1", "inf", "float32"]),
        ({"rewards": ["good", "bad", "bad"]}, "rewards", ["good", "sample 0", "float32"]),
        ({"group_ids": [0, 1]}, "group_ids", [2, 3]),
        ({"group_ids": [0.5, 1, 2]}, "group_ids", ["0.5", "int64"]),
        ({"loss_mask": [1, 1, 2, 1, 1]}, "loss_mask", ["sample 1, response token 1", 2]),
        ({"loss_mask": [0.5, 1, 1, 1, 1]}, "loss_mask", ["sample 0, response token 0", 0.5]),
        ({"loss_mask": [0] * 5}, "loss_mask", [False, 5]),
        ({"temperature": 0.0}, "temperature", [0.0]),
        ({"temperature": float("inf")}, "temperature", ["inf"]),
        ({"temperature": "hot"}, "temperature", ["'hot'"]),
        ({"temperature": [[1], [1, 2]]}, "temperature", []),
        ({"temperature": np.longdouble("1e-4000")}, "temperature", []),
        ({"temperature": np.longdouble("1e4000")}, "temperature", []),
        ({"weight_version": -1}, "weight_version", [-1]),
        ({"weight_version": 1.0}, "weight_version", [1.0]),
        ({"weight_versions": [0, 1, -2, 3, 4]}, "weight_versions", ["sample 1, response token 1", -2]),
        ({"target_tokens": [0, 1, 2, -3, 4]}, "target_tokens", ["sample 1, response token 2", -3]),
        ({"target_tokens": [0.5, 1, 2, 3, 4]}, "target_tokens", ["0.5", "int64"]),
        ({"weight_version": 2**63}, "weight_version", [2**63]),
        ({"routed_experts": np.zeros((8, 2, 2), dtype=np.int64)}, "routed_experts", [(8, 2, 2), 9]),
        ({"routed_experts": np.zeros((9, 2), dtype=np.int64)}, "routed_experts", [(9, 2)]),
        ({"routed_experts": np.zeros((9, 2, 2))}, "routed_experts", ["float64"]),
        ({"routed_experts": np.full((9, 2, 2), -2)}, "routed_experts", [-2]),
        ({"routed_experts": np.full((9, 2, 2), 2**15)}, "routed_experts", [2**15]),
    ],
)
def test_a_broken_rule_is_refused_with_field_place_and_value(fields, field, values):
    with refused(BatchError, field, field, *values):
        RolloutBatch(**three_samples(**fields))


@pytest.mark.parametrize("name", [name for name in PER_RESPONSE_TOKEN if name in FLOATS])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_each_float_per_response_token_must_be_finite(name, value):
    with refused(BatchError, name, name, "sample 1, response token 1", value):
        RolloutBatch(**three_samples(**{name: with_entry(np.full(5, -1.0), 2, value)}))


@pytest.mark.parametrize("name", PER_RESPONSE_TOKEN)
def test_each_field_per_response_token_has_one_entry_for_each(name):
    with refused(BatchError, name, name, 9, 5):
        RolloutBatch(**three_samples(**{name: np.ones(9)}))


@pytest.mark.parametrize("name", sorted(LOG_PROB_KEYS))
def test_log_probs_may_exceed_zero_by_rounding_only(name):
    assert RolloutBatch(**three_samples(**{name: np.full(5, 9e-4)}))
    with refused(BatchError, name, name, "sample 2, response token 0", "0.002"):
        RolloutBatch(**three_samples(**{name: with_entry(np.full(5, 9e-4), 4, 2e-3)}))


def test_one_sample_may_be_wholly_masked():
    batch = RolloutBatch(**three_samples(loss_mask=[1, 0, 0, 0, 1]))
    assert batch.mask.tolist() == [True, False, False, False, True]
    with refused(BatchError, "loss_mask", False, 3):
        batch.select([1])


def test_token_ids_outside_the_vocabulary_are_named():
    batch = RolloutBatch(**three_samples(tokens=[0, 1, 2, 3, 50, 4, 99, 0, 1]))
    batch.check_token_ids(100)
    with refused(BatchError, "tokens", "sample 1, token 1", 50):
        batch.check_token_ids(50)
    with refused(BatchError, "target_tokens", "sample 2, response token 0", 100):
        batch.replace(target_tokens=[0, 1, 2, 3, 100]).check_token_ids(100)


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
    with refused(BatchError, "rewards", 1, 3):
        batch.replace(rewards=[1])
    with refused(BatchError, "reward", "'reward'") as caught:
        batch.replace(reward=[1, 2, 3])
    assert "'rewards'" in str(caught.value.hint)


def test_a_copy_has_arrays_of_its_own_that_are_read_only_too():
    tokens = np.arange(5)
    batch = RolloutBatch(tokens=tokens, lengths=[5], response_lengths=[2], rewards=[1.0], temperature=0.5)
    copy = batch.copy()
    assert copy.same_as(batch)
    tokens[:] = 0
    assert batch.tokens.tolist() == [0] * 5 and copy.tokens.tolist() == [0, 1, 2, 3, 4]
    assert copy.temperature == 0.5 and copy.values is None
    with pytest.raises(ValueError, match="read-only"):
        copy.tokens[0] = 1


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


# ---- processes


def test_a_response_that_ends_in_token_id_0_keeps_its_length(tmp_path):
    samples = [{"tokens": [5, 0, 7, 0, 0], "response_length": 3}, {"tokens": [0, 0], "response_length": 1}]
    batch = RolloutBatch.from_samples(samples)
    batch.save(tmp_path / "batch")
    for copy in (batch, batch.select([0, 1]), pickle.loads(pickle.dumps(batch)), RolloutBatch.load(tmp_path / "batch")):
        assert as_lists(copy.to_samples()) == samples
        assert copy.lengths.tolist() == [5, 2] and copy.response_lengths.tolist() == [3, 1]


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


@pytest.mark.parametrize(
    ("values", "fields", "field"),
    [
        ((), {"foo": 1}, "foo"),
        ((), {}, "tokens"),
        (([1, 2],), {"lengths": [2]}, "response_lengths"),
        (([1, 2],), {"tokens": [1, 2], "lengths": [2], "response_lengths": [1]}, "RolloutBatch"),
        (([1],) * 21, {}, "RolloutBatch"),
    ],
)
def test_fields_that_do_not_make_a_batch_are_a_batch_error(values, fields, field):
    with pytest.raises(BatchError) as caught:
        RolloutBatch(*values, **fields)
    assert caught.value.field == field and caught.value.hint


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda batch: batch.save(None), "path"),
        (lambda batch: RolloutBatch.load(3), "path"),
        (lambda batch: RolloutBatch.from_samples(None), "samples"),
        (lambda batch: RolloutBatch.from_slime([]), "data"),
        (lambda batch: batch.replace(tokens=np.ma.masked_equal(batch.tokens, 2)), "tokens"),
        (lambda batch: batch.replace(**{"x" * 1000: [1]}), "x" * 60),
        (lambda batch: batch.select([[0], [0, 1]]), "indices"),
    ],
)
def test_arguments_of_the_wrong_kind_are_a_batch_error(call, field):
    with pytest.raises(BatchError) as caught:
        call(RolloutBatch(**three_samples()))
    assert caught.value.field == field and caught.value.hint


@given(st.data())
def test_trained_tokens_are_counted_behind_any_number_of_a_response_s_first(data: st.DataObject) -> None:
    masks = data.draw(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=5))
    masks[0][0] = True
    skipped = np.array([data.draw(st.integers(0, 8)) for _ in masks])
    samples = [{"tokens": [1] * (len(mask) + 1), "response_length": len(mask), "loss_mask": mask} for mask in masks]
    batch = RolloutBatch.from_samples(samples)
    expected = [sum(mask[skip:]) for mask, skip in zip(masks, skipped.tolist(), strict=True)]
    assert batch.trained_tokens(skipped).tolist() == expected
    assert batch.trained_tokens().tolist() == list(map(sum, masks))
    assert batch.any_token(batch.mask).tolist() == list(map(any, masks))
    whole = batch.replace(loss_mask=None)
    assert whole.trained_tokens(skipped).tolist() == [
        max(0, len(mask) - skip) for mask, skip in zip(masks, skipped.tolist(), strict=True)
    ]
