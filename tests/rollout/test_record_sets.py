"""Prompts that two sets of records share are counted word for word, and told."""

from __future__ import annotations

from typing import Any

from actors.rollout.record_sets import Shared, record_sets
from actors.rollout.records import Record
from slimefsdp.config.data import DataSettings

SETTINGS = DataSettings.model_validate({"train": "t.jsonl", "heldout": {"math": "m.jsonl", "code": "c.jsonl"}})


def records(file: str, *prompts: Any) -> list[Record]:
    return [Record({"prompt": prompt, "answer": number}, f"{file}:{number}") for number, prompt in enumerate(prompts)]


def chat(text: str, **more: str) -> list[dict[str, str]]:
    return [{**more, "role": "user", "content": text}]


def test_prompts_that_are_in_an_earlier_set_are_counted_with_the_place_of_the_first() -> None:
    train = records("t", "a", "b", "b", chat("x", name="n"), "[]")
    heldout = {
        "math": records("m", "c", "b", "a", "b", [{"content": "x", "name": "n", "role": "user"}]),
        "code": records("c", "A", "a ", "c", chat("x")),
    }
    found = record_sets(SETTINGS, heldout, train)
    assert [(one.field, str(one.source), one.prompts) for one in found] == [
        ("data.train", "t.jsonl", 5), ("data.heldout.math", "m.jsonl", 5), ("data.heldout.code", "c.jsonl", 4),
    ]  # fmt: skip
    assert [one.shared for one in found] == [
        (), (Shared("data.train", 4, "m:1"),), (Shared("data.heldout.math", 1, "c:2"),),
    ]  # fmt: skip
