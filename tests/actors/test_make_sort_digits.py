"""The sort-digits example on disk: reproducible, loadable, disjoint, and as half-wrong as it says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from actors.rollout.records import read_records
from slimefsdp.config.data import DataSettings

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_sort_digits.py"


@pytest.fixture(scope="module")
def make():
    spec = importlib.util.spec_from_file_location("make_sort_digits", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example(make, tmp_path_factory):
    folder = tmp_path_factory.mktemp("example")
    return folder, make.write_sort_digits(folder, seed=0)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def read(folder: Path, name: str) -> list[dict]:
    return read_records(DataSettings(train=folder / f"{name}.jsonl"), "train")


def test_one_seed_writes_the_same_bytes_and_another_seed_other_data_and_weights(make, example, tmp_path):
    folder, _ = example
    make.write_sort_digits(tmp_path / "again", seed=0)
    assert contents(tmp_path / "again") == contents(folder)
    make.write_sort_digits(tmp_path / "other", seed=1)
    first, other = contents(folder), contents(tmp_path / "other")
    changed = {name for name in first if first[name] != other[name]}
    files = {f"{name}.jsonl" for name in ("sft", "train", "heldout", "chats", "pairs", "heldout_pairs")}
    assert changed == {"model/model.safetensors", *files}


def test_held_out_prompts_are_distinct_and_in_no_other_file(example):
    folder, _ = example
    heldout = {record["prompt"] for record in read(folder, "heldout")}
    assert len(heldout) == 256
    for name in ("sft", "train"):
        assert not heldout & {record["prompt"] for record in read(folder, name)}


def test_every_answer_is_sorted_but_about_half_of_the_demonstrations(example):
    folder, _ = example
    for name in ("sft", "train", "heldout"):
        for record in read(folder, name):
            task, digits = record["prompt"].split(" ")
            assert task == "sort" and digits.isdecimal() and 3 <= len(digits) <= 5
            assert sorted(record["answer"]) == sorted(digits)
    for name in ("train", "heldout"):
        assert all(list(record["answer"]) == sorted(record["answer"]) for record in read(folder, name))
    # 3200 are shuffled; a shuffle of 3 to 5 digits that repeat at times leaves less than a fifth of them sorted
    wrong = sum(list(record["answer"]) != sorted(record["answer"]) for record in read(folder, "sft"))
    assert 0.8 * 3200 < wrong <= 3200


def test_pairs_prefer_the_right_answer_to_a_wrong_one_and_hold_out_the_prompts_that_are_held_out(example):
    folder, written = example
    prompts = {}
    for name in ("pairs", "heldout_pairs"):
        pairs = read(folder, name)
        prompts[name] = [pair["prompt"][0]["content"] for pair in pairs]
        for pair, prompt in zip(pairs, prompts[name], strict=True):
            assert pair["chosen"] == "".join(sorted(prompt.removeprefix("sort "))) != pair["rejected"]
            assert len(pair["chosen"]) == len(pair["rejected"])
    assert prompts["heldout_pairs"] == [record["prompt"] for record in read(folder, "heldout")]
    assert len(prompts["pairs"]) == written["pairs.jsonl"] and not {*prompts["pairs"]} & {*prompts["heldout_pairs"]}
