from __future__ import annotations

import errno
import json
import os
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from slimefsdp.checkpoint.export import write_model_folder
from slimefsdp.errors import CheckpointError
from slimefsdp.io import files
from slimefsdp.io.files import require_free_folder
from slimefsdp.io.safetensors_file import TensorFileWriter, TensorSpec
from slimefsdp.models.hf_folder import ModelFolder, read_model_folder
from tests.support.refusals import refused

Pairs = list[tuple[str, torch.Tensor]]
A = TensorSpec("a", torch.float32, (2,))


def tiny_qwen3(tied: bool) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=tied,
    )
    return Qwen3ForCausalLM(config).eval()


def pairs_of(model: torch.nn.Module) -> Pairs:
    """Every distinct parameter once: a tied head shares the embedding's."""
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def specs_of(pairs: Iterable[tuple[str, torch.Tensor]]) -> list[TensorSpec]:
    return [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in pairs]


def write(out: Path, pairs: Pairs, source: ModelFolder, **options: Any) -> None:
    write_model_folder(out, specs_of(pairs), pairs, source, **options)


def logits(model: torch.nn.Module) -> torch.Tensor:
    tokens = torch.arange(24).view(2, 12) % 97
    with torch.no_grad():
        return model(input_ids=tokens).logits


@pytest.fixture
def source(tmp_path: Path) -> ModelFolder:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "vocab_size": 8, "dtype": "float32", "kept": [1, None]})
    )
    (folder / "tokenizer.json").write_text('{"é": 1}')
    (folder / "merges.txt").write_text("a b")
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    return read_model_folder(folder)


def config_at(path: Path) -> dict[str, object]:
    return json.loads((path / "config.json").read_text())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_shard_bytes", [5 * 2**30, 6_000])
def test_transformers_opens_the_folder_with_the_same_logits(
    tmp_path: Path, tied: bool, dtype: str, max_shard_bytes: int
):
    model = tiny_qwen3(tied)
    model.save_pretrained(tmp_path / "source")
    assert ("lm_head.weight" in dict(model.named_parameters())) is not tied
    with torch.no_grad():
        for parameter in model.parameters():  # trained: the export must not copy the source's weights
            parameter.add_(0.1 * torch.randn_like(parameter))
    out = tmp_path / "out"
    source = read_model_folder(tmp_path / "source")
    write(out, pairs_of(model), source, dtype=dtype, max_shard_bytes=max_shard_bytes)

    assert (out / "model.safetensors.index.json").exists() is (max_shard_bytes == 6_000)
    opened, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert opened.dtype == getattr(torch, dtype) and config_at(out)["dtype"] == dtype
    for parameter in model.parameters():  # not model.to(): that would round the rotary frequencies too
        parameter.data = parameter.data.to(getattr(torch, dtype))
    assert torch.equal(logits(opened.eval()), logits(model))
    assert opened.config.tie_word_embeddings is tied


def test_a_written_folder_is_read_back_with_every_tensor_once(tmp_path: Path, source: ModelFolder):
    pairs = [(f"t{i}.{j}", torch.full((i + 1, 4), float(j))) for i in range(4) for j in range(3)]
    write(tmp_path / "out", pairs, source, max_shard_bytes=100)
    given = dict(pairs)
    found = read_model_folder(tmp_path / "out")
    assert {name: entry.shape for name, entry in found.tensors.items()} == {n: tuple(t.shape) for n, t in given.items()}
    loaded: dict[str, torch.Tensor] = {}
    for file in {entry.file for entry in found.tensors.values()}:
        loaded |= load_file(file)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in given.items())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in given.values())


