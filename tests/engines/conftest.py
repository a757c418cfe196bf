"""An engine, its server and what sends it weights, for modules whose fixture `kind` says which."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.support.served import Kind
from tests.support.table_server import EMBEDDING
from tests.support.tiny_models import tiny_model
from tests.support.weight_sender import WeightSender

FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


@pytest.fixture(scope="session")
def untied_folder(example: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama with a head of its own, and the example's tokenizer."""
    folder = tmp_path_factory.mktemp("untied")
    tiny_model("llama", vocab_size=320, head_dim=32).save_pretrained(folder)
    for name in FILES:
        if (example / "model" / name).exists():
            shutil.copy(example / "model" / name, folder)
    return folder


@pytest.fixture(scope="module")
def tensors(example: Path) -> dict[str, torch.Tensor]:
    """Of the example's model, whose head is its embedding; that is large enough for some tokens to be likelier."""
    found = safetensors.torch.load_file(example / "model" / "model.safetensors")
    return {**found, EMBEDDING: found[EMBEDDING] * 8}


@pytest.fixture(scope="module")
def shared(kind: Kind, make_config: Any, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[Any, Any]]:
    tokenizer_only = kind.engine(kind.config(make_config, "http://127.0.0.1:1"), 0)
    server = kind.server(len(tensors[EMBEDDING]), lambda tokens: tokenizer_only.decode([tokens])[0])
    engine = kind.engine(kind.config(make_config, server.url), 0)
    engine.info()
    yield server, engine
    engine.stop()
    server.close()


@pytest.fixture
def server(kind: Kind, shared: tuple[Any, Any]) -> Any:
    """A server without faults."""
    shared[0].faults = kind.faults()
    return shared[0]


@pytest.fixture
def engine(shared: tuple[Any, Any], server: Any) -> Any:
    """An engine that speaks to it."""
    return shared[1]


@pytest.fixture(scope="module")
def one_sender(shared: tuple[Any, Any], tensors: dict[str, torch.Tensor]) -> Iterator[WeightSender]:
    sender = WeightSender({name: tensor.clone() for name, tensor in tensors.items()}, bucket_bytes=2**19)
    sender.join(shared[1])
    yield sender
    sender.leave()


@pytest.fixture
def sender(one_sender: WeightSender, engine: Any) -> WeightSender:
    """What the engine has the weights of, in version 0."""
    one_sender.send(engine, 0)
    return one_sender
