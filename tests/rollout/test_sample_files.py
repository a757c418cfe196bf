"""Texts for people: what is left of a step and of an evaluation, and a line for the terminal, whatever was said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engines.pool import SampledResponse
from actors.rollout.groups import ScoredSample
from actors.rollout.records import Record
from actors.rollout.sample_files import example_line, write_samples, write_step_samples
from slimefsdp.errors import printable

NASTY = "a\x1b[2Jb\0c\x85\u202ed\u2028e\ud800"


def scored(reward: float, *, number: int = 0, finished: bool = True, text: str = "so") -> ScoredSample:
    return ScoredSample(
        SampledResponse(0, number, [5, 1, 2], 2, [-1.0, -2.0], text, finished), {"reward": reward}, reward
    )


def test_responses_are_left_for_programs_and_for_people(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "sort 31"}, {"role": "assistant", "content": "1"}]
    groups = [
        (
            Record({"prompt": "sort 21", "answer": "12", "parts": ["x" * 9000], "level": 3}, "held.jsonl:1"),
            [scored(1.0, text="12"), scored(0.0, number=1, text="", finished=False)],
        ),
        (Record({"prompt": chat}, "held.jsonl:2"), [scored(1.0, text="\ud800 13")]),  # half a surrogate pair
    ]
    for _ in range(2):  # the second time in the place of the first
        write_samples(tmp_path / "evaluations", "step_00000003", groups)
    rows = [json.loads(line) for line in (tmp_path / "evaluations" / "step_00000003.jsonl").read_text().splitlines()]
    assert [(row["place"], row["number"], row["scores"]["reward"], row["finished"]) for row in rows] == [
        ("held.jsonl:1", 0, 1.0, True),
        ("held.jsonl:1", 1, 0.0, False),
        ("held.jsonl:2", 0, 1.0, True),
    ]
    kept = rows[0]["record"]
    assert (kept["answer"], kept["level"]) == ("12", 3) and rows[2]["record"] == {}
    assert kept["parts"].startswith('["xxx') and len(kept["parts"]) < 2100 and "9,004 characters" in kept["parts"]
    assert rows[0] | {"prompt": "sort 21", "response": "12", "tokens": 2} == rows[0] and rows[2]["prompt"] == chat
    text = (tmp_path / "evaluations" / "step_00000003.txt").read_text()
    assert all(
        part in text
        for part in ("=== held.jsonl:1", "--- response 1", "sort 21", "\n  12\n", "  [user] sort 31", "cut")
    )
    assert text.count("--- answer: 12\n") == text.count("sort 21") == 1


@given(st.text())
def test_printable_text_has_no_control_character_and_plain_text_stays_as_it_is(text: str) -> None:
    shown = printable(text)
    assert shown == text or not text.isprintable()
    assert all(one in "\n\t" or one.isprintable() or not one.isascii() for one in shown)
    assert "\n" not in printable(text, kept="")


def test_a_step_leaves_each_prompt_once_with_its_responses_rewards_and_ends(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "sort 31"}]
    penalised = ScoredSample(scored(1.0, number=1).sample, {"reward": 1.0, "exact": 0.5}, 0.25)
    groups = [
        (Record({"prompt": "sort 21", "answer": "12"}, "train.jsonl:1"), [scored(0.0, finished=False), penalised], ""),
        (Record({"prompt": chat}, "train.jsonl:2"), [scored(1.0, text="13")], "a reward failed"),
    ]
    write_step_samples(tmp_path / "samples", 3, groups)
    text = (tmp_path / "samples" / "step_00000003.txt").read_text()
    assert text.count("sort 21") == 1 and "[user] sort 31" in text and "a reward failed" in text
    said = ("response 0: reward 0; 2 tokens, cut", "response 1: reward 1, exact 0.5, trained as 0.25; 2 tokens, ended")
    assert all(part in text for part in said)
    assert "sort 31 -> 13 (reward 1)" in example_line(3, groups[1][0], groups[1][1][0])


def test_samples_of_a_step_that_cannot_be_written_are_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="the run goes on"):
        write_step_samples(tmp_path / "file", 1, [])


def test_what_acts_on_a_terminal_is_escaped_wherever_it_is_shown(tmp_path: Path) -> None:
    record = Record({"prompt": f"p{NASTY}", "answer": f"a{NASTY}"}, "train.jsonl:1")
    one = scored(1.0, text=f"r{NASTY}\nnext line")
    write_step_samples(tmp_path, 7, [(record, [one], "")])
    write_samples(tmp_path, "evaluation", [(record, [one])])
    texts = [(tmp_path / name).read_text() for name in ("step_00000007.txt", "evaluation.txt")]
    for text in [*texts, example_line(7, record, one)]:
        assert printable(text) == text and text.count("\\x1b[2Jb\\x00c") >= 2
    assert all("\n  next line\n" in text for text in texts)
    assert "\n" not in example_line(7, record, one)
