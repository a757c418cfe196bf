"""Files are written out of tensors' memory and read into it, bit for bit, and safetensors' own library agrees."""

from __future__ import annotations

import errno
import math
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from slimefsdp.errors import CheckpointError
from slimefsdp.io import safetensors_file
from slimefsdp.io.files import FileRecord, record_of
from slimefsdp.io.safetensors_file import DTYPE_NAMES, TensorFileWriter, TensorSpec, read_rows
from slimefsdp.io.safetensors_header import read_header
from tests.support.refusals import refused
from tests.support.tiers import examples

DTYPES = list(DTYPE_NAMES)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Every bit random, so NaN payloads, infinities and subnormals occur."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    raw = torch.randint(256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    as_bytes = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right)]
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*as_bytes)


def specs_of(tensors: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def written(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> FileRecord:
    with TensorFileWriter(path, specs_of(tensors), metadata=metadata) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    return writer.close()


def mixed() -> dict[str, torch.Tensor]:
    """Every dtype and odd shapes, wider dtypes first."""
    shapes = [(), (1,), (7, 3), (0, 4), (4, 0), (2, 3, 5)]
    tensors = {f"{dtype}.{shape}": random_bits(shape, dtype, len(shape)) for dtype in DTYPES for shape in shapes}
    return dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))


def test_safetensors_own_library_reads_every_dtype_and_shape(tmp_path):
    path, tensors = tmp_path / "x", mixed()
    record = written(path, tensors, {"format": "pt"})
    assert record == record_of(path)
    read = load_file(path)
    assert read.keys() == tensors.keys() and all(same_bits(read[name], tensors[name]) for name in tensors)
    header_bytes = int.from_bytes(path.read_bytes()[:8], "little")
    assert header_bytes % 8 == 0 and b'"__metadata__":{"format":"pt"}' in path.read_bytes()[: 8 + header_bytes]


@examples(60)
@given(
    shape=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    rows=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    chunk_bytes=st.sampled_from([8, 24, 1 << 20]),
    is_transposed=st.booleans(),
)
def test_any_rows_of_any_strides_come_back_in_pieces_of_any_size(
    tmp_path_factory, shape, dtype, rows, chunk_bytes, is_transposed
):
    path = tmp_path_factory.mktemp("file") / "x"
    full = random_bits(tuple(shape), dtype)
    saved = full.transpose(0, -1).contiguous().transpose(0, -1) if is_transposed else full
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_file, "_CHUNK_BYTES", chunk_bytes)
        written(path, {"w": saved})
    start, end = sorted(min(row, shape[0]) for row in rows)
    target = torch.empty_like(full[start:end])
    if is_transposed:
        target = target.transpose(0, -1).contiguous().transpose(0, -1)
    with path.open("rb") as stream:
        read_rows(stream, read_header(path).tensors["w"], start, end, target, buffer_bytes=chunk_bytes)
    assert same_bits(target, full[start:end])


@pytest.mark.parametrize("buffer_bytes", [2, 100, 1 << 20])
def test_values_are_converted_where_the_target_is_of_another_dtype(tmp_path, buffer_bytes):
    saved = torch.randn(7, 5).bfloat16()
    written(tmp_path / "x", {"w": saved})
    entry = read_header(tmp_path / "x").tensors["w"]
    target = torch.nn.Parameter(torch.zeros(3, 5))
    with (tmp_path / "x").open("rb") as stream:
        read_rows(stream, entry, 2, 5, target, buffer_bytes=buffer_bytes)
    assert torch.equal(target, saved[2:5].float()) and target.grad_fn is None


def test_a_view_is_filled_and_its_neighbours_are_not(tmp_path):
    full = torch.arange(24.0).view(6, 4)
    written(tmp_path / "x", {"w": full})
    flat = torch.full((60,), -1.0)
    with (tmp_path / "x").open("rb") as stream:
        read_rows(stream, read_header(tmp_path / "x").tensors["w"], 1, 4, flat[20:32].view(3, 4))
        read_rows(stream, read_header(tmp_path / "x").tensors["w"], 0, 2, flat[40:56].view(2, 8)[:, :4])
    assert torch.equal(flat[20:32], full[1:4].reshape(-1))
    assert torch.equal(flat[40:44], full[0]) and torch.equal(flat[48:52], full[1])
    assert flat.eq(-1).sum() == 60 - 12 - 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("missing", [1, 4, 50])
def test_a_short_file_raises_and_names_itself(tmp_path, dtype, missing):
    path = tmp_path / "x"
    written(path, {"w": torch.ones(8, 4)})
    entry = read_header(path).tensors["w"]
    path.write_bytes(path.read_bytes()[:-missing])
    with path.open("rb") as stream, pytest.raises(OSError) as caught:
        read_rows(stream, entry, 0, 8, torch.zeros(8, 4, dtype=dtype))
    assert caught.value.filename == str(path) and caught.value.errno == errno.EIO


WEIGHT = torch.zeros(2, 3)


@pytest.mark.parametrize(
    "name, tensor", [("b", WEIGHT), ("a", WEIGHT.double()), ("a", WEIGHT.T), ("a", WEIGHT[0]), ("a", WEIGHT[:0])]
)
def test_what_was_not_announced_is_not_written(tmp_path, name, tensor):
    with (
        refused(CheckpointError, name, tmp_path / "x"),
        TensorFileWriter(tmp_path / "x", specs_of({"a": WEIGHT})) as w,
    ):
        w.write(name, tensor)


@pytest.mark.parametrize(
    "specs, name, value",
    [
        ([TensorSpec("a", torch.float32, (1,))] * 2, "a", "a"),
        ([TensorSpec("__metadata__", torch.float32, (1,))], "__metadata__", "__metadata__"),
        ([TensorSpec("a", torch.complex64, (1,))], "a", torch.complex64),
        ([TensorSpec("b", torch.uint8, (3,)), TensorSpec("a", torch.float32, (1,))], "a", 3),
    ],
)
def test_a_header_that_no_reader_would_take_is_refused_before_there_is_a_file(tmp_path, specs, name, value):
    with refused(CheckpointError, name, value):
        TensorFileWriter(tmp_path / "x", specs)
    assert not (tmp_path / "x").exists()


def test_no_copy_of_a_tensor_is_made(tmp_path, monkeypatch):
    tensor = torch.ones(4 << 20)
    written_from = []
    memory = safetensors_file.memory_of
    monkeypatch.setattr(
        safetensors_file, "memory_of", lambda t: written_from.append((t.data_ptr(), t.nbytes)) or memory(t)
    )
    tracemalloc.start()
    written(tmp_path / "x", {"w": tensor})
    with (tmp_path / "x").open("rb") as stream:
        read_rows(stream, read_header(tmp_path / "x").tensors["w"], 0, len(tensor), tensor)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    *chunks, target = written_from
    assert target == (tensor.data_ptr(), tensor.nbytes)
    assert [address for address, _ in chunks] == [tensor.data_ptr() + i * (1 << 20) for i in range(16)]
    assert peak < 1 << 20
