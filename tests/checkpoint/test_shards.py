"""Shards written by any number of ranks come back bit for bit on any other number."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from slimefsdp.checkpoint.shards import (
    ShardedTensor,
    fill,
    plan_reads,
    read_rank_state,
    write_shard,
    writing_ranks,
)
from slimefsdp.checkpoint.store import CheckpointStore
from slimefsdp.errors import CheckpointError
from slimefsdp.io.files import FileRecord
from tests.support.refusals import refused
from tests.support.tiers import examples

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def read_shard(folder: Path, wanted: dict[str, ShardedTensor]) -> None:
    fill(plan_reads(folder, wanted))


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Every bit random, so NaN payloads, infinities and subnormals occur."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    items = int(torch.Size(shape).numel())
    raw = torch.randint(256, (items * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    as_bytes = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right)]
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*as_bytes)


def share(full: torch.Tensor, rank: int, world_size: int) -> ShardedTensor:
    """FSDP2's split of dim 0: chunks of ceil(rows / ranks), the last ranks get fewer or none."""
    if full.dim() == 0:
        return ShardedTensor(full, (), 0)
    chunk = -(-full.shape[0] // world_size)
    start = min(rank * chunk, full.shape[0])
    return ShardedTensor(full[start : start + chunk], tuple(full.shape), start)


def blank(tensor: ShardedTensor) -> ShardedTensor:
    """The same share with every bit inverted, so that a value that was not read cannot pass."""
    raw = tensor.local.contiguous().clone()
    if raw.dtype == torch.bool:
        return ShardedTensor(~raw, tensor.global_shape, tensor.start)
    inverted = (~raw.reshape(-1).view(torch.uint8)).view(raw.dtype).reshape(raw.shape)
    return ShardedTensor(inverted, tensor.global_shape, tensor.start)


def write_all(folder: Path, full: dict[str, torch.Tensor], world_size: int) -> None:
    for rank in range(world_size):
        write_shard(folder, rank, {name: share(t, rank, world_size) for name, t in full.items()}, {"rank": rank})


def read_all(folder: Path, full: dict[str, torch.Tensor], world_size: int) -> None:
    """Read on every rank and compare with slices of the full tensors."""
    for rank in range(world_size):
        wanted = {name: blank(share(t, rank, world_size)) for name, t in full.items()}
        read_shard(folder, wanted)
        for name, tensor in full.items():
            assert same_bits(wanted[name].local, share(tensor, rank, world_size).local), (name, rank)


@examples(60)
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    writers=st.integers(1, 6),
    readers=st.integers(1, 6),
)
def test_any_shapes_come_back_on_any_number_of_ranks(shapes, dtype, writers, readers):
    full = {str(i): random_bits(tuple(shape), dtype, i) for i, shape in enumerate(shapes)}
    with tempfile.TemporaryDirectory() as folder:
        write_all(Path(folder), full, writers)
        read_all(Path(folder), full, readers)


@examples(60)
@given(
    rng=st.randoms(use_true_random=False), rows=st.integers(4, 12), writers=st.integers(2, 5), drops_one=st.booleans()
)
def test_uneven_and_overlapping_shares_are_read_where_they_cover_and_refused_where_they_do_not(
    rng, rows, writers, drops_one
):
    full = random_bits((rows, 2), torch.float32, rows)
    cuts = [0, *sorted(rng.randint(0, rows) for _ in range(writers - 1)), rows]
    spans = list(itertools.pairwise(cuts))
    rng.shuffle(spans)
    spans[0] = sorted((rng.randint(0, rows), rng.randint(0, rows))) if drops_one else spans[0]
    spans.append(sorted((rng.randint(0, rows), rng.randint(0, rows))))  # lies over the others
    first, stop = sorted((rng.randint(0, rows), rng.randint(0, rows)))
    wanted = blank(ShardedTensor(full[first:stop], (rows, 2), first))
    covered = set().union(*(range(*span) for span in spans))
    with tempfile.TemporaryDirectory() as folder:
        for rank, (start, end) in enumerate(spans):
            write_shard(Path(folder), rank, {"w": ShardedTensor(full[start:end], (rows, 2), start)}, {})
        if covered >= set(range(first, stop)):
            read_shard(Path(folder), {"w": wanted})
            assert same_bits(wanted.local, full[first:stop])
        else:
            lost = min(set(range(first, stop)) - covered)
            with refused(CheckpointError, "w", lost, rows):
                read_shard(Path(folder), {"w": wanted})


