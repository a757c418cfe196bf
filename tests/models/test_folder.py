from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from slimefsdp.errors import ModelError
from slimefsdp.models.folder import EXTRA_FILES, ModelFolder, read_model_folder

CONFIG = {"model_type": "qwen3", "vocab_size": 320, "tie_word_embeddings": False}
TWO_FLOATS = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def write_raw(file: Path, header: object, data: bytes = b"") -> None:
    """A safetensors file whose header is `header` (bytes as they are, else JSON) and whose tensor bytes are `data`."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def write_floats(file: Path, *names: str) -> None:
    header = {n: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, n in enumerate(names)}
    write_raw(file, header, bytes(4 * len(names)))


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refusal(folder: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        read_model_folder(folder)
    assert caught.value.field == "model.path" and caught.value.hint
    return caught.value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that lacks only its weights."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture
def every_dtype() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
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


def test_dtype_shape_and_bytes_agree_with_the_safetensors_library(folder: Path, every_dtype: dict[str, torch.Tensor]):
    file = folder / "model.safetensors"
    save_file(every_dtype, file, metadata={"format": "pt"})
    found = read_model_folder(folder).tensors
    with safe_open(file, "pt") as library:
        assert found.keys() == set(library.keys())
        for name, entry in found.items():
            view = library.get_slice(name)
            assert (entry.dtype, list(entry.shape)) == (view.get_dtype(), view.get_shape())
            expected = every_dtype[name].reshape(-1).view(torch.uint8).numpy().tobytes()
            assert file.read_bytes()[entry.offset : entry.offset + entry.nbytes] == expected


def test_what_config_json_says_is_given_and_what_it_leaves_out_is_none(folder: Path):
    write_floats(folder / "model.safetensors", "a")
    model = read_model_folder(folder)
    assert model.config == CONFIG and model.path == folder
    assert (model.model_type, model.vocab_size, model.tie_word_embeddings) == ("qwen3", 320, False)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    model = read_model_folder(str(folder))
    assert (model.model_type, model.vocab_size, model.tie_word_embeddings) == ("llama", None, None)


def test_only_the_tokenizer_and_generation_files_that_exist_are_listed(folder: Path):
    write_floats(folder / "model.safetensors", "a")
    for name in (*EXTRA_FILES[::2], "README.md", "modeling.py"):
        (folder / name).write_text("x")
    assert read_model_folder(folder).extra_files == tuple(folder / name for name in EXTRA_FILES[::2])


def test_a_folder_survives_the_way_to_another_process(folder: Path):
    write_floats(folder / "model.safetensors", "a", "b")
    model = read_model_folder(folder)
    copy: ModelFolder = pickle.loads(pickle.dumps(model))
    assert copy == model


def test_several_files_without_an_index_are_read_together(folder: Path):
    write_floats(folder / "part-1.safetensors", "a", "b")
    write_floats(folder / "part-2.safetensors", "c")
    (folder / "._part-1.safetensors").write_bytes(b"left by a file manager")
    assert {n: e.file.name for n, e in read_model_folder(folder).tensors.items()} == {
        "a": "part-1.safetensors",
        "b": "part-1.safetensors",
        "c": "part-2.safetensors",
    }


def test_model_safetensors_alone_is_read_where_other_formats_lie_beside_it(folder: Path):
    write_floats(folder / "model.safetensors", "a")
    write_floats(folder / "consolidated.safetensors", "other.naming.a")
    assert set(read_model_folder(folder).tensors) == {"a"}


def test_an_index_decides_which_files_are_read(folder: Path):
    (folder / "shards").mkdir()
    write_floats(folder / "shards" / "1.safetensors", "a")
    write_floats(folder / "2.safetensors", "b")
    write_floats(folder / "consolidated.safetensors", "a")
    write_index(folder, {"a": "shards/1.safetensors", "b": "2.safetensors"})
    tensors = read_model_folder(folder).tensors
    assert (tensors["a"].file, tensors["b"].file) == (folder / "shards/1.safetensors", folder / "2.safetensors")


def test_links_that_leave_the_folder_are_followed_as_in_a_hub_cache(folder: Path):
    (folder / "blobs").mkdir()
    snapshot = folder / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    write_floats(folder / "blobs" / "123", "a")
    (snapshot / "config.json").symlink_to("../../config.json")
    (snapshot / "model-00001-of-00001.safetensors").symlink_to("../../blobs/123")
    write_index(snapshot, {"a": "model-00001-of-00001.safetensors"})
    assert set(read_model_folder(snapshot).tensors) == {"a"}


def test_errors_name_the_field_that_the_caller_gives(tmp_path: Path):
    with pytest.raises(ModelError) as caught:
        read_model_folder(tmp_path / "none", field="reference.path")
    assert caught.value.field == "reference.path"


def test_a_hub_id_is_refused_with_the_way_to_download_it():
    error = refusal(Path("no-such-owner/no-such-model"))
    assert "'no-such-owner/no-such-model' does not exist" in error.message
    assert error.hint is not None and "local folder" in error.hint and "hf download" in error.hint


def test_a_file_is_refused_as_a_folder(folder: Path):
    write_floats(folder / "model.safetensors", "a")
    assert "model.safetensors is a file" in refusal(folder / "model.safetensors").message


def test_an_unknown_home_or_an_impossible_name_is_a_model_error():
    refusal(Path("~no-such-user-anywhere/model"))
    refusal(Path("x" * 5000))


def test_a_folder_without_config_is_refused(tmp_path: Path):
    write_floats(tmp_path / "model.safetensors", "a")
    assert "has no config.json" in refusal(tmp_path).message


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"{", "valid JSON"),
        (b"\xff\xfe{}", "valid JSON"),
        (b'{"a": ' * 100_000, "valid JSON"),
        (b"[1]", "list instead of an object"),
        (b'{"model_type": "a", "model_type": "b"}', "'model_type' occurs twice"),
        (b"{}", "model_type = None"),
        (b'{"model_type": 3}', "model_type = 3"),
        (b'{"model_type": "a", "vocab_size": "320"}', "vocab_size = '320'"),
        (b'{"model_type": "a", "vocab_size": true}', "vocab_size = True"),
        (b'{"model_type": "a", "tie_word_embeddings": "no"}', "tie_word_embeddings = 'no'"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n", "Git LFS pointer"),
    ],
)
def test_a_malformed_config_is_refused_by_name(folder: Path, content: bytes, part: str):
    write_floats(folder / "model.safetensors", "a")
    (folder / "config.json").write_bytes(content)
    error = refusal(folder)
    assert part in error.message and str(folder / "config.json") in error.message


def test_a_folder_without_weights_is_refused(folder: Path):
    assert "no .safetensors file" in refusal(folder).message


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt", "weights.pth"])
def test_pickle_checkpoints_are_refused_with_the_way_to_convert_them(folder: Path, name: str):
    (folder / name).write_bytes(pickle.dumps({}))
    error = refusal(folder)
    assert name in error.message and "pickle checkpoints are refused" in error.message
    assert error.hint is not None and "convert" in error.hint


def test_a_dangling_link_is_refused(folder: Path):
    (folder / "model-1.safetensors").symlink_to("blobs/gone")
    assert "model-1.safetensors is a link to nothing" in refusal(folder).message


def test_a_folder_named_like_weights_is_refused(folder: Path):
    (folder / "model.safetensors").mkdir()
    assert "is no regular file" in refusal(folder).message


def test_a_git_lfs_pointer_is_refused_with_the_way_to_fetch_the_file(folder: Path):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n")
    error = refusal(folder)
    assert "model.safetensors is a Git LFS pointer" in error.message
    assert error.hint is not None and "git lfs pull" in error.hint


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "a/../../x.safetensors", "/etc/x.safetensors", "..\\x.safetensors", "C:\\x.safetensors"],
)
def test_an_index_that_points_outside_the_folder_is_refused_even_where_the_file_exists(folder: Path, name: str):
    inner = folder / "inner"
    inner.mkdir()
    write_floats(folder / "x.safetensors", "a")
    (inner / "config.json").write_text(json.dumps(CONFIG))
    write_index(inner, {"a": name})
    error = refusal(inner)
    assert repr(name) in error.message and "outside the folder" in error.message


def test_an_index_that_names_a_missing_file_is_refused(folder: Path):
    write_floats(folder / "1.safetensors", "a")
    write_index(folder, {"a": "1.safetensors", "b": "2.safetensors"})
    assert f"{folder / '2.safetensors'} is missing" in refusal(folder).message


@pytest.mark.parametrize("held_elsewhere", [False, True])
def test_an_index_that_names_a_tensor_its_file_lacks_is_refused(folder: Path, held_elsewhere: bool):
    write_floats(folder / "1.safetensors", "a")
    write_floats(folder / "2.safetensors", *(["c", "b"] if held_elsewhere else ["c"]))
    write_index(folder, {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"})
    assert "'b' in '1.safetensors', which does not hold it" in refusal(folder).message


@pytest.mark.parametrize("weight_map", [None, {}, [], {"a": 3}, {"a": None}, {"a": "model.bin"}, {"a": ""}])
def test_an_index_without_usable_file_names_is_refused(folder: Path, weight_map: object):
    write_index(folder, weight_map)
    assert "model.safetensors.index.json" in refusal(folder).message


def test_an_index_that_is_no_json_is_refused(folder: Path):
    (folder / "model.safetensors.index.json").write_text("{")
    assert "index.json does not hold valid JSON" in refusal(folder).message


def test_model_safetensors_beside_an_index_of_other_files_is_refused(folder: Path):
    write_floats(folder / "model.safetensors", "a")
    write_floats(folder / "1.safetensors", "a")
    write_index(folder, {"a": "1.safetensors"})
    assert "an index that does not name it" in refusal(folder).message


@pytest.mark.parametrize("is_indexed", [False, True])
def test_a_tensor_in_two_files_is_refused(folder: Path, is_indexed: bool):
    write_floats(folder / "1.safetensors", "a", "b")
    write_floats(folder / "2.safetensors", "b", "c")
    if is_indexed:
        write_index(folder, {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"})
    error = refusal(folder)
    assert "'b' is in two files" in error.message and "1.safetensors" in error.message


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "has 0 bytes"),
        (b"1234567", "has 7 bytes"),
        ((9).to_bytes(8, "little") + b"{}", "claims a header of 9 bytes"),
        ((2**63).to_bytes(8, "little") + b"{}", f"claims a header of {2**63} bytes"),
        ((0).to_bytes(8, "little"), "valid JSON"),
    ],
)
def test_a_file_with_an_impossible_header_length_is_refused(folder: Path, content: bytes, part: str):
    file = folder / "model.safetensors"
    file.write_bytes(content)
    error = refusal(folder)
    assert part in error.message and str(file) in error.message
    with pytest.raises(SafetensorError):
        safe_open(file, "pt")


def test_a_header_over_the_limit_is_refused_even_where_the_file_is_long_enough(folder: Path):
    file = folder / "model.safetensors"
    with file.open("wb") as stream:
        stream.write((100_000_001).to_bytes(8, "little"))
        stream.truncate(100_000_100)  # sparse
    assert "the limit is 100000000" in refusal(folder).message


def pair(**second: object) -> dict[str, object]:
    return {"a": TWO_FLOATS, "b": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12], **second}}


@pytest.mark.parametrize(
    ("header", "part"),
    [
        (b"{]", "valid JSON"),
        (b'{"a": 1', "valid JSON"),
        (b"\xff{}", "valid JSON"),
        (b"[]", "list instead of an object"),
        (pair(data_offsets=[4, 8]), "'b' starts at byte"),
        (pair(data_offsets=[9, 13]), "leaves a gap"),
        (pair(data_offsets=[12, 8]), "data_offsets [12, 8]"),
        (pair(data_offsets=[8]), "data_offsets [8]"),
        (pair(data_offsets=[-4, 0]), "data_offsets [-4, 0]"),
        (pair(data_offsets=[8, 12.0]), "data_offsets [8, 12.0]"),
        (pair(data_offsets=[8, 2**64 + 8]), "data_offsets [8, "),
        (pair(data_offsets=None), "data_offsets None"),
        (pair(shape=[2]), "shape [2] and dtype F32 does not fill the 4 bytes"),
        (pair(shape=[2**62, 2**62]), "does not fill the 4 bytes"),
        (pair(shape=[-1]), "shape [-1]"),
        (pair(shape=[True]), "shape [True]"),
        (pair(shape=[1.0]), "shape [1.0]"),
        (pair(shape="1"), "shape '1'"),
        (pair(dtype="F33"), "dtype 'F33'"),
        (pair(dtype=None), "dtype None"),
        (pair(dtype=["F32"]), "dtype ['F32']"),
        (pair(dtype="F64"), "does not fill the 4 bytes"),
        ({"a": TWO_FLOATS, "b": [1]}, "'b' is described by [1]"),
        ({"a": TWO_FLOATS}, "tensors end at byte"),
        (pair(shape=[2], data_offsets=[8, 16]), "tensors end at byte"),
    ],
)
def test_a_header_that_breaks_the_format_is_refused_by_us_and_by_the_library(folder: Path, header: object, part: str):
    file = folder / "model.safetensors"
    write_raw(file, header, bytes(12))
    error = refusal(folder)
    assert part in error.message and str(file) in error.message
    with pytest.raises(SafetensorError):
        safe_open(file, "pt")


def test_a_tensor_named_twice_in_one_header_is_refused(folder: Path):
    entry = json.dumps(TWO_FLOATS).encode()
    write_raw(folder / "model.safetensors", b'{"a": ' + entry + b', "a": ' + entry + b"}", bytes(8))
    assert "'a' occurs twice" in refusal(folder).message


def test_a_header_full_of_absurd_values_makes_a_short_message(folder: Path):
    for absurd in ({"shape": [2**62] * 100_000}, {"dtype": "F" * 10**6}, {"shape": ["9" * 10**6]}):
        write_raw(folder / "model.safetensors", pair(**absurd), bytes(12))
        assert len(refusal(folder).message) < 1000


@settings(max_examples=150, deadline=None)
@given(position=st.integers(0, 10**6), value=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_file_is_refused_or_read_as_the_library_reads_it(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int, cut: bool
):
    """One byte of the header changed, or the file cut there: never another exception, never another answer."""
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    file = folder / "model.safetensors"
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(3, dtype=torch.int16)}, file)
    content = bytearray(file.read_bytes())
    position %= 8 + int.from_bytes(content[:8], "little")
    content[position] = value
    file.write_bytes(content[:position] if cut else content)
    try:
        found = {name: (entry.dtype, list(entry.shape)) for name, entry in read_model_folder(folder).tensors.items()}
    except ModelError:
        return
    with safe_open(file, "pt") as library:
        slices = {name: library.get_slice(name) for name in library.keys()}  # noqa: SIM118 (it is no dict)
        assert found == {name: (view.get_dtype(), view.get_shape()) for name, view in slices.items()}


def test_importing_the_reader_loads_none_of_the_heavy_libraries():
    heavy = ("torch", "transformers", "ray", "safetensors", "numpy", "pydantic")
    code = f"import sys, slimefsdp.models.folder; print([m for m in {heavy!r} if m in sys.modules])"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
