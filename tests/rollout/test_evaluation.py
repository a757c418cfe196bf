"""Shares of solved prompts and their intervals follow from what was drawn, and the responses can be read afterwards."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.engines.pool import SampledResponse
from actors.rollout.collect import Collector
from actors.rollout.evaluation import Evaluator, pass_probability, share_of, solved_metrics
from actors.rollout.groups import ScoredSample
from actors.rollout.records import Record
from slimefsdp.config import config_from_dict
from tests.support.drawing import DrawsAtOnce

LONGEST = 6


class Engines(DrawsAtOnce):
    """Draws as engines do: a response follows from its prompt, its place, the seed and greediness."""

    def __init__(self) -> None:
        self.drawn: list[tuple[str, bool]] = []
        self.most: set[int] = set()

    def generate(
        self, prompts: Sequence[str], *, samples_per_prompt: int, seed: Sequence[int], greedy: bool = False,
        each: Callable[[SampledResponse], None], may_mix: bool = False, max_new_tokens: int = LONGEST,
        evaluates: bool = False,
    ) -> tuple[int, list[SampledResponse]]:  # fmt: skip
        assert evaluates
        self.most.add(max_new_tokens)
        samples = []
        for index, prompt in enumerate(prompts):
            place = [len(prompt)] if greedy else [*seed, index, len(prompt)]
            lengths = np.random.default_rng(place).integers(1, LONGEST + 1, samples_per_prompt).tolist()
            for number, length in enumerate(lengths):
                tokens, text = [5, *[1] * length], "x" * length
                log_probs, finished = [-1.0] * length, length < LONGEST
                samples.append(SampledResponse(index, number, tokens, length, log_probs, text, finished))
                self.drawn.append((prompt, greedy))
                each(samples[-1])
        return 3, samples


def even(record: Record, response: str, finished: bool) -> dict[str, float]:
    return {"reward": float(len(response) % 2 == 0), "length": float(len(response))}


@pytest.fixture
def evaluated(tmp_path: Path) -> Any:
    """The metrics of an evaluation of sets of so many prompts, and what it left."""
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "t"}))
    for name, count in (("first", 9), ("second", 5)):
        lines = [json.dumps({"prompt": name[: place % 3 + 1] * (place + 1)}) for place in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))

    def evaluate(
        heldout: Any, engines: Any = None, step: int = 4, **asked: Any
    ) -> tuple[dict[str, float], dict[str, str]]:
        folder = tmp_path / "runs" / str(len(list((tmp_path / "runs").glob("*"))))
        folder.mkdir(parents=True)
        config = config_from_dict(
            {
                "run": {"seed": 3, "dir": str(folder)},
                "model": {"path": "m"},
                "optim": {"total_updates": 1},
                "data": {"train": str(tmp_path / "train.jsonl"), "heldout": heldout},
                "rollout": {"reward": f"{__name__}:even", "max_new_tokens": LONGEST},
                "evaluation": {"interval_steps": 2, **asked},
            }
        )
        collector = Collector(config, engines or Engines())
        evaluator = Evaluator(config, collector)
        metrics = evaluator.evaluate(step, 3)
        assert f"step {step}," in evaluator.example and "reward" in evaluator.example
        done, _, whole, *_ = evaluator.progress().split()
        assert done == whole, "it says how far it is"
        left = {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}
        return metrics, left

    return evaluate


ASKED = {"samples_per_prompt": 4, "pass_at": [1, 4]}


def test_two_held_out_sets_give_the_numbers_and_the_files_of_two_runs_with_one_each(
    evaluated: Any, tmp_path: Path
) -> None:
    sets = {name: str(tmp_path / f"{name}.jsonl") for name in ("first", "second")}
    metrics, left = evaluated(sets, **ASKED)
    alone = {name: evaluated(path, **ASKED) for name, path in sets.items()}
    assert metrics == {
        key.replace("eval/", f"eval/{name}/"): value
        for name, (found, _) in alone.items()
        for key, value in found.items()
    }
    assert {"eval/reward", "eval/length", "eval/pass@4_low"} <= alone["first"][0].keys()
    assert alone["first"][0]["eval/length"] != alone["second"][0]["eval/length"]
    assert left == {
        file.replace("evaluations/", f"evaluations/{name}/"): text
        for name, (_, files) in alone.items()
        for file, text in files.items()
    }
    assert sorted(left)[:2] == [
        "evaluations/first/step_00000004.jsonl",
        "evaluations/first/step_00000004.txt",
    ]
    backwards, _ = evaluated(dict(reversed(sets.items())), **ASKED)
    assert backwards == metrics, "the order makes no difference"
    assert evaluated(sets, step=5, **ASKED)[0] != metrics, "the step does"


def test_evaluations_have_a_length_of_their_own(evaluated: Any, tmp_path: Path) -> None:
    for own, most in ((None, LONGEST), (2 * LONGEST, 2 * LONGEST)):
        engines = Engines()
        evaluated(str(tmp_path / "first.jsonl"), engines, **ASKED, max_new_tokens=own)
        assert engines.most == {most}


def scored(reward: float, *, number: int = 0, finished: bool = True, text: str = "so") -> ScoredSample:
    return ScoredSample(
        SampledResponse(0, number, [5, 1, 2], 2, [-1.0, -2.0], text, finished), {"reward": reward}, reward
    )


@pytest.mark.parametrize(("solved", "drawn"), [(0, 4), (1, 4), (3, 5), (5, 5), (2, 6)])
def test_pass_at_k_is_the_share_of_the_subsets_in_which_one_solves_the_prompt(solved: int, drawn: int) -> None:
    answers = [number < solved for number in range(drawn)]
    for k in range(1, drawn + 1):
        subsets = list(itertools.combinations(answers, k))
        assert pass_probability(k, solved, drawn) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(("solved", "count"), [(0, 10), (3, 10), (10, 10), (1, 400), (200, 400)])
def test_the_interval_of_single_answers_is_where_their_share_is_two_errors_away(solved: int, count: int) -> None:
    share = share_of([1.0] * solved + [0.0] * (count - solved))
    assert share.value == solved / count and share.low <= share.value <= share.high
    for end in (share.low, share.high):  # Wilson's: the shares whose own standard error the found one is 1.96 away by
        if 1e-6 < end < 1 - 1e-6:
            assert abs(end - share.value) / math.sqrt(end * (1 - end) / count) == pytest.approx(1.959964, abs=1e-5)


HARDNESS: dict[str, Callable[[np.random.Generator, tuple[int, int]], np.ndarray]] = {
    "equally_hard": lambda rng, shape: np.full(shape, 0.25),
    "equally_easy": lambda rng, shape: np.full(shape, 0.9),
    "mostly_hard": lambda rng, shape: rng.beta(1, 3, shape),
    "around_half": lambda rng, shape: rng.beta(5, 5, shape),
}


@pytest.mark.parametrize("hardness", HARDNESS)
@pytest.mark.parametrize(("count", "drawn", "k"), [(4, 4, 1), (10, 8, 1), (10, 8, 4), (20, 4, 1), (120, 8, 1)])
def test_nineteen_of_twenty_intervals_hold_what_they_estimate(count: int, drawn: int, k: int, hardness: str) -> None:
    rng = np.random.default_rng(0)
    ability = HARDNESS[hardness](rng, (2000, count))
    whole = HARDNESS[hardness](rng, (1000, 400))
    truth = float((1 - (1 - whole) ** k).mean())
    found = [[pass_probability(k, one, drawn) for one in row] for row in rng.binomial(drawn, ability).tolist()]
    shares = [share_of(row, drawn // k) for row in found]
    held = sum(share.low <= truth <= share.high for share in shares) / len(shares)
    assert held >= 0.94, "of 95 %, by 2000 draws"


def test_prompts_with_equal_values_count_as_no_more_than_their_answers() -> None:
    bound = share_of([1.0] * 20 + [0.0] * 60)  # 20 prompts of 4 answers each, as if each were a prompt
    equal = share_of([0.25] * 20, 4)
    assert (equal.low, equal.high) == pytest.approx((bound.low, bound.high))
    nearly = share_of([0.25] * 19 + [0.5], 4)
    assert abs((nearly.high - nearly.low) / (equal.high - equal.low) - 1) < 0.05, "one other answer changes little"
    unequal = share_of([1.0] * 5 + [0.0] * 15, 4)
    single = share_of([1.0] * 5 + [0.0] * 15)
    assert unequal.low < single.low and unequal.high > single.high, "what varies as prompts do is known no better"
    assert share_of([0.0] * 20, 4) == share_of([0.0] * 20), "of none solved nothing is known of the variance"
    assert share_of([0.25], 4) == share_of([0.25])


def test_solved_prompts_are_counted_with_those_among_the_answers_that_ended() -> None:
    groups = [
        [scored(1.0), scored(0.0), scored(0.0, finished=False), scored(2.0)],
        [scored(0.5, finished=False)] * 4,
    ]
    found = solved_metrics(groups, (1, 2), "eval/")
    assert found["eval/pass@1"] == 0.25 and found["eval/pass@2"] == pytest.approx((1 - 1 / 6) / 2)
    assert found["eval/finished"] == 3 / 8 and found["eval/solved_of_finished"] == 2 / 3
    assert found["eval/pass@1_low"] < 0.25 < found["eval/pass@1_high"]
    share = share_of([0.5, 0.0], 4)
    assert (found["eval/pass@1_low"], found["eval/pass@1_high"]) == (share.low, share.high)
    assert "solved_of_finished" not in solved_metrics([groups[1]], (1,), "")
    assert solved_metrics(groups, (), "") == solved_metrics([], (1,), "") == {}
