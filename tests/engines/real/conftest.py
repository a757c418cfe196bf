from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.tiny_models import tiny_model

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
