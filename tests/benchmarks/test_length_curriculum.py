"""The long-context example is made of texts as long as it says, its settings draw them by stages, and the document has
the figures of the record."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks.length_curriculum import EVALUATED, LENGTHS, by_length, stages, tables
from slimefsdp.config import load_config
from slimefsdp.config.launch import check_ready_to_train

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/long_context"


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return dict(json.loads((ROOT / "benchmarks/results/length_curriculum.json").read_text())["results"])


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("make_needles", EXAMPLE / "make_needles.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_text_has_its_length_in_tokens_and_one_digit_which_is_the_answer(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "TRAIN_RECORDS", 2)
    monkeypatch.setattr(script, "HELDOUT_RECORDS", 2)
    monkeypatch.setattr(script, "SFT_RECORDS", 5)
    script.write_needles(tmp_path, seed=1)
    assert script.LENGTHS == LENGTHS
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    of_all = [tokens for tokens in LENGTHS for _ in range(2)]
    for name, lengths in {"sft": [256] * 5, "train": of_all, "heldout": of_all}.items():
        records = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        encoded = [tokenizer.encode(record["prompt"]) for record in records]
        assert [len(tokens) for tokens in encoded] == lengths
        for record, tokens in zip(records, encoded, strict=True):
            digits = [place for place, token in enumerate(record["prompt"]) if token.isdigit()]
            assert [record["prompt"][place] for place in digits] == [record["answer"]]
            assert record["prompt"][digits[0] - 1] == "#" and record["prompt"].endswith("?")
            assert (
                tokenizer.decode([tokens[digits[0]], tokenizer.eos_token_id], skip_special_tokens=True)
                == (record["answer"])
            )


def test_the_digit_can_be_anywhere(script: Any) -> None:
    places = [script.needle(random.Random(seed), 8)["prompt"].index("#") for seed in range(200)]
    assert set(places) == set(range(6))


def test_the_settings_are_of_a_run_and_the_last_stage_has_the_longest_texts() -> None:
    for name in ("sft", "grpo"):
        check_ready_to_train(load_config(EXAMPLE / f"{name}.yaml"))
    rollout = load_config(EXAMPLE / "grpo.yaml").rollout
    assert [stage.max_prompt_tokens for stage in rollout.curriculum] == [*LENGTHS[:-1], None]


def test_the_document_shows_the_tables_of_the_record(record: dict[str, Any]) -> None:
    assert tables(record) in (ROOT / "docs/long_context.md").read_text()


def test_the_recorded_run_learned_in_its_short_stage_and_trained_on_the_longest_texts(
    record: dict[str, Any],
) -> None:
    config = load_config(EXAMPLE / "grpo.yaml")
    assert [one["steps"][0] for one in record["stages"]] == [stage.from_step for stage in config.rollout.curriculum]
    assert record["stages"][-1]["steps"][1] == config.run.steps
    assert [one["longest_prompt"] for one in record["stages"]] == list(LENGTHS)
    first = record["stages"][0]
    assert first["last_reward"] - first["first_reward"] >= 0.2
    before, after = (record["heldout"][when] for when in EVALUATED)
    assert [int(tokens) for tokens in before] == list(LENGTHS)
    assert after["256"]["exact"] - before["256"]["exact"] >= 0.2


def test_a_stage_is_told_by_the_rewards_at_its_ends() -> None:
    rows = [
        {
            "step": step + 1, "rollout/stage": 1.0 + (step >= 30), "rollout/prompt_length_max": 100.0 + step,
            "rollout/reward": step / 10, "seconds/step": float(step), "shared_tokens": 0.5,
        }
        for step in range(34)
    ]  # fmt: skip
    first, last = stages(rows)
    assert first["steps"] == [1, 30] and last["steps"] == [31, 34]
    assert (first["averaged_steps"], last["averaged_steps"]) == (10, 2)
    assert first["first_reward"] == pytest.approx(0.45) and first["last_reward"] == pytest.approx(2.45)
    assert last["first_reward"] == pytest.approx(3.05) and last["longest_prompt"] == 133


def test_accuracy_is_told_by_length() -> None:
    responses = [{"prompt": "x" * n, "scores": {"reward": r}} for n, r in ((9, 1.0), (3, 0.0), (9, 0.0), (9, 1.0))]
    found = by_length(responses)
    assert list(found) == ["3", "9"] and found["3"] == {"responses": 1, "exact": 0.0}
    assert found["9"] == {"responses": 3, "exact": pytest.approx(2 / 3)}
