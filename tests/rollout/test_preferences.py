"""Pairs are read in every form that people have, and whatever is no pair is named by its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from actors.rollout import prompt_files
from actors.rollout.demonstrations import Demonstration, encode_demonstration
from actors.rollout.records import demonstrations, read_pairs
from slimefsdp.config import config_from_dict
from slimefsdp.config.data import DataSettings
from slimefsdp.errors import ConfigError
from tests.support.refusals import refused

ASKED = {"role": "user", "content": "sort 31"}
SYSTEM = {"role": "system", "content": "sort"}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def data_of(folder: Path, *rows: Any, **settings: Any) -> DataSettings:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataSettings(train=path, **settings)


CHAT = {"prompt": [ASKED], "chosen": [said("13")], "rejected": [said("31")]}
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "texts": ({"prompt": "a: ", "chosen": "b", "rejected": ""}, {"prompt": "a: ", "chosen": "b", "rejected": ""}),
    "chats": (CHAT, CHAT),
    "whole conversations": ({"chosen": [ASKED, said("13")], "rejected": [ASKED, said("31")]}, CHAT),
    "whole conversations beside their prompt as a text": (
        {"prompt": "sort 31", "chosen": [ASKED, said("13")], "rejected": [ASKED, said("31")]}, CHAT,
    ),
    "what the assistant says to a text": ({**CHAT, "prompt": "sort 31"}, CHAT),
    "texts that answer a chat": (
        {"prompt": [ASKED], "chosen": "13", "rejected": "31"}, {"prompt": [ASKED], "chosen": "13", "rejected": "31"},
    ),
    "several messages before they part": (
        {"chosen": [SYSTEM, ASKED, said("1")], "rejected": [SYSTEM, ASKED, said("2"), ASKED, said("3")]},
        {"prompt": [SYSTEM, ASKED], "chosen": [said("1")], "rejected": [said("2"), ASKED, said("3")]},
    ),
    "whole conversations that are equal": (
        {"chosen": [ASKED, said("13")], "rejected": [ASKED, said("13")]},
        {"prompt": [ASKED], "chosen": [said("13")], "rejected": [said("13")]},
    ),
    "whole texts, parted before a space": (
        {"chosen": "Q: x A: yes", "rejected": "Q: x A: no"},
        {"prompt": "Q: x A:", "chosen": " yes", "rejected": " no"},
    ),
    "whole texts that part inside of a word": (
        {"chosen": "Q: x A: yes it", "rejected": "Q: x A: yesterday"},
        {"prompt": "Q: x A:", "chosen": " yes it", "rejected": " yesterday"},
    ),
    "whole texts without spaces": (
        {"chosen": "xyz1", "rejected": "xyz2"}, {"prompt": "xyz", "chosen": "1", "rejected": "2"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_pair_of_every_form_has_a_prompt_and_two_responses(tmp_path: Path, form: str) -> None:
    row, expected = FORMS[form]
    assert read_pairs(data_of(tmp_path, {**row, "score": 1}), "train") == [{**expected, "score": 1}]


def test_equal_responses_are_told_and_columns_and_templates_name_the_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"question": "x", "chosen": "1", "rejected": "1"}
    expected = [{"prompt": "x", "chosen": "1", "rejected": "1"}]
    assert read_pairs(data_of(tmp_path, row, prompt_column="question"), "train") == expected
    assert "1 of 1" in capsys.readouterr().err and "pairs.jsonl:1" in str(
        read_pairs(data_of(tmp_path, CHAT), "train")[0].place
    )
    (templated,) = read_pairs(data_of(tmp_path, row, prompt_column="Q {question}!"), "train")
    assert templated["prompt"] == "Q x!"


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"prompt": "a", "chosen": "b"}, "'rejected'"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, "'rejected' is a int"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "'rejected' is a NoneType"),
        ({"prompt": "a", "chosen": "b", "rejected": [said("c")]}, "list of messages"),
        ({"chosen": "abc", "rejected": "xbc"}, "begin alike"),
        ({"chosen": [ASKED], "rejected": [said("c")]}, "begin alike"),
        ({"prompt": [], "chosen": "b", "rejected": "c"}, "prompt is empty"),
        ({"prompt": [ASKED], "chosen": [], "rejected": [said("c")]}, "'chosen' is empty"),
        ({"prompt": [ASKED], "chosen": [{"role": "assistant"}], "rejected": [said("c")]}, "no chat message"),
        ({"prompt": [ASKED], "chosen": [said("b")], "rejected": [ASKED]}, "'user'"),
        ({"prompt": "a", "chosen": "b", "rejected": "\ud800"}, "surrogate"),
    ],
)  # fmt: skip
def test_what_is_no_pair_is_named_by_its_line(tmp_path: Path, row: dict[str, Any], fault: str) -> None:
    data = data_of(tmp_path, CHAT, row)
    with refused(ConfigError, "data.train", f"{data.train}:2", fault):
        read_pairs(data, "train")


def test_both_samples_of_a_pair_begin_with_its_prompt_and_end_where_the_response_does(example: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(example / "model")
    rows = [
        CHAT,
        {"prompt": [ASKED], "chosen": "13", "rejected": "31"},
        {"prompt": "3, 1:", "chosen": " 13", "rejected": ""},
    ]
    found = []
    for row in rows:
        for one in demonstrations([row]):  # type: ignore[list-item]
            whole = encode_demonstration(tokenizer, one)
            place = whole.prompt_length
            found.append((tokenizer.decode(whole.tokens[:place]), tokenizer.decode(whole.tokens[place:])))
    opened = "<|im_start|>user\nsort 31<|im_end|>\n<|im_start|>assistant\n"
    assert found == [
        (opened, "13<|im_end|>\n"), (opened, "31<|im_end|>\n"),
        (opened, "13<|im_end|>"), (opened, "31<|im_end|>"),
        ("3, 1:", " 13<|im_end|>"), ("3, 1:", "<|im_end|>"),
    ]  # fmt: skip


def test_a_pair_that_does_not_fit_into_a_pack_is_refused_or_left_out(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encoded(path: Path, records: list[dict[str, Any]], **_: Any) -> list[Demonstration]:
        lengths = [len(one["prompt"] + one["completion"]) for one in records]
        return [Demonstration(np.arange(length), length - 1) for length in lengths]

    monkeypatch.setattr(prompt_files, "encoded_demonstrations", encoded)
    texts = [{"prompt": "1", "chosen": "2" * length, "rejected": "3"} for length in (4, 28, 40)]
    tree: dict[str, Any] = {
        "algorithm": "dpo",
        "model": {"path": str(folder)},
        "batch": {"max_tokens_per_rank": 40},
        "optim": {"total_updates": 1},
        "data": {"train": str(data_of(tmp_path, *texts).train), "overlong_prompts": "skip"},
    }
    config = config_from_dict(tree)
    kept = prompt_files.without_overlong(config, prompt_files.read_prompts(config))
    assert [len(one.tokens) for one in kept.demonstrations] == [5, 2, 29, 2] and len(kept.train) == 2
    assert [one.place for one in kept.skipped] == [f"{config.data.train}:3"]
    config = config_from_dict({**tree, "batch": {"max_tokens_per_rank": 30}, "data": {"train": tree["data"]["train"]}})
    with refused(ConfigError, "data.train", f"{config.data.train}:2", "batch.max_tokens_per_rank=30"):
        prompt_files.without_overlong(config, prompt_files.read_prompts(config))