def test_no_shard_exceeds_the_limit_unless_one_tensor_does(tmp_path: Path, source: ModelFolder):
    sizes = [5, 5, 3, 40, 1, 9, 10, 2]  # floats; the limit is 10
    write(tmp_path / "out", [(f"t{i}", torch.zeros(n)) for i, n in enumerate(sizes)], source, max_shard_bytes=40)
    found = read_model_folder(tmp_path / "out").tensors.values()
    files = sorted({entry.file for entry in found})
    held = [[entry.nbytes // 4 for entry in found if entry.file == file] for file in files]
    assert sorted(held) == sorted([[5, 5], [3], [40], [1, 9], [10], [2]])
    assert [file.name for file in files] == [f"model-{i:05d}-of-00006.safetensors" for i in range(1, 7)]
    for file in files:
        with safe_open(file, "pt") as library:
            assert library.metadata() == {"format": "pt"}


@pytest.mark.parametrize("max_shard_bytes", [1000, 5 * 2**30])
def test_each_tensor_is_written_and_let_go_before_the_next_is_made(
    tmp_path: Path, source: ModelFolder, max_shard_bytes: int
):
    alive: list[weakref.ref[torch.Tensor]] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(20):
            on_disk = sum(file.stat().st_size for file in tmp_path.glob(".out.*/*.safetensors"))
            assert on_disk >= 400 * i and not [ref for ref in alive if ref() is not None]
            tensor = torch.zeros(100)
            alive.append(weakref.ref(tensor))
            yield f"t{i}", tensor
            del tensor

    specs = [TensorSpec(f"t{i}", torch.float32, (100,)) for i in range(20)]
    write_model_folder(tmp_path / "out", specs, tensors(), source, max_shard_bytes=max_shard_bytes)
    assert len(alive) == 20


def test_a_producer_may_reuse_its_buffer_and_give_views_of_it(tmp_path: Path, source: ModelFolder):
    buffer = torch.empty(3, 4)

    def views(i: int) -> Pairs:
        return [(f"rows{i}", buffer[:2]), (f"transposed{i}", buffer.t()), (f"expanded{i}", buffer[:1].expand(5, 4))]

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(3):
            buffer.fill_(i)
            buffer[0, 1] = 10 + i
            yield from views(i)

    specs = specs_of(pair for i in range(3) for pair in views(i))
    write_model_folder(tmp_path / "out", specs, tensors(), source)
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    for i in range(3):
        expected = torch.full((3, 4), float(i))
        expected[0, 1] = 10 + i
        assert torch.equal(loaded[f"rows{i}"], expected[:2])
        assert torch.equal(loaded[f"transposed{i}"], expected.t())
        assert torch.equal(loaded[f"expanded{i}"], expected[:1].expand(5, 4))


def test_config_and_tokenizer_files_come_from_the_source_and_links_become_files(tmp_path: Path, source: ModelFolder):
    (source.path / "tokenizer.json").rename(tmp_path / "blob")
    (source.path / "tokenizer.json").symlink_to(tmp_path / "blob")
    write(tmp_path / "new" / "out", [("a", torch.ones(2))], source, dtype="float16")
    out = tmp_path / "new" / "out"
    assert config_at(out) == source.config | {"dtype": "float16"}
    assert (out / "tokenizer.json").read_text() == '{"é": 1}' and not (out / "tokenizer.json").is_symlink()
    assert {file.name for file in out.iterdir()} == {"config.json", "tokenizer.json", "merges.txt", "model.safetensors"}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {"dtype": "bfloat16"}),
        ({"torch_dtype": "float32"}, {"torch_dtype": "bfloat16"}),
        ({"torch_dtype": "float32", "dtype": "float32"}, {"torch_dtype": "bfloat16", "dtype": "bfloat16"}),
    ],
)
def test_config_states_the_dtype_under_the_keys_it_had(
    tmp_path: Path, source: ModelFolder, keys: dict[str, str], expected: dict[str, str]
):
    (source.path / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 8, **keys}))
    write(tmp_path / "out", [("a", torch.ones(2).bfloat16())], read_model_folder(source.path))
    assert config_at(tmp_path / "out") == {"model_type": "qwen3", "vocab_size": 8, **expected}


def test_without_dtype_each_tensor_keeps_its_own_and_config_states_one_that_holds_all(
    tmp_path: Path, source: ModelFolder
):
    mixed = [("a", torch.ones(3).bfloat16()), ("b", torch.ones(2)), ("ids", torch.arange(3))]
    write(tmp_path / "own", mixed, source)
    written = read_model_folder(tmp_path / "own").tensors
    assert {name: entry.dtype for name, entry in written.items()} == {"a": "BF16", "b": "F32", "ids": "I64"}
    assert all(torch.equal(load_file(entry.file)[name], dict(mixed)[name]) for name, entry in written.items())
    assert config_at(tmp_path / "own")["dtype"] == "float32"
    write(tmp_path / "cast", mixed, source, dtype="bfloat16")
    written = read_model_folder(tmp_path / "cast").tensors
    assert {name: entry.dtype for name, entry in written.items()} == {"a": "BF16", "b": "BF16", "ids": "I64"}


