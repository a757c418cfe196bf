"""The calculator example on disk: reproducible, disjoint, with demonstrations that half of the time only guess."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from calculator import calculator
from transformers import AutoTokenizer

from actors.engines.tokenizer import encode_observation, encode_prompt
from actors.rollout.records import read_records
from slimefsdp.config import load_config
from slimefsdp.config.data import DataSettings

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def make() -> Any:
    spec = importlib.util.spec_from_file_location("make_calculator", ROOT / "scripts" / "make_calculator.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def written(make: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    folder = tmp_path_factory.mktemp("calculator")
    return folder, make.write_calculator(folder, seed=0)


def read(folder: Path, name: str) -> list[Any]:
    return list(read_records(DataSettings(train=folder / f"{name}.jsonl"), "train"))


def test_one_seed_writes_the_same_bytes_and_another_seed_other_data_and_weights(
    make: Any, written: Any, tmp_path: Path
) -> None:
    folder, _ = written
    for seed, name in enumerate(("again", "other")):
        make.write_calculator(tmp_path / name, seed=seed)
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    changed = {
        name: {str(file) for file in files if (folder / file).read_bytes() != (tmp_path / name / file).read_bytes()}
        for name in ("again", "other")
    }
    assert changed["again"] == set()
    assert changed["other"] == {"model/model.safetensors", "sft.jsonl", "train.jsonl", "heldout.jsonl"}


def test_answers_are_products_and_held_out_prompts_are_in_no_other_file(written: Any) -> None:
    folder, counts = written
    heldout, train, sft = (read(folder, name) for name in ("heldout", "train", "sft"))
    assert [len(one) for one in (heldout, train, sft)] == [
        counts[f"{name}.jsonl"] for name in ("heldout", "train", "sft")
    ]
    assert all(calculator(record["prompt"]) == record["answer"] for record in [*heldout, *train])
    prompts = {record["prompt"] for record in heldout}
    assert len(prompts) == 128 and not prompts & {record["prompt"] for record in train}
    assert not prompts & {record["prompt"][0]["content"] for record in sft}


def test_what_is_demonstrated_is_what_the_environment_says(written: Any) -> None:
    """Otherwise the warm-up would teach contexts that never come."""
    tokenizer = AutoTokenizer.from_pretrained(written[0] / "model")
    record = next(record for record in read(written[0], "sft") if len(record["prompt"]) == 3)
    asked, call, _ = record["prompt"]
    episode = [
        *encode_prompt(tokenizer, asked["content"]),
        *tokenizer.encode(call["content"], add_special_tokens=False),
        *encode_observation(tokenizer, f"<tool_response>\n{record['answer']}\n</tool_response>"),
    ]
    assert encode_prompt(tokenizer, record["prompt"]) == episode
    assert (
        len(tokenizer.encode(call["content"]))
        < load_config(ROOT / "configs/calculator_grpo.yaml").rollout.max_new_tokens
    )