def test_a_replicated_tensor_is_whole_on_every_rank(tmp_path):
    full = random_bits((5, 2), torch.float32, 0)
    for rank in range(3):
        write_shard(tmp_path, rank, {"buffer": ShardedTensor(full, (5, 2), 0)}, {})
    wanted = blank(ShardedTensor(full, (5, 2), 0))
    read_shard(tmp_path, {"buffer": wanted})
    assert same_bits(wanted.local, full)


def test_parameters_are_filled_in_place_without_touching_their_graph_or_neighbours(tmp_path):
    weight = torch.nn.Parameter(random_bits((6, 4), torch.float32, 1))
    write_shard(tmp_path, 0, {"w": ShardedTensor(weight, (6, 4), 0)}, {})
    flat = torch.zeros(2 * 30)
    strided = flat.view(2, 30)[:, 3:27].view(2, 6, 4)[1]  # a view in the middle of a buffer
    parameter = torch.nn.Parameter(strided)
    address = parameter.data_ptr()
    read_shard(tmp_path, {"w": ShardedTensor(parameter, (6, 4), 0)})
    assert same_bits(parameter, weight) and parameter.data_ptr() == address
    assert parameter.grad_fn is None and parameter.requires_grad
    assert flat[:33].eq(0).all() and flat[57:].eq(0).all()


def test_tied_and_non_contiguous_tensors_are_written_each_under_its_name(tmp_path):
    weight = random_bits((6, 4), torch.float32, 1)
    full = {"embed": weight, "head": weight, "first_rows": weight[:2], "transposed": weight.t()}
    write_shard(tmp_path, 0, {name: ShardedTensor(t, tuple(t.shape), 0) for name, t in full.items()}, {})
    saved = load_file(tmp_path / "rank_00000.safetensors")
    assert saved.keys() == full.keys() and all(same_bits(saved[name], full[name]) for name in full)


def test_rank_state_comes_back_equal_and_is_none_beyond_the_writers(tmp_path):
    rng = torch.get_rng_state()
    for rank in range(2):
        write_shard(tmp_path, rank, {}, {"rank": rank, "rng": rng.tolist()})
    assert writing_ranks(tmp_path) == 2
    assert read_rank_state(tmp_path, 1) == {"rank": 1, "rng": rng.tolist()}
    assert read_rank_state(tmp_path, 2) is None


def filled(shape: tuple[int, ...] = (4, 2), dtype: torch.dtype = torch.float32) -> ShardedTensor:
    return ShardedTensor(torch.ones(shape, dtype=dtype), shape, 0)


@pytest.mark.parametrize(
    ("saved", "wanted", "values"),
    [
        ({"a": filled()}, {"a": filled(), "b": filled()}, ()),
        ({"a": filled(), "b": filled()}, {"a": filled()}, ["rank_00000.json"]),
        ({"a": filled(), "b": filled()}, {"a": filled(), "b": filled(dtype=torch.bfloat16)}, ["F32", "BF16"]),
        ({"a": filled(), "b": filled()}, {"a": filled(), "b": filled((4, 3))}, [[4, 2], [4, 3]]),
        ({"a": filled(), "b": filled(())}, {"a": filled(), "b": filled((1,))}, [[], [1]]),
    ],
)
def test_another_model_is_refused_with_tensor_and_file_before_any_value_changes(tmp_path, saved, wanted, values):
    write_shard(tmp_path, 0, saved, {})
    for tensor in wanted.values():
        tensor.local.zero_()
    with refused(CheckpointError, "b", tmp_path, *values):
        read_shard(tmp_path, wanted)
    assert all(tensor.local.eq(0).all() for tensor in wanted.values())


@pytest.mark.parametrize(
    "tensor",
    [
        ShardedTensor(torch.zeros(3, 2), (4, 2), 2),
        ShardedTensor(torch.zeros(3, 2), (4, 2), -1),
        ShardedTensor(torch.zeros(3, 3), (4, 2), 0),
        ShardedTensor(torch.zeros(3), (), 0),
        ShardedTensor(torch.zeros(()), (), 1),
        ShardedTensor(torch.zeros(3, dtype=torch.complex64), (3,), 0),
    ],
)
def test_a_share_outside_its_tensor_or_of_an_unknown_dtype_is_refused_when_written(tmp_path, tensor):
    with pytest.raises(CheckpointError) as caught:
        write_shard(tmp_path, 0, {"w": tensor}, {})
    assert caught.value.field == "w" and not any(tmp_path.iterdir())


