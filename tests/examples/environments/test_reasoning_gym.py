"""Tasks of reasoning_gym: distinct problems, files that its scorers judge alike, and what of a response counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
from reasoning_gym_tasks import answer_in, distinct_problems, main, scored, solved

from actors.rollout.records import read_records
from actors.rollout.rewards import load_reward
from slimefsdp.config.data import DataSettings

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}  # 10 x 10 x 2 problems
NAMES = ("chain_sum", "needle_haystack", "word_sorting", "mini_sudoku", "calendar_arithmetic", "countdown")


def questions(records: list[dict[str, Any]]) -> set[str]:
    return {record["question"] for record in records}


def record(question: str, answer: str | None, name: str = "chain_sum") -> dict[str, Any]:
    return {"prompt": question, "question": question, "answer": answer, "metadata": {"source_dataset": name}}


# ---------------------------------------------------------------------- problems


def test_all_problems_of_a_small_data_set_are_there_once_on_one_side_or_the_other() -> None:
    train, heldout = distinct_problems("chain_sum", ONE_DIGIT, train=80, heldout=120)
    assert (len(train), len(heldout)) == (80, 120)
    wanted = {f"{a} {sign} {b} =" for a in range(10) for b in range(10) for sign in "+-"}
    assert {question.split(": ")[1] for question in questions(train) | questions(heldout)} == wanted
    for one in train + heldout:
        assert eval(one["question"].split(": ")[1].removesuffix("=")) == int(one["answer"])


def test_a_seed_decides_the_problems_and_held_out_ones_stay_when_more_are_trained_on() -> None:
    def drawn(seed: int, train: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        return distinct_problems("chain_sum", {}, train=train, heldout=20, seed=seed)

    assert drawn(0, 30) == drawn(0, 30)
    assert drawn(0, 700)[1] == drawn(0, 30)[1] and drawn(0, 700)[0][:30] == drawn(0, 30)[0]  # over several chunks
    # reasoning_gym's own neighbouring seeds share all problems but one
    ours = [questions(drawn(seed, 30)[0]) for seed in (0, 1)]
    theirs = [questions(list(reasoning_gym.create_dataset("chain_sum", seed=seed, size=30))) for seed in (0, 1)]
    assert len(ours[0] & ours[1]) < 5 and len(theirs[0] & theirs[1]) == 29


@pytest.mark.parametrize("name", NAMES)
def test_what_is_read_from_the_file_is_scored_as_what_was_drawn(name: str, tmp_path: Path) -> None:
    assert main([name, str(tmp_path / "d"), "--train", "6", "--heldout", "4"]) == 0
    sides = [read_records(DataSettings(train=tmp_path / f"d/{side}.jsonl"), "train") for side in ("train", "heldout")]
    assert [len(side) for side in sides] == [6, 4] and not questions(list(sides[0])) & questions(list(sides[1]))
    reward = load_reward("examples/environments/reasoning_gym_tasks.py:scored")
    theirs = reasoning_gym.get_score_answer_fn(name)
    for one in (*sides[0], *sides[1]):
        assert one["metadata"]["source_dataset"] == name
        for answer in (str(one["answer"]), "no idea"):
            wanted = theirs(answer, {key: one[key] for key in ("question", "answer", "metadata")})
            assert reward(one, f"<answer>{answer}</answer>", True)["reward"] == wanted
        assert reward(one, str(one["answer"]), True)["answer_only"] == 1.0


# ---------------------------------------------------------------------- answers and rewards


@pytest.mark.parametrize(
    ("response", "true_answer", "answer"),
    [
        ("The answer is -4", "-4", "-4"),
        ("It is 12, since 3 x 4", "12", "4"),  # the last number, right or wrong
        ("1,200.5 apples.", "1200.5", "1,200.5"),
        ("3 + 2 = \N{MINUS SIGN}5", "5", "-5"),
        ("x = \N{EN DASH}5", "-5", "-5"),
        ("10-5", "-5", "5"),  # whose minus is between two numbers
        ("1,234,567,", "1234567", "1,234,567"),
        ("I do not know.", "3", ""),
        ("First 7, no: <answer> 8 </answer> or 9", "7", "8"),
        ("<answer>1</answer><answer>2\n3</answer>", "2\n3", "2\n3"),
        ("Thinking.\n\n**Yes.**", "Yes", "Yes"),
        ("Here:\n1 2\n\n3 4", "1 2\n\n3 4", "1 2\n\n3 4"),
        ("left, right.", None, "left, right"),
    ],
)
def test_the_part_of_a_response_that_is_scored(response: str, true_answer: str | None, answer: str) -> None:
    assert answer_in(response, true_answer) == answer


def test_rewards_of_right_wrong_cut_and_wordy_responses() -> None:
    one = record("4 - 1 =", "3")
    rewards = {
        "3": {"reward": 1.0, "answer_only": 1.0, "mentioned": 1.0},
        "4 - 1 = 3.": {"reward": 1.0, "answer_only": 0.0, "mentioned": 1.0},
        "3 is 4 - 1": {"reward": 0.0, "answer_only": 0.0, "mentioned": 1.0},
        "13": {"reward": 0.0, "answer_only": 0.0, "mentioned": 0.0},
        "-3": {"reward": 0.0, "answer_only": 0.0, "mentioned": 0.0},
        "3.5": {"reward": 0.0, "answer_only": 0.0, "mentioned": 0.0},
        "no": {"reward": 0.0, "answer_only": 0.0, "mentioned": 0.0},
    }
    for response, wanted in rewards.items():
        assert solved(one, response, True) == wanted, response
        cut = solved(one, response, False)
        assert cut == {**wanted, "reward": 0.0, "answer_only": 0.0}, response
    # reasoning_gym gives a part for an answer that holds the true one
    assert scored(one, "13", True)["reward"] == 0.5 and scored(one, "13", False)["reward"] == 0.0
