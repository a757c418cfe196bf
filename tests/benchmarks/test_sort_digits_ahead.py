"""How many updates a run ahead needs is counted against the runs in turn, in the mean over seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import sort_digits_ahead
from slimefsdp.config import load_config

ROOT = Path(__file__).resolve().parents[2]


def run(*exact: float) -> dict[str, Any]:
    return {
        "after": exact[-1],
        "curve": [{"step": 5 * place, "updates": 10 * place, "exact": value} for place, value in enumerate(exact)],
    }


def test_updates_are_counted_to_the_first_mean_over_seeds_that_is_not_below_the_threshold() -> None:
    runs = {
        "in turn": {"0": run(0.3, 0.8, 0.96, 0.9), "1": run(0.3, 0.8, 0.9, 0.94)},
        "late": {"0": run(0.3, 0.8, 0.8, 0.9), "1": run(0.3, 0.8, 0.8, 0.91)},
        "never": {"0": run(0.3, 0.8, 0.96, 0.4), "1": run(0.3, 0.8, 0.8, 0.4)},
    }
    found = sort_digits_ahead.summary(runs)
    assert found["threshold"] == pytest.approx(0.92 - 0.02)
    assert [found[name]["updates"] for name in runs] == [20, 30, None]
    assert [found[name]["times_in_turn"] for name in runs] == [1, 1.5, None]
    assert found["late"]["updates_of_seeds"] == {"0": 30, "1": 30}
    assert found["never"]["updates_of_seeds"] == {"0": 20, "1": None}
    assert found["late"]["after"] == pytest.approx(0.905)
    assert sort_digits_ahead.table(found).splitlines()[2:] == [
        "| in turn | 20 | 1.00 | 0.920 |",
        "| late | 30 | 1.50 | 0.905 |",
        "| never | never |  | 0.400 |",
    ]


@pytest.mark.parametrize("name", ["in turn", "one step ahead", "asynchronous", "asynchronous, TIS"])
def test_runs_have_settings_that_the_demo_takes(name: str) -> None:
    config = load_config(ROOT / sort_digits_ahead.GRPO, sort_digits_ahead.settings_of(name))
    assert bool(config.rollout.max_staleness) == ("in turn" not in name)
    assert config.evaluation.interval_steps == 5
    assert (config.correction.method == "none") == ("in turn" in name)