def test_an_absent_rank_is_noticed(tmp_path):
    with refused(CheckpointError, "rank", "rank_00000.json"):
        writing_ranks(tmp_path)
    write_all(tmp_path, {"w": torch.zeros(9, 2)}, 3)
    (tmp_path / "rank_00001.json").unlink()
    with refused(CheckpointError, "rank", "rank_00001.json"):
        writing_ranks(tmp_path)
    with refused(CheckpointError, "rank", "rank_00001.json"):
        read_shard(tmp_path, {"w": filled((9, 2))})


def test_a_torn_tensor_file_or_one_that_contradicts_its_index_is_refused(tmp_path):
    write_all(tmp_path, {"w": torch.zeros(9, 2)}, 2)
    path = tmp_path / "rank_00001.safetensors"
    for replacement in (torch.zeros(4, 2).double(), torch.zeros(3, 2), torch.zeros(4, 1)):
        save_file({"w": replacement}, path)
        with pytest.raises(CheckpointError, match=r"rank_00001\.safetensors"):
            read_shard(tmp_path, {"w": filled((9, 2))})
    save_file({"other": torch.zeros(4, 2)}, path)
    with pytest.raises(CheckpointError, match=r"rank_00001\.safetensors"):
        read_shard(tmp_path, {"w": filled((9, 2))})
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"rank_00001\.safetensors"):
        read_shard(tmp_path, {"w": filled((9, 2))})
    path.unlink()
    with pytest.raises(CheckpointError, match=r"rank_00001\.safetensors"):
        read_shard(tmp_path, {"w": filled((9, 2))})


@pytest.mark.parametrize(
    "index", ["", "[]", "{}", '{"tensors": []}', '{"tensors": {"w": {}}}', '{"tensors": {"w": {"dtype": "F32"}}}']
)
def test_an_index_that_is_not_one_is_refused(tmp_path, index):
    write_all(tmp_path, {"w": torch.zeros(9, 2)}, 1)
    (tmp_path / "rank_00000.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"rank_00000\.json"):
        read_shard(tmp_path, {"w": filled((9, 2))})
    with pytest.raises(CheckpointError, match=r"rank_00000\.json"):
        read_rank_state(tmp_path, 0)


def test_a_folder_that_cannot_be_written_is_a_checkpoint_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for folder in (tmp_path / "file", tmp_path / "absent"):
        with pytest.raises(CheckpointError, match="rank_00000"):
            write_shard(folder, 0, {"w": filled()}, {})


def test_ranks_that_write_at_the_same_time_make_one_verified_checkpoint(tmp_path):
    store, world_size = CheckpointStore(tmp_path), 3
    full = {"w": random_bits((7, 2), torch.bfloat16, 3), "step": torch.tensor(4.0)}
    folder = store.begin(8)

    def write(rank: int) -> list[FileRecord]:
        shares = {name: share(tensor, rank, world_size) for name, tensor in full.items()}
        return write_shard(folder, rank, shares, {"rank": rank})

    with ThreadPoolExecutor(world_size) as pool:
        records = [record for of_rank in pool.map(write, range(world_size)) for record in of_rank]
    store.commit(8, {"version": 1}, records)
    manifest, folder, skipped = store.newest_verified()
    assert (manifest.step, skipped) == (8, []) and store.verify(folder).info == {"version": 1}
    assert {path.name for path in folder.iterdir()} == {"manifest.json"} | {
        f"rank_{rank:05d}.{kind}" for rank in range(world_size) for kind in ("json", "safetensors")
    }
    read_all(folder, full, 2)


def test_nothing_on_disk_is_a_pickle(tmp_path):
    write_all(tmp_path, {"w": torch.zeros(9, 2)}, 2)
    for path in tmp_path.glob("*.json"):
        json.loads(path.read_text())
    for path in tmp_path.glob("*.safetensors"):
        header_bytes = int.from_bytes(path.read_bytes()[:8], "little")
        json.loads(path.read_bytes()[8 : 8 + header_bytes])
