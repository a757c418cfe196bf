"""A saved batch loads the same; a file that is torn, damaged or something else is refused by name."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from slimefsdp.data.fields import DTYPES
from slimefsdp.data.rollout import RolloutBatch
from slimefsdp.errors import BatchError
from tests.data.rollouts import batches, three_samples


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

    monkeypatch.setattr("slimefsdp.data.rollout_file.os.fsync", stop)
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