def test_weights_are_as_readable_as_the_config(tmp_path: Path, source: ModelFolder):
    write(tmp_path / "out", [("a", torch.ones(2))], source)
    modes = {file.name: file.stat().st_mode for file in (tmp_path / "out").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_an_empty_folder_is_filled_and_one_with_content_is_left_alone(tmp_path: Path, source: ModelFolder):
    out = tmp_path / "out"
    out.mkdir()
    write(out, [("a", torch.ones(2))], source)
    before = {file.name: file.read_bytes() for file in out.iterdir()}

    def never() -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError("asked for weights that cannot be written")
        yield "a", torch.ones(2)

    with refused(CheckpointError, "path", out):
        write_model_folder(out, [A], never(), source)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


def test_what_cannot_be_replaced_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("x")
    (tmp_path / "volume").mkdir()
    require_free_folder(tmp_path / "volume")
    require_free_folder(tmp_path / "absent")
    with refused(CheckpointError, "path", tmp_path / "file"):
        require_free_folder(tmp_path / "file")
    monkeypatch.setattr(Path, "is_mount", lambda self: self.name == "volume")
    with refused(CheckpointError, "path", tmp_path / "volume"):
        require_free_folder(tmp_path / "volume")


def test_a_folder_filled_meanwhile_is_not_overwritten(tmp_path: Path, source: ModelFolder):
    out = tmp_path / "out"

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        out.mkdir()
        (out / "other").write_text("theirs")
        yield "a", torch.ones(2)

    with refused(CheckpointError, "path", out, os.strerror(errno.ENOTEMPTY)):
        write_model_folder(out, [A], tensors(), source)
    assert [file.name for file in out.iterdir()] == ["other"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "source"]


def test_nothing_is_left_behind_when_the_stream_breaks(tmp_path: Path, source: ModelFolder):
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_model_folder(tmp_path / "out", [A, replace(A, name="b")], tensors(), source)
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("pairs", "dtype", "field", "values"),
    [
        ([], None, "specs", []),
        ([("a", torch.ones(1)), ("a", torch.ones(1))], None, "specs", ["'a'"]),
        ([("a", torch.tensor([1.0, 7e4, torch.inf, torch.nan]))], "float16", "dtype", ["a", 70000, torch.float16]),
        ([("a", torch.ones(1))], "bf16", "dtype", ["'bf16'"]),
    ],
)
def test_a_stream_that_makes_no_faithful_model_is_refused(
    tmp_path: Path, source: ModelFolder, pairs: Pairs, dtype: str | None, field: str, values: list[Any]
):
    with refused(CheckpointError, field, *values):
        write(tmp_path / "out", pairs, source, dtype=dtype)
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("pairs", "values"),
    [
        ([], ["a", [2]]),
        ([("a", torch.ones(3))], ["a", [3], [2]]),
        ([("b", torch.ones(2))], ["a", "b", [2]]),
        ([("a", torch.ones(2)), ("b", torch.ones(2))], ["b"]),
    ],
)
def test_a_stream_that_is_not_what_was_announced_is_refused(
    tmp_path: Path, source: ModelFolder, pairs: Pairs, values: list[Any]
):
    with refused(CheckpointError, "tensors", *values):
        write_model_folder(tmp_path / "out", [A], iter(pairs), source)
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


def test_a_place_that_cannot_be_written_is_a_checkpoint_error(tmp_path: Path, source: ModelFolder):
    (tmp_path / "file").write_text("x")
    with refused(CheckpointError, "path", tmp_path / "file" / "out", "which is a file"):
        write(tmp_path / "file" / "out", [("a", torch.ones(1))], source)


@pytest.mark.parametrize(("owner", "moment"), [(TensorFileWriter, "close"), (files, "sync")])
def test_the_final_name_appears_only_with_the_last_step(
    tmp_path: Path, source: ModelFolder, monkeypatch: pytest.MonkeyPatch, owner: Any, moment: str
):
    def disk_full(*_: object) -> None:
        assert not (tmp_path / "out").exists()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(owner, moment, disk_full)
    with refused(CheckpointError, "path", tmp_path / "out", os.strerror(errno.ENOSPC)):
        write(tmp_path / "out", [("a", torch.ones(1))], source)
    assert [file.name for file in tmp_path.iterdir()] == ["source"]
