"""What a step of the rollout loop asks of engines, policy and critic, and when."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.engines.pool import SampledResponse
from actors.loop import RolloutLoop
from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.monitoring.progress import GRPO_COLUMNS
from slimefsdp.results import SyncReport
from tests.support.drawing import DrawsAtOnce

STEPS = 6


def parity(record: dict[str, Any], response: str, finished: bool) -> dict[str, float]:
    return {"reward": float(len(response) % 2)}


class Engines(DrawsAtOnce):
    """Two tokens for every prompt, of which nothing depends on the weights."""

    version = -1

    def update_from(self, group: Any, *, aborts: bool = False) -> int:
        self.version = group.update_weights([]).version
        return self.version

    def generate(
        self, prompts: Sequence[Any], *, samples_per_prompt: int, seed: Sequence[int], greedy: bool = False, **more: Any
    ) -> tuple[int, list[SampledResponse]]:
        samples = [
            SampledResponse(index, number, [5, 6, 7], 2, [-1.0, -1.0], "x" * number, True)
            for index in range(len(prompts))
            for number in range(samples_per_prompt)
        ]
        for sample in samples:
            more["each"](sample)
        return self.version, samples


class Critic:
    """Notes what it is trained with."""

    def __init__(self) -> None:
        self.lambdas: list[float | None] = []

    def compute_values(self, batch: RolloutBatch) -> np.ndarray:
        return np.zeros(batch.num_response_tokens, dtype=np.float32)

    def train_step(
        self, batch: RolloutBatch, *, gae_lambda: float | None = None, kl_coefficient: float | None = None
    ) -> dict[str, float]:
        assert batch.values is not None and kl_coefficient is None
        self.lambdas.append(gae_lambda)
        return {"updates": 1.0, "loss": 0.5}

    def sleep(self) -> None:
        """It has no device to leave."""


class Group:
    """Counts its updates, which are its version."""

    reference_group = None

    def __init__(self, critic: Critic | None = None) -> None:
        self.critic, self.updates = critic, 0

    def train_step(self, batch: RolloutBatch) -> dict[str, float]:
        self.updates += 1
        return {"updates": 1.0, "loss": 0.5}

    def update_weights(self, receivers: Sequence[Any]) -> SyncReport:
        return SyncReport(version=self.updates, bytes=0, seconds=0.0)


@pytest.fixture
def make(tmp_path: Path) -> Any:
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": f"p{n}"}) + "\n" for n in range(4)))

    def config(**sections: Any) -> RunConfig:
        tree: dict[str, Any] = {
            "run": {"steps": STEPS},
            "model": {"path": "m"},
            "optim": {"total_updates": 100},
            "data": {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "heldout")},
            "rollout": {
                "prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 4, "reward": f"{__name__}:parity",
            },
        }  # fmt: skip
        for name, values in sections.items():
            tree[name] = {**tree.get(name, {}), **values} if isinstance(values, dict) else values
        return config_from_dict(tree)

    return config


def rows_of_run(config: RunConfig, group: Any) -> list[dict[str, float]]:
    engines: Any = Engines()
    loop = RolloutLoop(config, group, engines)
    loop.before_training(evaluates=False)
    return [loop.step(step) for step in range(STEPS)]


@pytest.mark.parametrize(
    ("every", "evaluates_every", "saves_every", "versions"),
    [
        (1, None, None, [1, 2, 3, 4, 5, 6]),
        (2, None, None, [0, 2, 2, 4, 4, 6]),
        (4, 3, None, [0, 0, 3, 4, 4, 6]),
        (4, None, 3, [0, 0, 3, 4, 4, 6]),
    ],
)
def test_engines_take_the_weights_when_they_are_due_or_evaluated_or_saved(
    make: Any, every: int, evaluates_every: int | None, saves_every: int | None, versions: list[int]
) -> None:
    config = make(
        rollout={"sync_interval_steps": every},
        evaluation={"interval_steps": evaluates_every},
        checkpoint={"interval_steps": saves_every},
    )
    rows = rows_of_run(config, Group())
    assert [row["weight_version"] for row in rows] == versions
    evaluated = [step + 1 for step, row in enumerate(rows) if "eval/reward" in row]
    assert evaluated == ([] if evaluates_every is None else [3, 6])


def test_a_run_is_known_by_each_of_its_held_out_sets(make: Any, tmp_path: Path) -> None:
    heldout = {name: str(tmp_path / "heldout.jsonl") for name in ("odd", "all")}
    (tmp_path / "one.jsonl").write_text(json.dumps({"prompt": "p1"}))
    heldout["odd"] = str(tmp_path / "one.jsonl")

    def rows_and_loop(heldout: Any, **evaluation: Any) -> tuple[list[dict[str, float]], RolloutLoop]:
        config = make(
            data={"heldout": heldout},
            evaluation={"interval_steps": 3, **evaluation},
            run={"dir": str(tmp_path / "run")},
        )
        loop = RolloutLoop(config, Group(), Engines())  # type: ignore[arg-type]
        return [loop.before_training(evaluates=True), *(loop.step(step) for step in range(STEPS))], loop

    rows, loop = rows_and_loop(heldout, samples_per_prompt=2)
    evaluated = {name for row in rows for name in row if name.startswith("eval/")}
    assert evaluated == {"eval/odd/reward", "eval/all/reward"}
    assert [("eval/odd/reward" in row, "eval/all/reward" in row) for row in rows] == [
        (step in (0, 3, 6),) * 2 for step in range(STEPS + 1)
    ]
    rows[0]["eval/all/reward"], rows[-1]["eval/odd/reward"] = 0.25, 0.75
    closing = "held-out sampled reward of odd 0.500 -> 0.750 (1 prompts x 2 samples), "
    assert closing + "reward of all 0.250 -> 0.500 (4 prompts x 2 samples) in" in loop.summary(rows)
    assert [column.metric for column in loop.columns if column.metric.startswith("eval/")] == [
        "eval/odd/exact",
        "eval/all/exact",
    ]

    rows, loop = rows_and_loop(str(tmp_path / "heldout.jsonl"))
    assert "held-out sampled reward 0.000 -> 0.000 (4 prompts x 1 samples) in" in loop.summary(rows)
    assert loop.columns == GRPO_COLUMNS
    unasked = RolloutLoop(make(), Group(), Engines())  # type: ignore[arg-type]
    assert not any(column.metric.startswith("eval/") for column in unasked.columns), "none is ever evaluated"
    rows, loop = rows_and_loop(str(tmp_path / "heldout.jsonl"), temperature=0.0)
    assert "held-out greedy reward 0.000 -> 0.000 (4 prompts x 1 samples) in" in loop.summary(rows)
    assert [column.metric for column in loop.columns if column.title == "held-out"] == ["eval/exact"]


def test_the_critic_is_trained_alone_at_first_on_rewards_to_go_and_then_as_later_on(make: Any) -> None:
    critic = Critic()
    group = Group(critic)
    rows = rows_of_run(make(algorithm="ppo", critic={"warmup_steps": 2}), group)
    assert [row["updates"] for row in rows] == [0, 0, 1, 1, 1, 1] and group.updates == 4
    assert critic.lambdas == [1.0, 1.0, None, None, None, None]
    assert all(row["critic/updates"] == 1 for row in rows)


class ColocatedEngines(Engines):
    """Notes what the loop has them and their trainer do; `sleep`s are those outside of steps."""

    def __init__(self, group: Any) -> None:
        self.group, self.events, self.are_awake = group, [], False  # type: ignore[var-annotated]

    def update_from(self, group: Any, *, aborts: bool = False) -> int:
        self.are_awake = True
        self.events.append("sent")
        return super().update_from(group, aborts=aborts)

    def take_turn(self, seconds: dict[str, float]) -> None:
        if not self.are_awake:
            self.update_from(self.group)
            seconds["turn"] = seconds.get("turn", 0.0) + 1.0

    def end_turn(self, seconds: dict[str, float], *, wakes_trainer: bool) -> None:
        seconds["turn"] += 0.25
        self.sleep()
        self.events += ["trainer"] * wakes_trainer

    def sleep(self) -> None:
        self.are_awake = False
        self.events.append("asleep")

    def generate(self, prompts: Sequence[Any], **options: Any) -> tuple[int, list[SampledResponse]]:
        assert self.are_awake
        self.events.append("sampled")
        return super().generate(prompts, **options)


def test_colocated_engines_have_a_turn_for_each_batch_and_evaluation_and_sleep_otherwise(make: Any) -> None:
    group = Group()
    engines: Any = ColocatedEngines(group)
    config = make(rollout={"placement": "colocated"}, evaluation={"interval_steps": 3})
    loop = RolloutLoop(config, group, engines)
    loop.before_training(evaluates=True)
    turn = ["sent", "sampled", "asleep"]
    assert engines.events == turn, "the first weights, and an evaluation"
    versions = []
    for step in range(STEPS):
        engines.events.clear()
        row = loop.step(step)
        evaluates = step in (2, 5)
        assert engines.events == [*turn, "trainer", *(turn if evaluates else [])]
        assert row["seconds/turn"] == 1.25 * (1 + evaluates)
        versions.append(row["weight_version"])
    assert versions == [1, 2, 3, 4, 5, 6], "as of engines that had been sent each"
