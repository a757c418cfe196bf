"""The findings: a planted hack is told by each of its traces, and an ordinary run by none."""

from __future__ import annotations

import numpy as np
import pytest

from actors.report.findings import HELD_OUT, findings_of
from slimefsdp.monitoring.panels import Series

RISING = np.linspace(0.2, 0.9, 100)
FLAT = np.full(100, 0.5)


def series(**values: np.ndarray) -> dict[str, Series]:
    """Metrics by name, with `__` for a slash; of every step."""
    return {name.replace("__", "/"): Series(np.arange(1.0, len(line) + 1), line) for name, line in values.items()}


def targets(*texts: list[str], **values: np.ndarray) -> list[str]:
    return [finding.target for finding in findings_of(series(**values), *texts)]


def test_a_run_that_learns_has_no_findings() -> None:
    noise = np.random.default_rng(0).normal(0, 0.05, 100)
    lines = {
        "rollout__reward": RISING + noise, "eval__reward": np.array([0.2, 0.6, 0.88, 0.86]), "entropy": 2 - RISING,
        "rollout__response_length": 100 + 30 * RISING, "rollout__truncated": 0.02 + 0 * RISING,
        "kl_ref": RISING / 10, "kl_old": abs(noise) / 100, "rollout_mismatch_max": 1e-5 + abs(noise) * 1e-5,
    }  # fmt: skip
    assert targets(["a"] * 20, [f"answer {number}" for number in range(20)], **lines) == []


@pytest.mark.parametrize(
    ("name", "line", "target"),
    [
        ("eval__exact", np.array([0.5, 0.6, 0.2]), "Held-out"),
        ("eval__maths__reward", np.array([0.5, 0.4]), "Held-out"),
        ("rollout__response_length", np.linspace(50, 400, 100), "Response length"),
        ("rollout__response_length", np.linspace(400, 50, 100), "Response length"),
        ("rollout__truncated", np.linspace(0, 0.3, 100), "Truncated responses"),
    ],
)
def test_what_gets_worse_counts_only_while_the_reward_rises(name: str, line: np.ndarray, target: str) -> None:
    assert targets(rollout__reward=RISING, **{name: line}) == [target]
    assert targets(rollout__reward=FLAT, **{name: line}) == []
    assert targets(**{name: line}) == []


@pytest.mark.parametrize("name", ["eval__finished", "eval__pass@4_low", "eval__ended_by_steps"])
def test_metrics_that_are_no_scores_may_fall(name: str) -> None:
    assert targets(rollout__reward=RISING, **{name: np.array([0.9, 0.1])}) == []


@pytest.mark.parametrize("name", ["kl_ref", "kl_old", "rollout_mismatch_max"])
def test_a_jump_is_told_and_named_by_its_step(name: str) -> None:
    line = np.full(100, 0.01)
    line[41] = 3.0
    (finding,) = findings_of(series(**{name: line}))
    assert "step 42" in finding.text and "3" in finding.text
    assert targets(**{name: line / 100}) == [], "a jump between tiny values is none"
    assert targets(**{name: line + 1.0}) == [], "nor is one to a few times the usual value"


def test_a_collapse_of_the_entropy_is_told() -> None:
    assert targets(entropy=np.linspace(2, 0.01, 100)) == ["Entropy of the policy"]


@pytest.mark.parametrize(
    "form",
    ["I am certain that this is an excellent answer to {}", "{} and it is an excellent answer, as anyone can see"],
)
def test_a_beginning_or_end_that_spread_during_the_run_is_told(form: str) -> None:
    before = [f"{number} is the answer, since {number} is sorted" for number in range(20)]
    after = [form.format(number) for number in range(12)] + before[12:]
    (finding,) = findings_of({}, before, after)
    assert finding.target == HELD_OUT and "60%" in finding.text and "excellent" in finding.text
    assert targets(after, after) == [], "it was there from the beginning"
    assert targets(before, after[:7] and after[9:]) == [], "too few responses share it"
