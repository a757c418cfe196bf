"""`slimefsdp train` goes on when a rank or an engine is killed: the same curve, with nothing to be done by hand."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.engines.pool import EnginePool
from actors.fault_tolerance.recovery import RECOVERIES
from actors.fault_tolerance.supervisor import SupervisedGroup
from actors.loop import train
from tests.support.runs import bits, rows_of
from tests.support.waiting import PATIENCE_S

STEPS, SAMPLES = 5, 8  # of a step
judged: list[str] = []
victims: dict[int, Any] = {}  # by the number of samples judged before, who is killed then


def variety(record: dict[str, Any], response: str, finished: bool) -> dict[str, float]:
    """A reward; the moment of judging a sample is one at which ranks are idle and engines have just answered."""
    if len(judged) in victims:
        os.kill(victims[len(judged)](), signal.SIGKILL)
    judged.append(response)
    return {"reward": len(set(response)) / 10}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The group and the engines of the newest run."""
    found: dict[str, Any] = {}
    for name, kind in (("group", SupervisedGroup), ("engines", EnginePool)):

        def launch(*args: Any, name: str = name, original: Any = kind.launch, **how: Any) -> Any:
            found[name] = original(*args, **how)
            return found[name]

        monkeypatch.setattr(kind, "launch", launch)
    return found


def pid_of(engine: Any) -> int:
    return int(ray.get(engine.__ray_call__.remote(lambda _: os.getpid()), timeout=PATIENCE_S))


def straight_and_struck(
    make_config: Any, example: Path, tmp_path: Path, started: dict[str, Any], **sections: dict[str, Any]
) -> list[list[dict[str, str]]]:
    """The curves of a run and of the same one in which a rank and an engine are killed, and what both recorded."""
    curves = []
    for name in ("straight", "struck"):
        judged.clear()
        config = make_config(
            run={"dir": str(tmp_path / name), "steps": STEPS, "seed": 5},
            batch={"samples_per_update": 4},
            optim={"schedule": "cosine", "total_updates": 2 * STEPS},
            loss={"kl_coefficient": 0.1},
            data={"train": str(example / "train.jsonl")},
            rollout={
                "prompts_per_step": 2, "samples_per_prompt": 4, "max_new_tokens": 6, "engines": 1,
                "reward": f"{variety.__module__}:variety", "reward_workers": 0,
            },
            checkpoint={"interval_steps": 2},
            **sections,
        )  # fmt: skip
        train(config)
        curves.append([bits(row) for row in rows_of(config)])
        victims.update(
            {
                1 + SAMPLES: lambda: pid_of(started["engines"].receivers[0]),
                1 + 3 * SAMPLES: lambda: started["group"].health()[1].pid,  # in step 3, behind the checkpoint of step 2
            }
        )
    victims.clear()
    (line,) = (tmp_path / "struck" / RECOVERIES).read_text().splitlines()
    recovery = json.loads(line)
    assert (recovery["code"], recovery["rank"], recovery["checkpoint_step"]) == ("worker_died", 1, 2)
    assert recovery["calls_repeated"] >= 1 and recovery["differences"] == []
    assert not (tmp_path / "straight" / RECOVERIES).exists()
    return curves


# with the run of test_loop.py that is extended: a group, engines, a recovery from the call log, a resume, an export
@pytest.mark.default_tier
def test_a_killed_rank_and_a_killed_engine_leave_the_curve_as_it_is(
    cluster: None, make_config: Any, example: Path, tmp_path: Path, started: dict[str, Any], capsys: Any
) -> None:
    reference = {"dp": 2, "update_interval_steps": 1}
    straight, struck = straight_and_struck(make_config, example, tmp_path, started, reference=reference)
    assert straight == struck
    assert "engines were lost" in capsys.readouterr().err
