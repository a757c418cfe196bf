"""A saved batch loads the same; a file that is torn, damaged or something else is refused by name."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from slimefsdp.data.fields import DTYPES
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError
from tests.support.refusals import refused
from tests.support.rollouts import batches, three_samples
from tests.support.tiers import examples


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

    monkeypatch.setattr("slimefsdp.data.rollout_batch.os.fsync", stop)
    with pytest.raises(BatchError) as caught:
        new.save(path)
    assert caught.value.field == "path" and isinstance(caught.value.__cause__, OSError)
    assert RolloutBatch.load(path).same_as(old) and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("changes", "field", "values"),
    [
        ({"lengths": None}, "lengths", []),
        ({"token": np.arange(3)}, "token", ["'token'"]),
        ({"tokens": np.arange(9, dtype=np.int32)}, "tokens", ["I32", "I64"]),
        ({"rewards": np.ones(3)}, "rewards", ["F64", "F32"]),
        ({"loss_mask": np.ones(5, dtype=np.uint8)}, "loss_mask", ["U8", "BOOL"]),
        ({"temperature": np.ones(1)}, "temperature", []),
        ({"weight_version": np.array(-1)}, "weight_version", [-1]),
        ({"tokens": np.arange(9).reshape(3, 3)}, "tokens", [(3, 3)]),
        ({"tokens": np.arange(8)}, "tokens", [8, 9]),
    ],
)
def test_a_file_with_other_tensors_is_refused_by_name(tmp_path, changes, field, values):
    good = {"tokens": np.arange(9), "lengths": np.array([3, 4, 2]), "response_lengths": np.array([1, 3, 1])}
    path = tmp_path / "batch.safetensors"
    save_file({name: value for name, value in {**good, **changes}.items() if value is not None}, path)
    with refused(BatchError, field, path, *values):
        RolloutBatch.load(path)


@examples(300)
@given(position=st.integers(0, 10_000), value=st.integers(0, 255))
def test_a_damaged_file_gives_the_batch_that_was_saved_or_a_batch_error(tmp_path_factory, position, value):
    path = tmp_path_factory.mktemp("damaged") / "batch"
    saved = RolloutBatch(**three_samples(rewards=[1, 2, 3], loss_mask=[1, 1, 1, 1, 0], weight_version=1))
    saved.save(path)
    content = bytearray(path.read_bytes())
    content[position % len(content)] = value
    path.write_bytes(content)
    try:
        batch = RolloutBatch.load(path)
    except BatchError as error:
        assert str(path) in str(error)
    else:
        assert batch.same_as(saved)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"format": "np", "writer": "another program"}])
def test_a_file_without_a_digest_is_loaded(tmp_path, metadata):
    batch = RolloutBatch(**three_samples(rewards=[1, 2, 3], temperature=0.5))
    batch.save(tmp_path / "batch")
    save_file(load_file(tmp_path / "batch"), tmp_path / "older", metadata=metadata)
    assert RolloutBatch.load(tmp_path / "older").same_as(batch)


@pytest.mark.parametrize("content", [None, b"", b"{}", b"PK\x03\x04" + bytes(100)])
def test_a_file_that_is_missing_or_something_else_is_refused(tmp_path, content):
    path = tmp_path / "batch"
    if content is not None:
        path.write_bytes(content)
    with refused(BatchError, None, path):
        RolloutBatch.load(path)
    with refused(BatchError, None, tmp_path):
        RolloutBatch.load(tmp_path)
