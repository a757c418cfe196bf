"""Prompts that two sets of records share are counted word for word, and told."""

from __future__ import annotations

from typing import Any

import pytest

from actors.rollout.prompts import Record
from actors.rollout.record_sets import Shared, record_sets, warn_of_shared_prompts
from slimefsdp.config.rollout import DataSettings

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


def test_a_text_is_no_chat_message_that_is_written_like_it() -> None:
    heldout = {"math": records("m", '[{"content": "x", "role": "user"}]'), "code": records("c", chat("x"))}
    assert not any(one.shared for one in record_sets(SETTINGS, heldout))


def test_what_is_shared_is_told_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    settings = DataSettings.model_validate({"train": "t.jsonl", "heldout": "h.jsonl"})
    warn_of_shared_prompts(record_sets(settings, {"": records("h", "a")}, records("t", "b")))
    assert capsys.readouterr() == ("", "")
    sets = record_sets(settings, {"": records("h", "a", "b")}, records("t", "b"))
    warn_of_shared_prompts(sets)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("data.heldout: 1 of 2 ") and "data.train" in line and "h:1" in line
    assert "1 of them in data.train" in str(sets[1])
