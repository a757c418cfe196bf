"""Headers are read as the safetensors library reads them, and what it refuses is refused by file, tensor and value."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from slimefsdp.errors import ModelError
from slimefsdp.io.safetensors_header import read_header
from tests.support.refusals import refused
from tests.support.tiers import examples

TWO_FLOATS = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def write_raw(file: Path, header: object, data: bytes = b"") -> None:
    """A safetensors file whose header is `header` (bytes as they are, else JSON) and whose tensor bytes are `data`."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def refusal(file: Path, *values: object) -> str:
    """What reading the header says, which names the file and each of `values`."""
    with refused(ModelError, None, file, *values) as caught:
        read_header(file)
    return caught.value.message


def test_dtype_shape_and_bytes_agree_with_the_safetensors_library(tmp_path: Path):
    torch.manual_seed(0)
    tensors = {
        "bf16": torch.randn(3, 5).bfloat16(),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "half": torch.randn(7).half(),
        "double": torch.randn(2, 1, 2).double(),
        "flags": torch.tensor([True, False, True]),
        "ids": torch.arange(6).view(2, 3),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "float8": torch.randn(9).to(torch.float8_e4m3fn),
    }
    file = tmp_path / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    found = read_header(file)
    with safe_open(file, "pt") as library:
        assert found.keys() == set(library.keys())
        for name, entry in found.items():
            view = library.get_slice(name)
            assert (entry.dtype, list(entry.shape)) == (view.get_dtype(), view.get_shape())
            expected = tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes()
            assert file.read_bytes()[entry.offset : entry.offset + entry.nbytes] == expected


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (b"", 0),
        (b"1234567", 7),
        ((9).to_bytes(8, "little") + b"{}", 9),
        ((2**63).to_bytes(8, "little") + b"{}", 2**63),
        ((0).to_bytes(8, "little"), "JSON"),
    ],
)
def test_a_file_with_an_impossible_header_length_is_refused(tmp_path: Path, content: bytes, value: object):
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    refusal(file, value)
    with pytest.raises(SafetensorError):
        safe_open(file, "pt")


def test_a_header_over_the_limit_is_refused_even_where_the_file_is_long_enough(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.write((100_000_001).to_bytes(8, "little"))
        stream.truncate(100_000_100)  # sparse
    refusal(file, 100_000_001, 100_000_000)


def pair(**second: object) -> dict[str, object]:
    return {"a": TWO_FLOATS, "b": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12], **second}}


@pytest.mark.parametrize(
    ("header", "values"),
    [
        (b"{]", ["JSON"]),
        (b'{"a": 1', ["JSON"]),
        (b"\xff{}", ["JSON"]),
        (b"[]", ["list"]),
        (pair(data_offsets=[4, 8]), ["'b'", "byte"]),
        (pair(data_offsets=[9, 13]), ["'b'", "byte"]),
        (pair(data_offsets=[12, 8]), ["'b'", "data_offsets", [12, 8]]),
        (pair(data_offsets=[8]), ["'b'", "data_offsets", [8]]),
        (pair(data_offsets=[-4, 0]), ["'b'", "data_offsets", [-4, 0]]),
        (pair(data_offsets=[8, 12.0]), ["'b'", "data_offsets", [8, 12.0]]),
        (pair(data_offsets=[8, 2**64 + 8]), ["'b'", "data_offsets", "[8, "]),
        (pair(data_offsets=None), ["'b'", "data_offsets", None]),
        (pair(shape=[2]), ["'b'", [2], "F32", 4]),
        (pair(shape=[2**62, 2**62]), ["'b'", 4]),
        (pair(shape=[-1]), ["'b'", "shape", [-1]]),
        (pair(shape=[True]), ["'b'", "shape", [True]]),
        (pair(shape=[1.0]), ["'b'", "shape", [1.0]]),
        (pair(shape="1"), ["'b'", "shape", "'1'"]),
        (pair(dtype="F33"), ["'b'", "dtype", "'F33'"]),
        (pair(dtype=None), ["'b'", "dtype", None]),
        (pair(dtype=["F32"]), ["'b'", "dtype", ["F32"]]),
        (pair(dtype="F64"), ["'b'", "F64", 4]),
        ({"a": TWO_FLOATS, "b": [1]}, ["'b'", [1]]),
        ({"a": TWO_FLOATS}, [81, 77]),
        (pair(shape=[2], data_offsets=[8, 16]), [143, 147]),
    ],
)
def test_a_header_that_breaks_the_format_is_refused_by_us_and_by_the_library(
    tmp_path: Path, header: object, values: list[object]
):
    file = tmp_path / "model.safetensors"
    write_raw(file, header, bytes(12))
    refusal(file, *values)
    with pytest.raises(SafetensorError):
        safe_open(file, "pt")


def test_a_tensor_named_twice_in_one_header_is_refused(tmp_path: Path):
    entry = json.dumps(TWO_FLOATS).encode()
    file = tmp_path / "model.safetensors"
    write_raw(file, b'{"a": ' + entry + b', "a": ' + entry + b"}", bytes(8))
    refusal(file, "'a'")


def test_a_header_full_of_absurd_values_makes_a_short_message(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    for absurd in ({"shape": [2**62] * 100_000}, {"dtype": "F" * 10**6}, {"shape": ["9" * 10**6]}):
        write_raw(file, pair(**absurd), bytes(12))
        assert len(refusal(file)) < 1000


@examples(150)
@given(position=st.integers(0, 10**6), value=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_file_is_refused_or_read_as_the_library_reads_it(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int, cut: bool
):
    """One byte of the header changed, or the file cut there: never another exception, never another answer."""
    file = tmp_path_factory.mktemp("damaged") / "model.safetensors"
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(3, dtype=torch.int16)}, file)
    content = bytearray(file.read_bytes())
    position %= 8 + int.from_bytes(content[:8], "little")
    content[position] = value
    file.write_bytes(content[:position] if cut else content)
    try:
        found = {name: (entry.dtype, list(entry.shape)) for name, entry in read_header(file).items()}
    except ModelError:
        return
    with safe_open(file, "pt") as library:
        slices = {name: library.get_slice(name) for name in library.keys()}  # noqa: SIM118 (it is no dict)
        assert found == {name: (view.get_dtype(), view.get_shape()) for name, view in slices.items()}
