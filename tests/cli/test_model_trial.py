"""What ranks would refuse of settings that name parts of a model is refused before anything starts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from actors.cli.preflight import build_models
from actors.rollout.tokenizer import encode_records
from slimefsdp.errors import ConfigError, ModelError
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


def test_a_generation_config_that_no_engine_can_use_is_named(example: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(example / "model", tmp_path / "model"))
    (folder / "generation_config.json").write_text('{"eos_token_id": "x"}')
    records = [{"prompt": "1", "answer": "1"}]
    with refused(ModelError, "model.path", folder / "generation_config.json"):
        encode_records(str(folder), records, with_answers=False)
    encode_records(str(folder), records, with_answers=True)  # demonstrations end with the tokenizer's own token
