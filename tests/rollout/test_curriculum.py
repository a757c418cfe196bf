"""A step has the lengths of its stage: of the prompts that are drawn, of the responses, and of what these lose of their
reward; an evaluation has no stage."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.engines.pool import SampledResponse
from actors.rollout.collect import Collector
from actors.rollout.evaluation import Evaluator
from actors.rollout.prompt_files import Prompts, read_prompts
from actors.run_dir import RecordedBatches
from slimefsdp.config import RunConfig, config_from_dict
from tests.support.drawing import DrawsAtOnce

LONGEST, PROMPTS_PER_STEP, VERSION = 8, 3, 1
LENGTHS = [2, 9, 4, 2, 7, 4, 2, 9, 4, 2]  # tokens of each prompt
STAGES = [
    {"from_step": 1, "max_prompt_tokens": 2, "max_new_tokens": 3},
    {"from_step": 3, "max_prompt_tokens": 4, "max_new_tokens": 5},
    {"from_step": 5},
]


class Engines(DrawsAtOnce):
    """Responses as long as they may be; each call is remembered."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], int, bool]] = []

    def generate(
        self,
        prompts: Sequence[str],
        *,
        samples_per_prompt: int,
        seed: Sequence[int],
        greedy: bool = False,
        max_new_tokens: int | None = None,
        evaluates: bool = False,
        each: Callable[[SampledResponse], None],
        may_mix: bool = False,
    ) -> tuple[int, list[SampledResponse]]:
        most = max_new_tokens or LONGEST
        self.calls.append((list(prompts), most, greedy))
        samples = [
            SampledResponse(
                place, number, [5] * len(prompt.split()) + [6] * most, most, [-1.0] * most, f"{number}", False
            )
            for place, prompt in enumerate(prompts)
            for number in range(samples_per_prompt)
        ]
        for sample in samples:
            each(sample)
        return VERSION, samples


def number_of(record: Any, response: str, finished: bool) -> dict[str, float]:
    return {"reward": float(response)}


@pytest.fixture
def make(tmp_path: Path) -> Any:
    lines = [json.dumps({"prompt": " ".join(f"w{number}" for _ in range(n))}) for number, n in enumerate(LENGTHS)]
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))

    def config(**sections: dict[str, Any]) -> RunConfig:
        tree: dict[str, Any] = {
            "model": {"path": "m"},
            "optim": {"total_updates": 100},
            "data": {"train": str(tmp_path / "train.jsonl"), "heldout": str(tmp_path / "heldout.jsonl")},
            "rollout": {
                "prompts_per_step": PROMPTS_PER_STEP, "samples_per_prompt": 2, "max_new_tokens": LONGEST,
                "reward": f"{__name__}:number_of", "curriculum": STAGES,
            },
            "evaluation": {"interval_steps": 1},
        }  # fmt: skip
        return config_from_dict(
            {**tree, **{name: {**tree.get(name, {}), **values} for name, values in sections.items()}}
        )

    return config


def collector(config: RunConfig, engines: Any, recorded: RecordedBatches | None = None) -> Collector:
    found = read_prompts(config)
    return Collector(config, engines, recorded, Prompts(found.train, found.heldout, train_lengths=LENGTHS))


def words(prompts: Sequence[str]) -> list[int]:
    return [len(prompt.split()) for prompt in prompts]


def test_a_step_draws_prompts_and_responses_of_its_stage_and_an_evaluation_is_as_ever(make: Any) -> None:
    engines: Any = Engines()
    one = collector(make(), engines)
    metrics = [one.collect(step, VERSION, {})[1] for step in range(8)]
    assert [most for _, most, _ in engines.calls] == [3, 3, 5, 5, *[LONGEST] * 4]
    drawn = [words(prompts) for prompts, _, _ in engines.calls]
    assert all(max(lengths) <= most for lengths, most in zip(drawn, [2, 2, 4, 4, 9, 9, 9, 9], strict=True))
    assert {length for lengths in drawn[2:4] for length in lengths} == {2, 4}, "a later stage has shorter ones too"
    assert max(length for lengths in drawn[4:] for length in lengths) == 9
    assert [row["rollout/stage"] for row in metrics] == [1, 1, 2, 2, 3, 3, 3, 3]
    assert [row["rollout/prompt_length"] for row in metrics] == [pytest.approx(np.mean(lengths)) for lengths in drawn]
    assert [row["rollout/prompt_length_max"] for row in metrics] == [max(lengths) for lengths in drawn]
    Evaluator(make(), one).evaluate(1, VERSION)
    assert words(engines.calls[-1][0]) == LENGTHS and engines.calls[-1][1] == LONGEST


def test_a_resumed_run_draws_what_one_without_a_break_would_have_drawn(make: Any, tmp_path: Path) -> None:
    straight: Any = Engines()
    one = collector(make(), straight)
    for step in range(7):
        one.collect(step, VERSION, {})
    for broken in range(7):  # within a stage and where one ends
        first, then = Engines(), Engines()
        before: Any = collector(make(), first)
        for step in range(broken):
            before.collect(step, VERSION, {})
        after: Any = collector(make(), then)
        after.prompts.restore(json.loads(json.dumps(before.prompts.state())))
        for step in range(broken, 7):
            after.collect(step, VERSION, {})
        assert first.calls + then.calls == straight.calls
