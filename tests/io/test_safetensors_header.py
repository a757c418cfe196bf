"""Headers give the places of tensors' bytes, and files that break the format are refused by name."""

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
from slimefsdp.io.safetensors_header import _DTYPE_BITS, read_header
from tests.support.refusals import refused
from tests.support.tiers import examples

TENSORS = {
    "bf16": torch.linspace(-3, 3, 15).view(3, 5).bfloat16(),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
    "half": torch.linspace(0, 1, 7).half(),
    "double": torch.linspace(0, 1, 4).double().view(2, 1, 2),
    "flags": torch.tensor([True, False, True]),
    "ids": torch.arange(6).view(2, 3),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "float8": torch.linspace(-1, 1, 9).to(torch.float8_e4m3fn),
}


def write_raw(file: Path, header: object, data: bytes = b"") -> None:
    """Writes a file with this header (bytes as they are, anything else as JSON) and these tensor bytes."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def test_dtype_shape_and_bytes_agree_with_the_safetensors_library(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file, metadata={"format": "pt"})
    found = read_header(file)
    assert found.tensors.keys() == TENSORS.keys() and found.metadata == {"format": "pt"}
    with safe_open(file, "pt") as library:
        for name, entry in found.tensors.items():
            view = library.get_slice(name)
            assert (entry.dtype, list(entry.shape)) == (view.get_dtype(), view.get_shape())
            expected = TENSORS[name].reshape(-1).view(torch.uint8).numpy().tobytes()
            assert file.read_bytes()[entry.offset : entry.offset + entry.nbytes] == expected


@pytest.mark.parametrize("dtype", _DTYPE_BITS)
def test_every_dtype_of_the_format_has_its_size(tmp_path: Path, dtype: str):
    nbytes = _DTYPE_BITS[dtype]  # of eight numbers
    write_raw(tmp_path / "x", {"a": {"dtype": dtype, "shape": [8], "data_offsets": [0, nbytes]}}, bytes(nbytes))
    assert read_header(tmp_path / "x").tensors["a"].nbytes == nbytes


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header",
    [
        b"{]", b"\xff{}", b"[]", {"a": ENTRY, "b": ENTRY}, {"a": ENTRY | {"shape": [2**62, 2**62]}},
        {"a": ENTRY | {"shape": [2**62] * 100_000}}, {"a": ENTRY | {"dtype": "F" * 10**6}},
        {"a": ENTRY | {"shape": -1}},
        {"a": ENTRY | {"data_offsets": [4, 12]}}, {"a": ENTRY | {"data_offsets": [0, 4], "shape": [1]}},
    ],
)  # fmt: skip
def test_a_file_that_breaks_the_format_is_refused_by_its_name_in_a_short_message(tmp_path: Path, header: object):
    write_raw(tmp_path / "x", header, bytes(8))
    with refused(ModelError, None, tmp_path / "x") as caught:
        read_header(tmp_path / "x")
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize("content", [b"", b"1234567", (9).to_bytes(8, "little") + b"{}", bytes(8)])
def test_a_file_with_an_impossible_header_length_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / "x").write_bytes(content)
    with refused(ModelError, None, tmp_path / "x"):
        read_header(tmp_path / "x")


@examples(150)
@given(position=st.integers(0, 10**6), value=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_header_is_refused_or_gives_the_places_from_which_the_library_reads(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int, cut: bool
):
    """One byte of the header changed, or the file cut there: never another exception, never another answer."""
    file = tmp_path_factory.mktemp("damaged") / "model.safetensors"
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.arange(3, dtype=torch.int16)}, file)
    content = bytearray(file.read_bytes())
    position %= 8 + int.from_bytes(content[:8], "little")
    content[position] = value
    file.write_bytes(content[:position] if cut else content)
    try:
        found = read_header(file).tensors
    except ModelError:
        with pytest.raises(SafetensorError):
            safe_open(file, "pt")
        return
    with safe_open(file, "pt") as library:
        assert found.keys() == set(library.keys())
        for name, entry in found.items():
            raw = file.read_bytes()[entry.offset : entry.offset + entry.nbytes]
            assert raw == library.get_tensor(name).reshape(-1).view(torch.uint8).numpy().tobytes()


def test_the_order_of_metadata_and_of_empty_tensors_is_the_same_in_every_process(tmp_path: Path) -> None:
    names = [f"name{index}" for index in range(20)]
    empty = {name: torch.zeros(0, 2) for name in names}
    save_file(empty, tmp_path / "file.safetensors", dict.fromkeys(names, "value"))
    header = read_header(tmp_path / "file.safetensors")
    assert list(header.metadata) == sorted(names) == list(header.tensors)
