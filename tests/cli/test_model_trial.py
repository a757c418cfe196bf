"""What ranks would refuse of settings that name parts of a model is refused before anything starts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from actors.cli.preflight import build_models
from slimefsdp.errors import ConfigError
from tests.support.plain_step import settings
from tests.support.refusals import refused
from tests.support.tiny_models import TinyFolder

WRONG: list[tuple[dict[str, Any], str, list[object]]] = [
    ({"lora": {"rank": 4, "targets": ["nope"]}}, "lora.targets", ["nope"]),
    ({"lora": {"rank": 10**8}}, "lora.rank", [10**8]),
    ({"fsdp": {"wrap": ["Evil"]}}, "fsdp.wrap", ["Evil"]),
    ({"model": {"frozen": ["*.nope"]}}, "model.frozen", ["*.nope"]),
]


@pytest.mark.parametrize(("sections", "field", "values"), WRONG, ids=[field for _, field, _ in WRONG])
def test_parts_that_a_model_does_not_have_are_named(
    tiny_folder: TinyFolder, tmp_path: Path, sections: dict[str, Any], field: str, values: list[object]
) -> None:
    shutil.copy(tiny_folder() / "config.json", tmp_path)  # which is enough
    with refused(ConfigError, field, *values):
        build_models(settings(tmp_path, **sections))


def test_parts_that_policy_and_critic_have_are_taken(tiny_folder: TinyFolder) -> None:
    lora = {"rank": 4, "targets": ["q_proj", "down_proj", "lm_head"]}
    config = settings(tiny_folder(), lora=lora, fsdp={"wrap": ["Qwen3MLP"]})
    build_models(config)
    build_models(config.model_copy(update={"algorithm": "ppo"}))
