"""A model folder is read as transformers would read it, and a malformed one is refused by name."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slimefsdp.errors import ModelError
from slimefsdp.models.hf_folder import (
    ModelFolder,
    check_architecture,
    read_model_folder,
)
from tests.support.refusals import refused

CONFIG = {"model_type": "qwen3", "vocab_size": 320, "tie_word_embeddings": False}


def write_floats(file: Path, *names: str) -> None:
    save_file({name: torch.zeros(1) for name in names}, file)


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refusal(folder: Path, *values: object) -> ModelError:
    """What reading the folder raises, which names each of `values`."""
    with refused(ModelError, "model.path", *values) as caught:
        read_model_folder(folder)
    assert isinstance(caught.value, ModelError)
    return caught.value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that lacks only its weights."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_an_unsupported_architecture_is_refused_with_the_supported_ones(folder: Path):
    write_floats(folder / "model.safetensors", "a")
    check_architecture(read_model_folder(folder))
    (folder / "config.json").write_text('{"model_type": "mamba", "vocab_size": 8}')
    with refused(ModelError, "reference.path", "'mamba'", folder) as caught:
        check_architecture(read_model_folder(folder), field="reference.path")
    assert "qwen3" in str(caught.value.hint)


@pytest.mark.parametrize("model_type", ["qwen3_5", "llava"])
def test_a_model_of_several_parts_is_refused_for_its_type_though_its_vocabulary_lies_deeper(
    folder: Path, model_type: str
):
    config = {"model_type": model_type, "text_config": {"vocab_size": 8}}
    (folder / "config.json").write_text(json.dumps(config))  # and no weights: those come second
    with refused(ModelError, "reference.path", repr(model_type), folder):
        read_model_folder(folder, field="reference.path")


def test_without_weights_a_folder_needs_its_configuration_alone(folder: Path):
    with refused(ModelError, "model.path", folder, ".safetensors"):
        read_model_folder(folder)
    (folder / "model.safetensors").write_bytes(b"no header")  # and is not looked at
    model = read_model_folder(folder, with_weights=False)
    assert (model.tensors, model.has_weights, model.config) == ({}, False, CONFIG)
    (folder / "model.safetensors").unlink()
    write_floats(folder / "model.safetensors", "a")
    assert read_model_folder(folder).has_weights


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


def test_files_that_a_hub_cache_shares_between_models_are_its_own(tmp_path: Path):
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    write_floats(snapshot / "model.safetensors", "a")
    blobs, shared = snapshot.parents[1] / "blobs", tmp_path / "blobs" / "ab"
    for folder in (blobs, shared):
        folder.mkdir(parents=True)
    (shared / "abcd").write_text("{}")
    (blobs / "123").symlink_to("../../blobs/ab/abcd")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/123")
    assert read_model_folder(snapshot).extra_files == (snapshot / "tokenizer.json",)
    (tmp_path / "secret").write_text("{}")
    (blobs / "123").unlink()
    (blobs / "123").symlink_to("../../secret")
    refusal(snapshot, snapshot / "tokenizer.json", tmp_path / "secret")


def test_a_folder_that_is_not_there_is_refused_with_the_ways_to_have_one_of_the_hub():
    error = refusal(Path("no-such-owner/no-such-model"), "'no-such-owner/no-such-model'")
    assert "hf download" in str(error.hint)


def test_a_folder_without_config_is_refused(tmp_path: Path):
    write_floats(tmp_path / "model.safetensors", "a")
    refusal(tmp_path, tmp_path, "config.json")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt", "weights.pth"])
def test_pickle_checkpoints_are_refused_with_the_way_to_convert_them(folder: Path, name: str):
    (folder / name).write_bytes(pickle.dumps({}))
    assert "convert" in str(refusal(folder, folder, repr(name)).hint)


def test_a_git_lfs_pointer_is_refused_with_the_way_to_fetch_the_file(folder: Path):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n")
    assert "git lfs pull" in str(refusal(folder, folder / "model.safetensors", "Git LFS").hint)


def test_an_index_that_names_a_missing_file_is_refused(folder: Path):
    write_floats(folder / "1.safetensors", "a")
    write_index(folder, {"a": "1.safetensors", "b": "2.safetensors"})
    refusal(folder, folder / "2.safetensors")


@pytest.mark.parametrize("held_elsewhere", [False, True])
def test_an_index_that_names_a_tensor_its_file_lacks_is_refused(folder: Path, held_elsewhere: bool):
    write_floats(folder / "1.safetensors", "a")
    write_floats(folder / "2.safetensors", *(["c", "b"] if held_elsewhere else ["c"]))
    write_index(folder, {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"})
    refusal(folder, folder / "model.safetensors.index.json", "'b'", "'1.safetensors'")


@pytest.mark.parametrize("is_indexed", [False, True])
def test_a_tensor_in_two_files_is_refused(folder: Path, is_indexed: bool):
    write_floats(folder / "1.safetensors", "a", "b")
    write_floats(folder / "2.safetensors", "b", "c")
    if is_indexed:
        write_index(folder, {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"})
    refusal(folder, "'b'", folder / "1.safetensors", folder / "2.safetensors")
