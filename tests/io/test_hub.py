"""Ids of the Hugging Face hub: what is one, which files come, and what is said where none can."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from slimefsdp.errors import ConfigError, ModelError
from slimefsdp.io import hub
from slimefsdp.io.hub import HubId, id_of_snapshot, reads_like_id, snapshot
from tests.support.hub import COMMITS, Hub, Repository, files_of, lay_out, use_cache
from tests.support.refusals import refused

OLD, NEW = COMMITS[:2]
MODEL = {
    "config.json": b"{}",
    "model-1.safetensors": b"weights",
    "tokenizer.model": b"t",
    "chat_template.jinja": b"c",
    "merges.txt": b"m",
    "README.md": b"r",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"weights again",
    "onnx/config.json": b"{}",
    "original/model.safetensors": b"weights again",
}
NEEDED = {"config.json", "model-1.safetensors", "tokenizer.model", "chat_template.jinja", "merges.txt"}
FIELD = "reference.path"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of this test alone, offline."""
    use_cache(monkeypatch, tmp_path / "cache")
    return (tmp_path / "cache").resolve()


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one model, and an empty cache."""
    with Hub() as server:
        use_cache(monkeypatch, tmp_path / "cache", endpoint=server.endpoint)
        commits = {OLD: {**MODEL, "merges.txt": b"older"}, NEW: MODEL}
        server.repositories["model", "owner/name"] = Repository(commits, {"main": NEW, "v1": OLD})
        yield server


def fetched(name: str, revision: str | None = None, *, with_weights: bool = True) -> Path:
    return snapshot(
        HubId(name, revision), "model", field=FIELD, error=ModelError, with_weights=with_weights, shows_bars=False
    )


@pytest.mark.parametrize(
    ("text", "is_id"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", True),
        ("owner/name@v1.0", True),
        ("owner/name@refs/pr/1", True),
        ("name", False),
        ("a/b/c", False),
        ("./owner/name", False),
        ("../owner/name", False),
        ("/owner/name", False),
        ("~/name", False),
        ("owner/name/", False),
        ("owner/.name", False),
        ("owner/na me", False),
        ("owner/name@", False),
        ("data/train.jsonl", False),
        ("data/train.parquet", False),
    ],
)
def test_only_owner_and_name_with_one_slash_read_like_an_id(text: str, is_id: bool) -> None:
    assert reads_like_id(text) == is_id


@pytest.mark.parametrize("revision", [None, "main", "v1", NEW])
def test_offline_the_cache_alone_is_asked(cache: Path, revision: str | None) -> None:
    folder = lay_out(cache, "owner/name", NEW, MODEL, refs=("main", "v1"))
    assert fetched("owner/name", revision) == folder
    assert id_of_snapshot(folder) == HubId("owner/name", NEW)
    assert hub.bytes_there(HubId("owner/name"), "model") > 0


@pytest.mark.parametrize("revision", [None, "v2", OLD])
def test_offline_what_is_not_in_the_cache_is_named_with_the_cache(cache: Path, revision: str | None) -> None:
    lay_out(cache, "owner/another", NEW, MODEL)
    if revision:
        lay_out(cache, "owner/name", NEW, MODEL)
    name = f"owner/name@{revision}" if revision else "owner/name"
    with refused(ModelError, FIELD, f"{FIELD}={name}", cache, "HF_HUB_OFFLINE"):
        fetched("owner/name", revision)


def test_what_a_folder_is_read_for_comes_once_and_nothing_else(served: Hub) -> None:
    light = fetched("owner/name", with_weights=False)
    assert set(files_of(light)) == NEEDED - {"model-1.safetensors"}
    folder = fetched("owner/name")
    assert files_of(folder) == {name: MODEL[name] for name in NEEDED} and folder == light
    assert folder.name == NEW and sorted(served.sent) == sorted(NEEDED)
    asked = served.asked
    assert fetched("owner/name") == folder and served.asked == asked
    served.repositories["model", "owner/name"].refs["main"] = OLD
    assert fetched("owner/name") == folder, "the same process was given two commits"
    assert fetched("owner/name", "v1").name == OLD


def test_what_is_there_already_is_used_while_the_hub_cannot_be_reached(
    served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetched("owner/name")
    use_cache(monkeypatch, tmp_path / "cache", endpoint=f"http://127.0.0.1:{closed_port()}")
    assert fetched("owner/name") == folder
    with refused(ModelError, FIELD, f"{FIELD}=owner/name@v1", tmp_path / "cache"):
        fetched("owner/name", "v1")


def test_half_of_a_model_is_not_taken_for_one_offline(
    served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    light = fetched("owner/name", with_weights=False)
    use_cache(monkeypatch, tmp_path / "cache")
    assert fetched("owner/name", with_weights=False) == light
    with refused(ModelError, FIELD, f"{FIELD}=owner/name", tmp_path / "cache"):
        fetched("owner/name")


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


@pytest.mark.parametrize(
    ("refusal", "value"),
    [((401, "GatedRepo"), 401), ((403, "GatedRepo"), 403), ((403, ""), 403), ((401, ""), "owner/closed")],
)
def test_a_model_to_which_the_hub_gives_no_access_is_named(
    served: Hub, refusal: tuple[int, str], value: object
) -> None:
    served.repositories["model", "owner/closed"] = Repository({NEW: MODEL}, {"main": NEW}, refusal)
    with refused(ModelError, FIELD, f"{FIELD}=owner/closed", value) as caught:
        fetched("owner/closed")
    assert "hf auth login" in str(caught.value.hint)


def test_a_name_and_a_revision_that_the_hub_does_not_have_are_named(served: Hub) -> None:
    with refused(ModelError, FIELD, f"{FIELD}=owner/nmae"):
        fetched("owner/nmae")
    with refused(ModelError, FIELD, f"{FIELD}=owner/name@v2", "v2"):
        fetched("owner/name", "v2")
    with refused(ModelError, FIELD, f"{FIELD}=owner--x/name"):  # which the hub allows nobody
        fetched("owner--x/name")
    with refused(ConfigError, "data.train", "data.train=owner/name"):  # a model's name is no data set's
        snapshot(HubId("owner/name"), "dataset", field="data.train", error=ConfigError, shows_bars=False)
